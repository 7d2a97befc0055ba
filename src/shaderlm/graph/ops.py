"""Every op in one row: its formula in words and in NumPy, its operands, the numbers that describe a shape of it, what
they must satisfy, and the least that the op has to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InputError
from ..formats.weight_formats import WEIGHT_FORMATS
from . import conditions, cost, formulas, reference
from .batch import CONTEXTS, SPLIT_KEYS, context_class

REQUIRED = object()


@dataclass(frozen=True)
class Op:
    """`dims` names what a shape consists of; REQUIRED or a default, which may be a function of the others.

    `compute` is the formula in NumPy, `flops` the arithmetic that it takes. `parts` says what is touched of an operand
    where that is not all of it; "" is what a kernel keeps for itself between its dispatches. `conditions` raise an
    InputError for dims that do not go together.
    """

    name: str
    formula: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, Any]
    compute: formulas.Compute
    flops: cost.Flops
    parts: Mapping[str, cost.Part] = field(default_factory=dict)
    conditions: tuple[conditions.Condition, ...] = ()

    def part(self, operand: str, dims: Mapping[str, Any], position: int) -> float:
        """What is touched of an operand: a part, 0 … 1, or rows of a table or cache."""
        rule = self.parts.get(operand)
        return rule(dims, position) if rule else 1.0


def _of(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda dims: dims[name]


# `heads` rows of `width` for each token. `batched`: the true number of tokens is in the batch.
_NORM = {"tokens": REQUIRED, "heads": 1, "width": REQUIRED, "eps": 1e-6, "batched": False}
_VALUES = {"tokens": 1, "count": REQUIRED, "batched": False}
_POINTWISE = {"tokens": 1, "count": REQUIRED, "period": _of("count"), "batched": False}
_LINEAR = {
    "tokens": REQUIRED,
    "K": REQUIRED,
    "N": REQUIRED,
    "format": "f32",
    "bias": False,
    "prologue": "none",  # what is done with x before the product
    "epilogue": "none",  # what is done with the sums
    "eps": 1e-6,  # of the prologue
    **dict.fromkeys(("Hq", "Hkv", "D"), 0),  # of the epilogue rope_kv_write, as far as "cache"
    "rotary": _of("D"),
    "cache": "f32",
    "rounded": False,  # out is rounded to 16 bits in blocks of 32, for a product with the prologue of that name
    "batched": False,  # the true number of rows is in the batch
}
# Queries, keys and values on their way to attention. They may be columns of wider rows.
_ROTATED = {
    **dict.fromkeys(("tokens", "Hq", "Hkv", "D"), REQUIRED),
    "rotary": _of("D"),
    "interleaved": False,
    "cache": "f32",
    **{f"{name}_first": 0 for name in "qkv"},
    "q_stride": lambda dims: dims["Hq"] * dims["D"],
    **{f"{name}_stride": lambda dims: dims["Hkv"] * dims["D"] for name in "kv"},
}
_ROTATED_PARTS = {
    **dict.fromkeys(("table", *cost.CACHES), cost.tokens),
    **{name: cost.columns(name, heads) for name, heads in (("q", "Hq"), ("k", "Hkv"), ("v", "Hkv"))},
}

# What becomes of scores, and which keys rows see.
_SCORES = {
    "scale": None,
    "window": 0,  # how many keys a row sees, its own included; 0: all
    "softcap": 0.0,  # 0: none
    "sinks": False,
    "context": lambda dims: context_class(dims.get("keys", 0) or SPLIT_KEYS + 1, dims["D"]),
    "paged": False,  # without a page table: one sequence, whose pages are the pool from row 0 on
    "runs": True,  # rows may belong to runs, if there are enough for one
    "keys": 0,  # where known: how many the last row sees, of consecutive rows of one sequence
}

# Rows of the batch, and sequence slots. Only the sizes of operands depend on them, no kernel does.
_SIZES = dict.fromkeys(("tokens", "slots"), _of("rows"))

_TABLE = (
    Op(
        "rms_norm",
        "x / sqrt(mean(x²) + eps)",
        ("x", "batch"),
        ("out",),
        _NORM,
        formulas.rms_norm,
        cost.per_value(3, "tokens", "heads", "width"),
    ),
    Op(
        "rms_norm_mul",
        "weight · x / sqrt(mean(x²) + eps), with a residual added to that",
        ("x", "weight", "residual", "batch"),
        ("out",),
        {**_NORM, "residual": False},
        formulas.rms_norm_mul,
        cost.normed,
    ),
    Op(
        "add_rms_norm",
        "sum = a + b; out = weight · sum / sqrt(mean(sum²) + eps)",
        ("a", "b", "weight", "batch"),
        ("sum", "out"),
        _NORM,
        formulas.add_rms_norm,
        cost.per_value(5, "tokens", "heads", "width"),
    ),
    Op(
        "rms_norm_add_rms_norm",
        "sum = a + weight · b / sqrt(mean(b²) + eps); out = next_weight · sum / sqrt(mean(sum²) + eps)",
        ("a", "b", "weight", "next_weight", "batch"),
        ("sum", "out"),
        _NORM,
        formulas.rms_norm_add_rms_norm,
        cost.per_value(9, "tokens", "heads", "width"),
    ),
    Op(
        "layer_norm",
        "weight · (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) + bias",
        ("x", "weight", "bias", "batch"),
        ("out",),
        {**_NORM, "bias": False},
        formulas.layer_norm,
        cost.per_value(7, "tokens", "heads", "width"),
    ),
    Op(
        "linear_q4gsw",
        "bias[n] + Σ_k x[m, k] · (nibble(n, k) − 8) · scales[k / group_size, n]",
        ("x", "weight", "scales", "bias"),
        ("out",),
        {"tokens": REQUIRED, "K": REQUIRED, "N": REQUIRED, "group_size": 32, "bias": False, "scales": "f32"},
        formulas.linear_q4gsw,
        cost.per_value(2, "tokens", "N", "K"),
        conditions=(conditions.one_group_is_enough,),
    ),
    # y[n] = bias[n] + Σ_k p[k] · w[n, k], p = prologue(x). Prologues: rms_norm: norm_weight · x / sqrt(mean(x²) + eps);
    # rms_norm_add_rms_norm: the same of sum = skip + post_weight · x / sqrt(mean(x²) + eps). Epilogues: add: residual +
    # y; silu_mul: silu(y[2i]) · y[2i + 1], gelu_mul: gelu(y[2i]) · y[2i + 1]; gelu, gelu_erf: of y[n];
    # rope_kv_write: the rows of w are queries, keys and values; out = rope(queries), the others are cached. `rounded`
    # and the prologue of that name say how numbers lie between two products of one row, which nobody else reads.
    Op(
        "linear",
        "epilogue(bias[n] + Σ_k prologue(x)[t, k] · w[n, k])",
        (
            *("x", "skip", "post_weight", "norm_weight", "weight", "bias", "residual"),
            *("batch", "table", "k_cache", "v_cache"),
        ),
        ("out", "sum", "k_cache", "v_cache"),
        _LINEAR,
        formulas.linear,
        cost.per_value(2, "tokens", "N", "K"),  # prologue and epilogue are next to nothing
        dict.fromkeys(("table", *cost.CACHES), cost.tokens),
        (
            conditions.blocks_are_whole,
            conditions.rows_are_pairs,
            conditions.rows_are_heads,
            conditions.rounded_in_blocks,
        ),
    ),
    Op(
        "route_experts",
        "ids[t] = the `used` largest of gating(logits[t]) + bias; factors = scale · gating(logits[t])[ids]",
        ("logits", "bias", "batch"),
        ("ids", "factors"),
        {
            **dict.fromkeys(("tokens", "experts", "used"), REQUIRED),
            "gating": "softmax",  # over all experts; softmax_used: over those that are chosen
            "bias": False,  # it counts for choosing only
            "normalise": False,  # factors of a row add up to `scale`
            "scale": 1.0,
            "batched": False,
        },
        formulas.route_experts,
        cost.per_value(5, "tokens", "experts"),
        conditions=(conditions.experts_are_there,),
    ),
    # w is [experts · N, K], expert after expert; y[t, j, n] = Σ_k x · w[ids[t, j] · N + n, k]; x is [tokens, K].
    # bias [experts · N] is added to y. combine: none: y; silu_mul, swiglu_clamped: of y[t, j, 2i] and y[t, j, 2i + 1];
    # sum: x is [tokens, used, K], out [tokens, N], with residual [tokens, N] added.
    Op(
        "linear_experts",
        "y[t, j] = x[t] · w[ids[t, j]]ᵀ, silu_mul of its pairs, or Σ_j factors[t, j] · x[t, j] · w[ids[t, j]]ᵀ",
        ("x", "norm_weight", "weight", "bias", "ids", "factors", "residual", "batch"),
        ("out",),
        {
            **dict.fromkeys(("tokens", "experts", "used", "K", "N"), REQUIRED),
            "format": "f32",
            "bias": False,
            "prologue": "none",  # what is done with x before the product
            "combine": "none",
            "residual": False,
            "eps": 1e-6,  # of the prologue
            "batched": False,
        },
        formulas.linear_experts,
        cost.per_value(2, "tokens", "used", "N", "K"),
        dict.fromkeys(("weight", "bias"), cost.chosen),
        (
            conditions.blocks_are_whole,
            conditions.experts_are_there,
            conditions.experts_rows_are_pairs,
            conditions.sums_have_residuals,
            conditions.experts_prologue,
        ),
    ),
    Op(
        "add_gated",
        "a + sigmoid(x[t] · gate) · b",
        ("a", "b", "x", "gate", "batch"),
        ("out",),
        {**dict.fromkeys(("tokens", "width", "K"), REQUIRED), "batched": False},
        formulas.add_gated,
        cost.gated,
    ),
    Op(
        "embedding",
        "factor · w[id of row t, :]",
        ("batch", "tokens", "weight"),
        ("out",),
        {"tokens": REQUIRED, "N": REQUIRED, "K": REQUIRED, "format": "f32", "factor": 1.0},
        formulas.embedding,
        cost.scaled,
        {"weight": cost.ratio("tokens", "N")},
        (conditions.blocks_are_whole,),
    ),
    Op(
        "add_positions",
        "x[t, :] + w[position of row t, :]",
        ("x", "batch", "weight"),
        ("out",),
        {"tokens": REQUIRED, "N": REQUIRED, "K": REQUIRED, "format": "f32"},
        formulas.add_positions,
        cost.per_value(1, "tokens", "K"),
        {"weight": cost.ratio("tokens", "N")},
        (conditions.blocks_are_whole,),
    ),
    # window: c > position − window too. softcap: the scaled scores are softcap · tanh(score / softcap). sinks: exp(
    # sinks[h]) is added to the sum that softmax divides by, as a key without a value.
    Op(
        "attention",
        "softmax_c(scale · q[t, h] · k_cache[row of c, h / group]) · v_cache, c ≤ position of row t",
        ("q", "k_cache", "v_cache", "batch", "page_table", "sinks"),
        ("out",),
        {
            **dict.fromkeys(("tokens", "Hq", "Hkv", "D"), REQUIRED),
            "cache": "f32",
            **_SCORES,
        },
        formulas.attention,
        cost.attended,
        {**dict.fromkeys(cost.CACHES, cost.filled), "": cost.split},
        (conditions.heads_are_grouped, conditions.rows_see_their_own_keys),
    ),
    Op(
        "kv_write",
        "k_cache[slot of row t] = k[t]; v_cache[slot of row t] = v[t]",
        ("k", "v", "batch", "k_cache", "v_cache"),
        ("k_cache", "v_cache"),
        {**dict.fromkeys(("tokens", "Hkv", "D"), REQUIRED), "cache": "f32"},
        formulas.kv_write,
        cost.nothing,
        dict.fromkeys(cost.CACHES, cost.tokens),
    ),
    Op(
        "rope_kv_write",
        "out = rope(q); k_cache[slot of row t] = rope(k)[t]; v_cache[slot of row t] = v[t]",
        ("q", "k", "v", "batch", "table", "k_cache", "v_cache"),
        ("out", "k_cache", "v_cache"),
        _ROTATED,
        formulas.rope_kv_write,
        cost.rotated,
        _ROTATED_PARTS,
        (conditions.heads_are_grouped, conditions.rotary_fits),
    ),
    Op(
        "rms_norm_rope_kv_write",
        "as rope_kv_write, of q_norm · q / sqrt(mean(q²) + eps) for every head, and of k with k_norm",
        ("q", "k", "v", "q_norm", "k_norm", "batch", "table", "k_cache", "v_cache"),
        ("out", "k_cache", "v_cache"),
        {**_ROTATED, "eps": 1e-6},
        formulas.rms_norm_rope_kv_write,
        cost.normed_and_rotated,
        _ROTATED_PARTS,
        (conditions.heads_are_grouped, conditions.rotary_fits),
    ),
    Op(
        "rms_norm_rope_attention",
        "rms_norm_rope_kv_write, then attention of what it gives for q over the caches as they are then",
        ("q", "k", "v", "q_norm", "k_norm", "batch", "table", "k_cache", "v_cache", "page_table", "sinks"),
        ("out", "k_cache", "v_cache"),
        {**_ROTATED, "eps": 1e-6, **_SCORES},
        formulas.rms_norm_rope_attention,
        cost.normed_rotated_and_attended,
        {**_ROTATED_PARTS, **dict.fromkeys(cost.CACHES, cost.filled)},
        (conditions.heads_are_grouped, conditions.rotary_fits, conditions.rows_see_their_own_keys),
    ),
    Op(
        "rms_norm_rope_attention_linear",
        "linear of what rms_norm_rope_attention gives",
        (
            *("q", "k", "v", "q_norm", "k_norm", "batch", "table", "k_cache", "v_cache", "page_table", "sinks"),
            *("weight", "bias", "residual"),
        ),
        ("out", "k_cache", "v_cache"),
        {
            **_ROTATED,
            "eps": 1e-6,
            **_SCORES,
            "K": lambda dims: dims["Hq"] * dims["D"],
            "N": REQUIRED,
            "format": "f32",
            "bias": False,
            "epilogue": "none",  # or add: residual + y
        },
        formulas.rms_norm_rope_attention_linear,
        cost.normed_rotated_attended_and_multiplied,
        {**_ROTATED_PARTS, **dict.fromkeys(cost.CACHES, cost.filled)},
        (
            conditions.heads_are_grouped,
            conditions.rotary_fits,
            conditions.rows_see_their_own_keys,
            conditions.heads_are_columns,
            conditions.blocks_are_whole,
            conditions.nothing_or_added,
        ),
    ),
    Op(
        "rope",
        "(u·cos − v·sin, u·sin + v·cos) for each pair of a head, cos and sin of the position of its row",
        ("x", "batch", "table"),
        ("out",),
        {**dict.fromkeys(("tokens", "H", "D"), REQUIRED), "rotary": _of("D"), "interleaved": False},
        formulas.rope,
        cost.per_value(3, "tokens", "H", "rotary"),
        {"table": cost.tokens},
        (conditions.rotary_fits,),
    ),
    *(
        Op(
            name,
            formula,
            ("a", "b", "batch"),
            ("out",),
            _POINTWISE,
            formulas.pairwise(compute),
            cost.per_value(operations, "count"),
            conditions=(conditions.period_divides,),
        )
        for name, formula, compute, operations in (
            ("add", "a + b", reference.add, 1),
            ("mul", "a · b", reference.mul, 1),
            ("silu_mul", "a / (1 + exp(−a)) · b", reference.silu_mul, 5),
            ("gelu_mul", "a / 2 · (1 + tanh(√(2 / π) · (a + 0.044715 a³))) · b", reference.gelu_mul, 10),
            (
                "swiglu_clamped",
                "g / (1 + exp(−1.702 g)) · (1 + b between −7 and 7), g = min(a, 7)",
                reference.swiglu_clamped,
                10,
            ),
        )
    ),
    *(
        Op(
            name,
            formula,
            ("x", "batch"),
            ("out",),
            {**_VALUES, **dict.fromkeys(extra, REQUIRED)},
            compute,
            cost.per_value(operations, "count"),
            conditions=(conditions.rows_are_whole,),
        )
        for name, formula, extra, compute, operations in (
            ("gelu", "x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³)))", (), formulas.gelu, 9),
            ("gelu_erf", "x / 2 · (1 + erf(x / √2))", (), formulas.gelu_erf, 5),
            ("relu_squared", "max(x, 0)²", (), formulas.relu_squared, 2),
            ("scale", "factor · x", ("factor",), formulas.scale, 1),
            ("softcap", "cap · tanh(x / cap)", ("cap",), formulas.softcap, 3),
        )
    ),
    Op(
        "slice",
        "x[:, first : first + count]",
        ("x", "batch"),
        ("out",),
        {"tokens": REQUIRED, "width": REQUIRED, "first": 0, "count": REQUIRED, "batched": False},
        formulas.slice_columns,
        cost.nothing,
        {"x": cost.ratio("count", "width")},
        (conditions.columns_are_there,),
    ),
    Op(
        "take_rows",
        "x[row of output r, :]",
        ("x", "outputs", "batch"),
        ("out",),
        {"tokens": REQUIRED, "rows": REQUIRED, "width": REQUIRED},
        formulas.take_rows,
        cost.nothing,
        {"x": cost.ratio("rows", "tokens")},
    ),
    Op("copy", "x", ("x",), ("out",), {"count": REQUIRED}, formulas.copy, cost.nothing),
    Op(
        "fma_chain",
        "f(f(… f(x))), 8 · rounds times, f(v) = 0.75 v + 0.25",
        ("x",),
        ("out",),
        {"count": REQUIRED, "rounds": REQUIRED},
        formulas.fma_chain,
        cost.per_value(16, "count", "rounds"),
    ),
    Op(
        "matrix_chain",
        "rounds · a · bᵀ for each of count, a is the first `rows` rows of x, b the others",
        ("x",),
        ("out",),
        {"count": REQUIRED, "rounds": REQUIRED, "rows": REQUIRED, "columns": REQUIRED, "K": REQUIRED},
        formulas.matrix_chain,
        cost.per_value(2, "count", "rounds", "rows", "columns", "K"),
    ),
    Op(
        "argmax",
        "lowest i with x[r, i] = max x[r]",
        ("x",),
        ("out",),
        {"rows": REQUIRED, "width": REQUIRED},
        formulas.argmax,
        cost.per_value(1, "rows", "width"),
    ),
    Op(
        "sample",
        "tokens[slot of output r] = lowest i with Σ_{j ≤ i} p[j] > u · Σ p, p = softmax(logits[r] / temperature) where "
        "top_k, top_p and min_p keep it, u of seed and position; advance: the row becomes that of the next step",
        ("logits", "outputs", "batch", "page_table", "tokens", "counts"),
        ("tokens", "batch", "counts"),
        {
            "rows": REQUIRED,  # of logits: the most outputs that a step may have
            "width": REQUIRED,
            "greedy": False,  # every row takes the largest logit
            "advance": False,
            "paged": False,  # the next row of the pool comes from the page table
            "counted": False,  # counts[slot, token] + 1
            **_SIZES,
            "pages": _of("rows"),  # of page_table
        },
        formulas.sample,
        cost.sampled,
        {"counts": cost.ratio("rows", "width")},
    ),
    Op(
        "adjust_logits",
        "logits[r] with the penalties, biases and mask of output r",
        ("logits", "outputs", "adjustments", "batch", "counts", "biases", "masks"),
        ("out",),
        {**dict.fromkeys(("rows", "width"), REQUIRED), **_SIZES, "biases": 1, "masks": 1},
        formulas.adjust_logits,
        cost.per_value(5, "rows", "width"),
    ),
    Op(
        "logprobs",
        "log softmax(logits[r]) of the token of output r, and of the most likely ones that it wants",
        ("logits", "outputs", "adjustments", "batch", "tokens"),
        ("out",),
        {**dict.fromkeys(("rows", "width"), REQUIRED), **_SIZES},
        formulas.logprobs,
        cost.per_value(3, "rows", "width"),
    ),
)
OPS: Mapping[str, Op] = {op.name: op for op in _TABLE}


PROLOGUES = ("none", "rounded", "rms_norm", "rms_norm_add_rms_norm")
EPILOGUES = ("none", "add", "silu_mul", "gelu_mul", "gelu", "gelu_erf", "rope_kv_write")
_CHOICES = {
    "scales": ("f32", "f16"),
    "cache": ("f32", "f16"),
    "format": tuple(WEIGHT_FORMATS),
    "prologue": PROLOGUES,
    "epilogue": EPILOGUES,
    "context": CONTEXTS,
    "gating": reference.GATINGS,
    "combine": ("none", *conditions.EXPERT_GATES, "sum"),
}
_SWITCHES = {
    *("bias", "interleaved", "batched", "paged", "runs", "greedy", "advance", "counted", "sinks", "normalise"),
    *("residual", "rounded"),
}
_MAY_BE_ZERO = {"Hq", "Hkv", "D", "rotary"}  # heads: of a product without rope


# Layers of a model repeat their shapes. Types belong to the key: True is 1 to a dict, and not to an op.
_resolved: dict[Any, dict[str, Any]] = {}
_MAX_RESOLVED = 4096


def resolve(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The full dims of an op's shape: defaults filled in, names matched in any case, values checked."""
    try:
        key = (name, *((key, type(value), value) for key, value in given.items()))
        known = _resolved.get(key)
    except TypeError:  # a value that cannot be hashed is none of ours, and is refused in words
        return _resolve(name, given)
    if known is None:
        known = _resolve(name, given)
        if len(_resolved) >= _MAX_RESOLVED:
            _resolved.clear()
        _resolved[key] = known
    return dict(known)


def _resolve(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    if name not in OPS:
        close = difflib.get_close_matches(str(name), OPS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown op {name!r}.{hint} Ops: {', '.join(OPS)}")
    declared = OPS[name].dims
    by_lower = {key.lower(): key for key in declared}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key.lower() not in by_lower:
            raise InputError(f"{name} has no dimension {key!r}; it has {', '.join(declared)}")
        if by_lower[key.lower()] in values:
            raise InputError(f"{name}: {by_lower[key.lower()]} is given twice")
        values[by_lower[key.lower()]] = value.item() if isinstance(value, np.generic) else value
    missing = [key for key, default in declared.items() if default is REQUIRED and key not in values]
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}; given: {', '.join(values) or 'nothing'}")
    for key, default in declared.items():
        if key not in values:
            values[key] = default(values) if callable(default) else default
    for key, value in values.items():
        _check(name, key, value)
    for condition in OPS[name].conditions:
        condition(name, values)
    return {key: values[key] for key in declared}


def _check(op: str, key: str, value: Any) -> None:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise InputError(f"{op}: {key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
    elif key in _SWITCHES:
        if not isinstance(value, bool):
            raise InputError(f"{op}: {key} must be True or False, got {value!r}")
    elif key in ("eps", "scale", "factor"):
        if value is not None and not isinstance(value, (int, float)):
            raise InputError(f"{op}: {key} must be a number, got {value!r}")
    elif key in ("softcap", "cap"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or (key == "cap" and not value):
            raise InputError(f"{op}: {key} must be a number above 0{' or 0' * (key != 'cap')}, got {value!r}")
    else:
        least = (
            0 if key in ("keys", "window") or key.endswith("first") or (op == "linear" and key in _MAY_BE_ZERO) else 1
        )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{op}: {key} must be a whole number of at least {least}, got {value!r}")


def label(op: str, dims: Mapping[str, Any]) -> str:
    """An op for people: a product with its prologue and epilogue, as rms_norm+linear+silu_mul."""
    parts = (dims.get("prologue", "none"), op, dims.get("epilogue", "none"))
    return "+".join(part for part in parts if part not in ("none", "rounded"))
