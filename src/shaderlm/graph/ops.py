"""Every op: its formula in words, its operands, and the numbers that describe a shape of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError

REQUIRED = object()


@dataclass(frozen=True)
class Op:
    """`dims` names what a shape consists of; REQUIRED or a default, which may be a function of the others."""

    name: str
    formula: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, Any]


def _of(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda dims: dims[name]


_NORM = {"rows": REQUIRED, "width": REQUIRED, "eps": 1e-6}
_ATTENTION = {
    **dict.fromkeys(("Hq", "Hkv", "D", "S", "C"), REQUIRED),
    "pos": 0,  # the largest that positions[0] may be
    "cache": "f32",
    "scale": None,
}
_POINTWISE = {"count": REQUIRED, "period": _of("count")}
_LINEAR = {"M": REQUIRED, "K": REQUIRED, "N": REQUIRED, "format": "f32", "bias": False}

# Formats of weights: K must be a multiple of this.
FORMATS: Mapping[str, int] = {
    "f32": 1,
    "f16": 1,
    **dict.fromkeys(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1"), 32),
    **dict.fromkeys(("q4_k", "q5_k", "q6_k"), 256),
}

_TABLE = (
    Op("rms_norm", "x / sqrt(mean(x²) + eps)", ("x",), ("out",), _NORM),
    Op("rms_norm_mul", "weight · x / sqrt(mean(x²) + eps)", ("x", "weight"), ("out",), _NORM),
    Op(
        "add_rms_norm",
        "sum = a + b; out = weight · sum / sqrt(mean(sum²) + eps)",
        ("a", "b", "weight"),
        ("sum", "out"),
        _NORM,
    ),
    Op(
        "linear_q4gsw",
        "bias[n] + Σ_k x[m, k] · (nibble(n, k) − 8) · scales[k / group_size, n]",
        ("x", "weight", "scales", "bias"),
        ("out",),
        {"M": REQUIRED, "K": REQUIRED, "N": REQUIRED, "group_size": 32, "bias": False, "scales": "f32"},
    ),
    Op(
        "linear",
        "bias[n] + Σ_k x[m, k] · w[n, k]",
        ("x", "weight", "bias"),
        ("out",),
        _LINEAR,
    ),
    Op(
        "linear_add",
        "residual[m, n] + bias[n] + Σ_k x[m, k] · w[n, k]",
        ("x", "weight", "bias", "residual"),
        ("out",),
        _LINEAR,
    ),
    Op(
        "linear_silu_mul",
        "silu(y[m, 2i]) · y[m, 2i + 1], y[m, n] = bias[n] + Σ_k x[m, k] · w[n, k], i < N/2",
        ("x", "weight", "bias"),
        ("out",),
        _LINEAR,
    ),
    *(
        Op(
            name,
            f"{formula} of weight, norm_weight · x / sqrt(mean(x²) + eps)",
            ("x", "norm_weight", "weight", "bias"),
            ("out",),
            {**_LINEAR, "eps": 1e-6},
        )
        for name, formula in (("rms_norm_linear", "linear"), ("rms_norm_linear_silu_mul", "linear_silu_mul"))
    ),
    Op(
        "embedding",
        "w[ids[t], :]",
        ("ids", "weight"),
        ("out",),
        {"T": REQUIRED, "N": REQUIRED, "K": REQUIRED, "format": "f32"},
    ),
    Op(
        "sdpa_kv",
        "softmax_c(scale · q[s, h] · k_cache[c, h / group]) · v_cache, c ≤ pos + s",
        ("q", "k", "v", "positions", "k_cache", "v_cache"),
        ("out", "k_cache", "v_cache"),
        _ATTENTION,
    ),
    Op(
        "attention",
        "softmax_c(scale · q[s, h] · k_cache[c, h / group]) · v_cache, c ≤ positions[0] + s ≤ pos + s",
        ("q", "k_cache", "v_cache", "positions"),
        ("out",),
        _ATTENTION,
    ),
    Op(
        "kv_write",
        "k_cache[positions[0] + s] = k[s]; v_cache[positions[0] + s] = v[s]",
        ("k", "v", "positions", "k_cache", "v_cache"),
        ("k_cache", "v_cache"),
        _ATTENTION,
    ),
    Op(
        "rope_kv_write",
        "out = rope(q); k_cache[positions[0] + t] = rope(k)[t]; v_cache[positions[0] + t] = v[t]",
        ("q", "k", "v", "positions", "table", "k_cache", "v_cache"),
        ("out", "k_cache", "v_cache"),
        {
            **dict.fromkeys(("T", "Hq", "Hkv", "D", "C"), REQUIRED),
            "rotary": _of("D"),
            "positions": _of("C"),
            "interleaved": False,
            "cache": "f32",
            # q, k and v may be columns of wider rows.
            **{f"{name}_first": 0 for name in "qkv"},
            "q_stride": lambda dims: dims["Hq"] * dims["D"],
            **{f"{name}_stride": lambda dims: dims["Hkv"] * dims["D"] for name in "kv"},
        },
    ),
    Op(
        "rms_norm_linear_rope_kv_write",
        "y = rms_norm_linear; out = rope(queries of y); k_cache[positions[0]] = rope(keys), v_cache[…] = values of y",
        ("x", "norm_weight", "weight", "bias", "positions", "table", "k_cache", "v_cache"),
        ("out", "k_cache", "v_cache"),
        {
            **_LINEAR,
            "N": lambda dims: (dims["Hq"] + 2 * dims["Hkv"]) * dims["D"],
            "eps": 1e-6,
            **dict.fromkeys(("Hq", "Hkv", "D", "C"), REQUIRED),
            "rotary": _of("D"),
            "positions": _of("C"),
            "cache": "f32",
        },
    ),
    Op(
        "rope",
        "(u·cos − v·sin, u·sin + v·cos) for each pair of a head",
        ("x", "positions", "table"),
        ("out",),
        {
            "T": REQUIRED,
            "H": REQUIRED,
            "D": REQUIRED,
            "rotary": _of("D"),
            "positions": _of("T"),
            "interleaved": False,
        },
    ),
    Op("add", "a + b", ("a", "b"), ("out",), _POINTWISE),
    Op("mul", "a · b", ("a", "b"), ("out",), _POINTWISE),
    Op("silu_mul", "a / (1 + exp(−a)) · b", ("a", "b"), ("out",), _POINTWISE),
    Op(
        "columns",
        "x[:, first : first + count]",
        ("x",),
        ("out",),
        {"rows": REQUIRED, "width": REQUIRED, "first": 0, "count": REQUIRED},
    ),
    Op("copy", "x", ("x",), ("out",), {"count": REQUIRED}),
    Op(
        "fma_chain",
        "f(f(… f(x))), 8 · rounds times, f(v) = 0.75 v + 0.25",
        ("x",),
        ("out",),
        {"count": REQUIRED, "rounds": REQUIRED},
    ),
    Op("argmax", "lowest i with x[r, i] = max x[r]", ("x",), ("out",), {"rows": REQUIRED, "width": REQUIRED}),
    Op(
        "sample",
        "lowest i with Σ_{j ≤ i} p[j] > u · Σ p, p = softmax(logits / temperature) where top_k, top_p, min_p keep it",
        ("logits", "choice"),
        ("out",),
        {"width": REQUIRED},
    ),
    Op("next_position", "positions[0] + by", ("positions",), ("positions",), {"by": 1}),
)
OPS: Mapping[str, Op] = {op.name: op for op in _TABLE}

# The operand `choice` of sample: eight words that the host writes for every token, so that no setting is compiled in.
CHOICE = np.dtype(
    [("temperature", "f4"), ("top_k", "u4"), ("top_p", "f4"), ("min_p", "f4"), ("u", "f4"), ("spare", "u4", 3)]
)

_CHOICES = {"scales": ("f32", "f16"), "cache": ("f32", "f16"), "format": tuple(FORMATS)}


def resolve(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The full dims of an op's shape: defaults filled in, names matched in any case, values checked."""
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
    for condition in _CONDITIONS.get(name, ()):
        condition(name, values)
    return {key: values[key] for key in declared}


def _check(op: str, key: str, value: Any) -> None:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise InputError(f"{op}: {key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
    elif key in ("bias", "interleaved"):
        if not isinstance(value, bool):
            raise InputError(f"{op}: {key} must be True or False, got {value!r}")
    elif key in ("eps", "scale"):
        if value is not None and not isinstance(value, (int, float)):
            raise InputError(f"{op}: {key} must be a number, got {value!r}")
    else:
        least = 0 if key == "pos" or key.endswith("first") else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{op}: {key} must be a whole number of at least {least}, got {value!r}")


def _attention_fits(op: str, dims: dict[str, Any]) -> None:
    if dims["Hq"] % dims["Hkv"]:
        given = f"Hq={dims['Hq']}, Hkv={dims['Hkv']}"
        raise InputError(f"{op}: the query heads must be a multiple of the kv heads, got {given}")
    context = dims["pos"] + dims["S"]
    if context > dims["C"]:
        given = f"pos={dims['pos']} + S={dims['S']} needs {context}"
        raise InputError(f"{op}: the cache holds C={dims['C']} positions; {given}")


def _rotary_fits(op: str, dims: dict[str, Any]) -> None:
    D, rotary = dims["D"], dims["rotary"]
    if D % 2 or rotary % 2 or rotary > D:
        raise InputError(f"{op}: D and rotary must be even and rotary at most D, got D={D}, rotary={rotary}")


def _blocks_are_whole(op: str, dims: dict[str, Any]) -> None:
    multiple = FORMATS[dims["format"]]
    if dims["K"] % multiple:
        raise InputError(f"{op}: K must be a multiple of {multiple} for {dims['format']}, got {dims['K']}")


def _rows_are_pairs(op: str, dims: dict[str, Any]) -> None:
    if dims["N"] % 2:
        raise InputError(f"{op}: N must be even, gate and up in turns; got {dims['N']}")


def _rows_are_heads(op: str, dims: dict[str, Any]) -> None:
    rows = (dims["Hq"] + 2 * dims["Hkv"]) * dims["D"]
    if dims["N"] != rows:
        raise InputError(f"{op}: N must be (Hq + 2 Hkv) · D = {rows}, got {dims['N']}")


def _columns_are_there(op: str, dims: dict[str, Any]) -> None:
    if dims["first"] + dims["count"] > dims["width"]:
        wanted = f"{dims['first']} … {dims['first'] + dims['count'] - 1}"
        raise InputError(f"{op}: x has {dims['width']} columns, asked for {wanted}")


def _period_divides(op: str, dims: dict[str, Any]) -> None:
    if dims["count"] % dims["period"]:
        raise InputError(f"{op}: count must be a multiple of period, got {dims['count']} and {dims['period']}")


def _one_group_is_enough(op: str, dims: dict[str, Any]) -> None:
    """A group longer than K is one group: keep its length in bounds, and its divisors."""
    dims["group_size"] = min(dims["group_size"], -(-dims["K"] // 128) * 128)


_CONDITIONS: Mapping[str, tuple[Callable[[str, dict[str, Any]], None], ...]] = {
    **dict.fromkeys(("sdpa_kv", "attention", "kv_write"), (_attention_fits,)),
    "rope": (_rotary_fits,),
    "rope_kv_write": (_rotary_fits,),
    "rms_norm_linear_rope_kv_write": (_blocks_are_whole, _rotary_fits, _rows_are_heads),
    "columns": (_columns_are_there,),
    "linear": (_blocks_are_whole,),
    "linear_add": (_blocks_are_whole,),
    "rms_norm_linear": (_blocks_are_whole,),
    **dict.fromkeys(("linear_silu_mul", "rms_norm_linear_silu_mul"), (_blocks_are_whole, _rows_are_pairs)),
    "embedding": (_blocks_are_whole,),
    "linear_q4gsw": (_one_group_is_enough,),
    "add": (_period_divides,),
    "mul": (_period_divides,),
    "silu_mul": (_period_divides,),
}
