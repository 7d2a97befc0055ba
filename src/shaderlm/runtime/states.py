"""Rows of the states of recurrent layers: which are free. One for each sequence. Knows neither GPU nor arrays."""

from __future__ import annotations

import heapq

FIRST_STATES = 2  # rows, before more are wanted


class StatePool:
    """Hands out rows, the lowest free one first."""

    def __init__(self) -> None:
        self.rows = 0  # there are so many; `grow` adds some
        self._free: list[int] = []

    @property
    def free(self) -> int:
        """How many rows nobody uses."""
        return len(self._free)

    def grow(self, rows: int) -> None:
        """So many rows in all."""
        for row in range(self.rows, rows):
            heapq.heappush(self._free, row)
        self.rows = max(self.rows, rows)

    def missing(self, count: int) -> int:
        """How many rows more than are free it takes."""
        return max(0, count - self.free)

    def take(self) -> int:
        """A row that nobody uses. Call `missing` and `grow` first."""
        return heapq.heappop(self._free)

    def release(self, row: int) -> None:
        """Nobody uses it any more."""
        heapq.heappush(self._free, row)
