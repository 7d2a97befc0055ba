"""Counts of values by size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values up to each bound. One thread at a time adds to it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """So many times this value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def copy(self) -> Histogram:
        """As it is now. Any thread."""
        copied = Histogram(self._bounds)
        copied._counts, copied._sum = self._counts.copy(), self._sum
        return copied

    def plus(self, other: Histogram) -> Histogram:
        """The counts of both, whose bounds are the same."""
        both = self.copy()
        both._counts = [a + b for a, b in zip(both._counts, other._counts, strict=True)]
        both._sum += other._sum
        return both

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by bound, and the sum of all values."""
        total, cumulative = 0.0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            cumulative.append((bound, total))
        return cumulative, self._sum
