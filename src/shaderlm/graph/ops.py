"""Every op: its formula in words, its operands, and the numbers that describe a shape of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
_POINTWISE = {"count": REQUIRED, "period": _of("count")}

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
        {"M": REQUIRED, "K": REQUIRED, "N": REQUIRED, "format": "f32", "bias": False},
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
        ("q", "k", "v", "k_cache", "v_cache"),
        ("out", "k_cache", "v_cache"),
        {
            **dict.fromkeys(("Hq", "Hkv", "D", "S", "C"), REQUIRED),
            "pos": 0,
            "cache": "f32",
            "scale": None,
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
    Op("copy", "x", ("x",), ("out",), {"count": REQUIRED}),
    Op("argmax", "lowest i with x[r, i] = max x[r]", ("x",), ("out",), {"rows": REQUIRED, "width": REQUIRED}),
)
OPS: Mapping[str, Op] = {op.name: op for op in _TABLE}

_CHOICES = {"scales": ("f32", "f16"), "cache": ("f32", "f16"), "format": ("f32", "f16", "q8_0", "q4_0")}


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
        values[by_lower[key.lower()]] = value
    missing = [key for key, default in declared.items() if default is REQUIRED and key not in values]
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}; given: {', '.join(values) or 'nothing'}")
    for key, default in declared.items():
        if key not in values:
            values[key] = default(values) if callable(default) else default
    for key, value in values.items():
        _check(name, key, value)
    if name == "sdpa_kv":
        _check_attention(values)
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
    elif not isinstance(value, int) or isinstance(value, bool) or value < (0 if key == "pos" else 1):
        raise InputError(f"{op}: {key} must be a whole number of at least {0 if key == 'pos' else 1}, got {value!r}")


def _check_attention(dims: Mapping[str, Any]) -> None:
    if dims["Hq"] % dims["Hkv"]:
        raise InputError(
            f"sdpa_kv: the query heads must be a multiple of the kv heads, got Hq={dims['Hq']}, Hkv={dims['Hkv']}"
        )
    context = dims["pos"] + dims["S"]
    if context > dims["C"]:
        raise InputError(
            f"sdpa_kv: the cache holds C={dims['C']} positions; pos={dims['pos']} + S={dims['S']} needs {context}"
        )
