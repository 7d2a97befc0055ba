"""The least that an op has to do: floating-point operations, and how much of each operand it touches.

Every byte counts once, however often a kernel reads it. `position` is where in the cache the first row stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Dims = Mapping[str, Any]
Flops = Callable[[Dims, int], int]
Part = Callable[[Dims, int], float]


def _per_value(operations: int, *sizes: str) -> Flops:
    def count(d: Dims, position: int) -> int:
        total = operations
        for name in sizes:
            total *= d[name]
        return total

    return count


def _attended(d: Dims, position: int) -> int:
    """Pairs of a query and a key that it sees, times 2 multiplications and 2 additions per value of a head."""
    pairs = d["S"] * position + d["S"] * (d["S"] + 1) // 2
    return int(4 * d["Hq"] * d["D"] * pairs)


def _turned(d: Dims, position: int) -> int:
    return int(3 * d["T"] * (d["Hq"] + d["Hkv"]) * d["rotary"])


_LINEAR = _per_value(2, "M", "N", "K")
_FLOPS: Mapping[str, Flops] = {
    "rms_norm": _per_value(3, "rows", "width"),
    "rms_norm_mul": _per_value(4, "rows", "width"),
    "add_rms_norm": _per_value(5, "rows", "width"),
    **dict.fromkeys(("linear_q4gsw", "linear", "linear_add", "linear_silu_mul"), _LINEAR),
    # What comes before and after is next to nothing.
    **dict.fromkeys(("rms_norm_linear", "rms_norm_linear_silu_mul", "rms_norm_linear_rope_kv_write"), _LINEAR),
    "embedding": _per_value(0),
    "sdpa_kv": _attended,
    "attention": _attended,
    "kv_write": _per_value(0),
    "rope_kv_write": _turned,
    "rope": _per_value(3, "T", "H", "rotary"),
    "add": _per_value(1, "count"),
    "mul": _per_value(1, "count"),
    "silu_mul": _per_value(5, "count"),
    "columns": _per_value(0),
    "copy": _per_value(0),
    "fma_chain": _per_value(16, "count", "rounds"),
    "argmax": _per_value(1, "rows", "width"),
    "sample": _per_value(3, "width"),
    "next_position": _per_value(1),
}


def _filled(d: Dims, position: int) -> float:
    return float((position + d["S"]) / d["C"])


def _new(d: Dims, position: int) -> float:
    return float(d["S"] / d["C"])


def _taken(name: str, heads: str) -> Part:
    """q, k or v as columns of wider rows."""
    return lambda d, position: float(d[heads] * d["D"] / d[f"{name}_stride"])


CACHES = ("k_cache", "v_cache")
# Operands of which a part is touched; all of the others.
_PARTS: Mapping[tuple[str, str], Part] = {
    ("embedding", "weight"): lambda d, position: min(1.0, float(d["T"] / d["N"])),
    ("columns", "x"): lambda d, position: float(d["count"] / d["width"]),
    ("rope", "table"): lambda d, position: float(d["T"] / d["positions"]),
    ("rope_kv_write", "table"): lambda d, position: float(d["T"] / d["positions"]),
    **{("rope_kv_write", cache): (lambda d, position: float(d["T"] / d["C"])) for cache in CACHES},
    ("rms_norm_linear_rope_kv_write", "table"): lambda d, position: float(d["M"] / d["positions"]),
    **{("rms_norm_linear_rope_kv_write", cache): (lambda d, position: float(d["M"] / d["C"])) for cache in CACHES},
    ("rope_kv_write", "q"): _taken("q", "Hq"),
    ("rope_kv_write", "k"): _taken("k", "Hkv"),
    ("rope_kv_write", "v"): _taken("v", "Hkv"),
    **{("kv_write", cache): _new for cache in CACHES},
    **{(op, cache): _filled for op in ("attention", "sdpa_kv") for cache in CACHES},
    # What attention keeps for itself between its dispatches, partial sums or scores, grows with the context too.
    ("attention", ""): _filled,
    ("sdpa_kv", ""): _filled,
}


def flops(op: str, dims: Dims, position: int) -> int:
    """Additions, multiplications and other functions of an op's formula; a fused multiply-add is two."""
    return _FLOPS[op](dims, position)


def part(op: str, operand: str, dims: Dims, position: int) -> float:
    """The part of an operand that an op touches, 0 … 1. The operand "" is a kernel's own scratch."""
    rule = _PARTS.get((op, operand))
    return rule(dims, position) if rule else 1.0
