"""The least that an op has to do: floating-point operations, and how much of each operand it touches.

Rules for the rows of `primitives`. Every byte counts once, however often a kernel reads it. The rows of a step are
taken as consecutive rows of one sequence; `position` is that of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .batch import LONG_SPLIT_KEYS, last_key

Dims = Mapping[str, Any]
# Additions, multiplications and other functions of an op's formula; a fused multiply-add is two.
Flops = Callable[[Dims, int], int]
# What an op touches of an operand: a part, 0 … 1, or of a table or cache the number of rows.
Touched = Callable[[Dims, int], float]
CACHES = ("k_cache", "v_cache")


def nothing(d: Dims, position: int) -> int:
    """Of ops that only move data."""
    return 0


def per_value(operations: int, *sizes: str) -> Flops:
    """So many operations for each value of a tensor with these sizes."""

    def count(d: Dims, position: int) -> int:
        total = operations
        for name in sizes:
            total *= d[name]
        return total

    return count


def attended(d: Dims, position: int) -> int:
    """Pairs of a query and a key that it sees, times 2 multiplications and 2 additions per value of a head."""
    tokens, seen = d["tokens"], d["window"] or position + d["tokens"]
    growing = min(tokens, max(0, seen - position))  # rows that see one key more than the row before
    pairs = growing * position + growing * (growing + 1) // 2 + (tokens - growing) * seen
    return int(4 * d["Hq"] * d["D"] * pairs)


def states(d: Dims, position: int) -> float:
    """The state of each sequence, read and written."""
    return 2.0 * (d["tokens"] if d["single"] else 1)


def sampled(d: Dims, position: int) -> int:
    """A comparison per logit; where tokens are drawn, also a division, an exponential and a sum."""
    return int((1 if d["greedy"] else 4) * d["rows"] * d["width"])


def tokens(d: Dims, position: int) -> float:
    """One row of a table or cache per row of the step."""
    return float(d["tokens"])


def filled(d: Dims, position: int) -> float:
    """All rows of a cache that a row of the step sees."""
    rows = position + d["tokens"]
    return float(min(rows, d["window"] + d["tokens"] - 1) if d["window"] else rows)


def split(d: Dims, position: int) -> float:
    """What attention keeps between its dispatches grows with the context, up to what its class has room for."""
    capacity = d["keys"] or min(last_key(d["context"], d["D"]), LONG_SPLIT_KEYS)
    return min(1.0, float((position + d["tokens"]) / capacity))


def ratio(part: str, whole: str) -> Touched:
    """Of one size another: rows or columns of an operand. Rows may be wanted more than once."""
    return lambda d, position: min(1.0, float(d[part] / d[whole]))


def chosen(d: Dims, position: int) -> float:
    """Of the experts, those that rows choose: exactly for one row; for more, as many as random choices reach."""
    return float(1 - (1 - d["used"] / d["experts"]) ** d["tokens"])


def gated(d: Dims, position: int) -> int:
    """A dot product and a sigmoid per row, a multiplication and an addition per value."""
    return int(d["tokens"] * (2 * d["K"] + 3 + 2 * d["width"]))
