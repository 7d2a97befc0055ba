"""Every primitive in one row: its formula in words and in NumPy, its operands, the numbers that describe a shape of it,
what they must satisfy, and the least that it has to do. What kernels run at once is made of these: see `chains`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import conditions, cost, formulas, reference, sampling
from .batch import SPLIT_KEYS, context_class

REQUIRED = object()


@dataclass(frozen=True)
class Op:
    """`dims` names what a shape consists of; REQUIRED or a default, which may be a function of the others.

    `compute` is the formula in NumPy, `flops` the arithmetic that it takes. `touched` says what is touched of an
    operand where that is not all of it; "" is what a kernel keeps for itself between its dispatches. `conditions`
    say which dims do not go together.
    """

    name: str
    formula: str
    inputs: tuple[str, ...]
    dims: Mapping[str, Any]
    compute: formulas.Compute
    flops: cost.Flops
    touched: Mapping[str, cost.Touched] = field(default_factory=dict)
    conditions: tuple[conditions.Condition, ...] = ()
    outputs: tuple[str, ...] = ("out",)

    def part(self, operand: str, dims: Mapping[str, Any], position: int) -> float:
        """What is touched of an operand: a part, 0 … 1, or rows of a table or cache."""
        rule = self.touched.get(operand)
        return rule(dims, position) if rule else 1.0

    def wrong(self, dims: dict[str, Any]) -> str | None:
        """Where dims do not go together."""
        return next((reason for condition in self.conditions if (reason := condition(dims))), None)


def of(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """The default of a dim: another one."""
    return lambda dims: dims[name]


# `heads` rows of `width` for each token. `batched`: the true number of tokens is in the batch.
NORM = {"tokens": REQUIRED, "heads": 1, "width": REQUIRED, "eps": 1e-6, "batched": False}
_VALUES = {"tokens": 1, "count": REQUIRED, "batched": False}
_POINTWISE = {"tokens": 1, "count": REQUIRED, "period": of("count"), "batched": False}
LINEAR = {"tokens": REQUIRED, "K": REQUIRED, "N": REQUIRED, "format": "f32", "bias": False, "batched": False}

# What becomes of scores, and which keys rows see.
SCORES = {
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
_SIZES = dict.fromkeys(("tokens", "slots"), of("rows"))

_TABLE = (
    Op(
        "rms_norm",
        "x / sqrt(mean(x²) + eps)",
        ("x", "batch"),
        NORM,
        formulas.rms_norm,
        cost.per_value(3, "tokens", "heads", "width"),
    ),
    Op(
        "layer_norm",
        "weight · (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) + bias",
        ("x", "weight", "bias", "batch"),
        {**NORM, "bias": False},
        formulas.layer_norm,
        cost.per_value(7, "tokens", "heads", "width"),
    ),
    Op(
        "linear_q4gsw",
        "bias[n] + Σ_k x[m, k] · (nibble(n, k) − 8) · scales[k / group_size, n]",
        ("x", "weight", "scales", "bias"),
        {"tokens": REQUIRED, "K": REQUIRED, "N": REQUIRED, "group_size": 32, "bias": False, "scales": "f32"},
        formulas.linear_q4gsw,
        cost.per_value(2, "tokens", "N", "K"),
        conditions=(conditions.one_group_is_enough,),
    ),
    Op(
        "linear",
        "bias[n] + Σ_k x[t, k] · w[n, k]",
        ("x", "weight", "bias", "batch"),
        LINEAR,
        formulas.linear,
        cost.per_value(2, "tokens", "N", "K"),
        conditions=(conditions.blocks_are_whole,),
    ),
    Op(
        "route_experts",
        "ids[t] = the `used` largest of gating(logits[t]) + bias; factors = scale · gating(logits[t])[ids], times "
        "expert_scale[ids]; shared: then experts, sigmoid(logits[t, experts])",
        ("logits", "bias", "expert_scale", "batch"),
        {
            **dict.fromkeys(("tokens", "experts", "used"), REQUIRED),
            "gating": "softmax",  # over all experts; softmax_used: over those that are chosen
            "bias": False,  # it counts for choosing only
            "normalise": False,  # factors of a row add up to `scale`
            "scale": 1.0,
            "scaled": False,  # experts have factors of their own
            "shared": False,  # one more expert, for every row: logits have its gate after those of the others
            "batched": False,
        },
        formulas.route_experts,
        cost.per_value(5, "tokens", "experts"),
        conditions=(conditions.experts_are_there,),
        outputs=("ids", "factors"),
    ),
    # w is [experts · N, K], expert after expert; x is [tokens, K], or [tokens, used, K] for a sum.
    Op(
        "linear_experts",
        "y[t, j] = x[t] · w[ids[t, j]]ᵀ + bias[ids[t, j]]; combine sum: Σ_j factors[t, j] · y[t, j], y of x[t, j]",
        ("x", "weight", "bias", "ids", "factors", "batch"),
        {
            **dict.fromkeys(("tokens", "experts", "used", "K", "N"), REQUIRED),
            "format": "f32",
            "bias": False,
            "combine": "none",  # or sum
            "batched": False,
        },
        formulas.linear_experts,
        cost.per_value(2, "tokens", "used", "N", "K"),
        dict.fromkeys(("weight", "bias"), cost.chosen),
        (conditions.blocks_are_whole, conditions.experts_are_there),
    ),
    Op(
        "add_gated",
        "a + sigmoid(x[t] · gate) · b",
        ("a", "b", "x", "gate", "batch"),
        {**dict.fromkeys(("tokens", "width", "K"), REQUIRED), "batched": False},
        formulas.add_gated,
        cost.gated,
    ),
    Op(
        "embedding",
        "w[id of row t, :]",
        ("batch", "tokens", "weight"),
        {"tokens": REQUIRED, "N": REQUIRED, "K": REQUIRED, "format": "f32"},
        formulas.embedding,
        cost.nothing,
        {"weight": cost.ratio("tokens", "N")},
        (conditions.blocks_are_whole,),
    ),
    Op(
        "add_positions",
        "x[t, :] + w[position of row t, :]",
        ("x", "batch", "weight"),
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
        {
            **dict.fromkeys(("tokens", "Hq", "Hkv", "D"), REQUIRED),
            "cache": "f32",
            **SCORES,
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
        {**dict.fromkeys(("tokens", "Hkv", "D"), REQUIRED), "cache": "f32"},
        formulas.kv_write,
        cost.nothing,
        dict.fromkeys(cost.CACHES, cost.tokens),
        outputs=("k_cache", "v_cache"),
    ),
    # Before the first token there are zeros. The state has the last kernel rows of x of a sequence, that of position p
    # at p mod kernel: rows are read while another one is written. page_table has its row before the entries of the
    # sequence.
    Op(
        "short_conv",
        "Σ_j w[c, j] · x[t − (kernel − 1) + j, c] over rows of one sequence; silu: y / (1 + exp(−y)) of it",
        ("x", "weight", "batch", "page_table", "state"),
        {
            **dict.fromkeys(("tokens", "width", "kernel"), REQUIRED),
            "silu": False,
            "single": False,  # each row is of another sequence
        },
        formulas.short_conv,
        cost.per_value(2, "tokens", "width", "kernel"),
        {"state": cost.states},
        (conditions.kernel_has_state,),
        outputs=("out", "state"),
    ),
    # x is queries and keys of Hk heads, values of Hv heads. A key head serves Hv / Hk of them, neighbours if grouped.
    # decay has the rates of all value heads, then the shifts.
    Op(
        "gated_delta_rule",
        "S ← g S + k (sigmoid(beta) (v − g Sᵀ k))ᵀ, out = Sᵀ q / √Dk, g = exp(rate · log(1 + exp(alpha + shift))), "
        "q and k divided by their lengths, row by row of a sequence",
        ("x", "alpha", "beta", "decay", "batch", "page_table", "state"),
        {
            **dict.fromkeys(("tokens", "Hk", "Hv", "Dk", "Dv"), REQUIRED),
            "grouped": False,
            "single": False,  # each row is of another sequence
        },
        formulas.gated_delta_rule,
        cost.per_value(7, "tokens", "Hv", "Dk", "Dv"),
        {"state": cost.states},
        (conditions.key_heads_are_shared,),
        outputs=("out", "state"),
    ),
    # x is v of H heads, then B and C of G groups, before a bias and silu; neighbouring heads are of one group. factors
    # has the rates of all heads, their shifts, and their skips.
    Op(
        "mamba2_scan",
        "S ← exp(rate · dt) S + dt · B vᵀ, out = Sᵀ C + skip · v, dt = log(1 + exp(delta + shift)) from dt_min to "
        "dt_max, v, B, C = silu(x + bias), row by row of a sequence",
        ("x", "bias", "deltas", "factors", "batch", "page_table", "state"),
        {
            **dict.fromkeys(("tokens", "H", "P", "N", "G"), REQUIRED),
            "dt_min": 0.0,
            "dt_max": 0.0,  # 0: no limit
            "single": False,  # each row is of another sequence
        },
        formulas.mamba2_scan,
        cost.per_value(5, "tokens", "H", "P", "N"),
        {"state": cost.states},
        (conditions.heads_are_in_groups,),
        outputs=("out", "state"),
    ),
    Op(
        "rope",
        "(u·cos − v·sin, u·sin + v·cos) for each pair of a head, cos and sin of the position of its row",
        ("x", "batch", "table"),
        {**dict.fromkeys(("tokens", "H", "D"), REQUIRED), "rotary": of("D"), "interleaved": False},
        formulas.rope,
        cost.per_value(3, "tokens", "H", "rotary"),
        {"table": cost.tokens},
        (conditions.rotary_fits,),
    ),
    # Images: what the text model does with rows of images (graph.batch says what image_rows has).
    Op(
        "attention_reach",
        "as attention, c ≤ position of row t + reach of row t",
        ("q", "k_cache", "v_cache", "batch", "page_table", "image_rows"),
        {
            **dict.fromkeys(("tokens", "Hq", "Hkv", "D"), REQUIRED),
            "cache": "f32",
            **{name: default for name, default in SCORES.items() if name != "sinks"},
        },
        formulas.attention_reach,
        cost.attended,
        {**dict.fromkeys(cost.CACHES, cost.filled), "": cost.split},
        (conditions.heads_are_grouped,),
    ),
    Op(
        "rope_by_row",
        "as rope, cos and sin of row t of the table",
        ("x", "table"),
        {**dict.fromkeys(("tokens", "H", "D"), REQUIRED), "rotary": of("D"), "interleaved": False},
        formulas.rope_by_row,
        cost.per_value(3, "tokens", "H", "rotary"),
        conditions=(conditions.rotary_fits,),
    ),
    Op(
        "rope_rows",
        "table[position of row t + its number for the axis of pair i, i]; grouped: the axes have their pairs one after "
        "the other, else in turns",
        ("table", "batch", "image_rows"),
        {
            **dict.fromkeys(("tokens", "rotary", "temporal", "vertical", "horizontal"), REQUIRED),
            "grouped": False,
        },
        formulas.rope_rows,
        cost.nothing,
        {"table": cost.tokens},
    ),
    Op(
        "put_features",
        "features[feature of row t, level] for rows that have one, or x + that; x for the others",
        ("x", "features", "image_rows"),
        {**dict.fromkeys(("tokens", "K"), REQUIRED), "levels": 1, "level": 0, "add": False},
        formulas.put_features,
        cost.per_value(1, "tokens", "K"),
    ),
    # Images: what makes features of pixels. `bytes`: those of x have 8 bits.
    Op(
        "resize",
        "Σ_j weights[i, j] · x[o, first[i] + j, c], as a whole number 0 … 255, for out[o, i, c]",
        ("x", "first", "weights"),
        {**dict.fromkeys(("outer", "size", "inner", "to", "taps"), REQUIRED), "bytes": False},
        formulas.resize,
        cost.per_value(2, "outer", "to", "inner", "taps"),
    ),
    Op(
        "concat",
        "a, then b",
        ("a", "b"),
        dict.fromkeys(("a", "b"), REQUIRED),
        formulas.concat,
        cost.nothing,
    ),
    Op(
        "patches",
        "x[corner of patch p + y · stride + 3 · i + c] · factors[c] + factors[3 + c], by c, y, i; then zeros",
        ("x", "corners", "factors"),
        {
            **dict.fromkeys(("tokens", "patch", "count"), REQUIRED),
            "width": lambda dims: 3 * dims["patch"] ** 2,
            "bytes": False,
        },
        formulas.patches,
        cost.per_value(6, "tokens", "patch", "patch"),
    ),
    Op(
        "weighted_rows",
        "Σ_j factors[t, j] · w[rows[t, j], :]",
        ("weight", "rows", "factors"),
        dict.fromkeys(("tokens", "N", "K", "taps"), REQUIRED),
        formulas.weighted_rows,
        cost.per_value(2, "tokens", "K", "taps"),
    ),
    Op(
        "attend_spans",
        "softmax_c(scale · q[t, h] · k[c, h]) · v[c, h], c from the first to before the second number of spans[t]",
        ("q", "k", "v", "spans"),
        dict.fromkeys(("tokens", "H", "D", "scale"), REQUIRED),
        formulas.attend_spans,
        cost.per_value(4, "tokens", "tokens", "H", "D"),
    ),
    Op(
        "pad_columns",
        "x[t, :], then zeros",
        ("x",),
        dict.fromkeys(("tokens", "width", "to"), REQUIRED),
        formulas.pad_columns,
        cost.nothing,
    ),
    Op(
        "clamp",
        "x, at least low and at most high",
        ("x", "low", "high"),
        dict.fromkeys(("count",), REQUIRED),
        formulas.clamp,
        cost.per_value(2, "count"),
    ),
    Op(
        "mean_rows",
        "mean_j x[group · t + j, :]",
        ("x",),
        dict.fromkeys(("tokens", "group", "width"), REQUIRED),
        formulas.mean_rows,
        cost.per_value(1, "tokens", "group", "width"),
    ),
    *(
        Op(
            name,
            formula,
            ("a", "b", "batch"),
            _POINTWISE,
            formulas.pairwise(compute),
            cost.per_value(operations, "count"),
            conditions=(conditions.period_divides,),
        )
        for name, formula, compute, operations in (
            ("add", "a + b", reference.add, 1),
            ("mul", "a · b", reference.mul, 1),
            ("silu_mul", "a / (1 + exp(−a)) · b", reference.silu_mul, 5),
            ("sigmoid_mul", "b / (1 + exp(−a))", reference.sigmoid_mul, 4),
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
            {**_VALUES, **dict.fromkeys(extra, REQUIRED)},
            compute,
            cost.per_value(operations, "count"),
            conditions=(conditions.rows_are_whole,),
        )
        for name, formula, extra, compute, operations in (
            ("gelu", "x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³)))", (), formulas.unary(reference.gelu), 9),
            ("gelu_erf", "x / 2 · (1 + erf(x / √2))", (), formulas.unary(reference.gelu_erf), 5),
            ("relu_squared", "max(x, 0)²", (), formulas.unary(reference.relu_squared), 2),
            ("scale", "factor · x", ("factor",), formulas.unary(reference.mul, "factor"), 1),
            ("softcap", "cap · tanh(x / cap)", ("cap",), formulas.unary(reference.softcap, "cap"), 3),
        )
    ),
    Op(
        "slice",
        "x[:, first + step · i], i < count",
        ("x", "batch"),
        {"tokens": REQUIRED, "width": REQUIRED, "first": 0, "count": REQUIRED, "step": 1, "batched": False},
        formulas.slice_columns,
        cost.nothing,
        {"x": cost.ratio("count", "width")},
        (conditions.columns_are_there,),
    ),
    Op(
        "take_rows",
        "x[row of output r, :]",
        ("x", "outputs", "batch"),
        {"tokens": REQUIRED, "rows": REQUIRED, "width": REQUIRED},
        formulas.take_rows,
        cost.nothing,
        {"x": cost.ratio("rows", "tokens")},
    ),
    Op("copy", "x", ("x",), {"count": REQUIRED}, formulas.unary(np.asarray), cost.nothing),
    Op(
        "fma_chain",
        "f(f(… f(x))), 8 · rounds times, f(v) = 0.75 v + 0.25",
        ("x",),
        {"count": REQUIRED, "rounds": REQUIRED},
        formulas.fma_chain,
        cost.per_value(16, "count", "rounds"),
    ),
    Op(
        "matrix_chain",
        "rounds · a · bᵀ for each of count, a is the first `rows` rows of x, b the others",
        ("x",),
        {"count": REQUIRED, "rounds": REQUIRED, "rows": REQUIRED, "columns": REQUIRED, "K": REQUIRED},
        formulas.matrix_chain,
        cost.per_value(2, "count", "rounds", "rows", "columns", "K"),
    ),
    Op(
        "argmax",
        "lowest i with x[r, i] = max x[r]",
        ("x",),
        {"rows": REQUIRED, "width": REQUIRED},
        formulas.unary(sampling.argmax),
        cost.per_value(1, "rows", "width"),
    ),
    Op(
        "sample",
        "tokens[slot of output r] = lowest i with Σ_{j ≤ i} p[j] > u · Σ p, p = softmax(logits[r] / temperature) where "
        "top_k, top_p and min_p keep it, u of seed and position; advance: the row becomes that of the next step",
        ("logits", "outputs", "batch", "page_table", "tokens", "counts"),
        {
            "rows": REQUIRED,  # of logits: the most outputs that a step may have
            "width": REQUIRED,
            "greedy": False,  # every row takes the largest logit
            "advance": False,
            "paged": False,  # the next row of the pool comes from the page table
            "counted": False,  # counts[slot, token] + 1
            **_SIZES,
            "pages": of("rows"),  # of page_table
        },
        formulas.sample,
        cost.sampled,
        {"counts": cost.ratio("rows", "width")},
        outputs=("tokens", "batch", "counts"),
    ),
    Op(
        "adjust_logits",
        "logits[r] with the penalties, biases and mask of output r",
        ("logits", "adjustments", "batch", "counts", "biases", "masks"),
        {**dict.fromkeys(("rows", "width"), REQUIRED), **_SIZES, "biases": 1, "masks": 1},
        formulas.adjust_logits,
        cost.per_value(5, "rows", "width"),
    ),
    Op(
        "logprobs",
        "log softmax(logits[r]) of the token of output r, and of the most likely ones that it wants",
        ("logits", "outputs", "adjustments", "batch", "tokens"),
        {**dict.fromkeys(("rows", "width"), REQUIRED), **_SIZES},
        formulas.logprobs,
        cost.per_value(3, "rows", "width"),
    ),
)
PRIMITIVES: Mapping[str, Op] = {op.name: op for op in _TABLE}
