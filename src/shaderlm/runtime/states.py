"""Rows of the states of recurrent layers: which are free, and which are snapshots. Knows neither GPU nor arrays.

A sequence has a row, which every step changes. A snapshot is a copy of one, for sequences that begin alike. Spare rows
follow each other: a step that verifies drafts leaves the states after its rows there, until one of them is picked.
"""

from __future__ import annotations

import heapq

from ..graph.batch import PAGE

FIRST_STATES = 2  # rows, before more are wanted
SNAPSHOT_BYTES = 1 << 30  # of all snapshots of a model, at most
MAX_SNAPSHOTS = 64
_SPACING = 8 * PAGE  # tokens between two snapshots of a prompt
# Distances to the last whole page of a prompt, in pages, where it leaves snapshots, too: others that begin like it part
# from it near its end. Where 1,024 tokens are read they take one more step, where 2,048 are two, and otherwise none.
_NEAR_END = ((), (4, 1), (4, 2, 1))
_TOKENS_PER_STEP = 1024


def max_snapshots(state_bytes: int) -> int:
    """How many snapshots a model keeps, by the bytes of one."""
    return max(2, min(MAX_SNAPSHOTS, SNAPSHOT_BYTES // max(1, state_bytes)))


def snapshot_ends(first: int, reach: int, tokens: int, unit: int) -> tuple[int, ...]:
    """After how many tokens of a prompt a snapshot is taken, in order: multiples of `unit`.

    The prompt is read from `first` on. Others that are cached begin with its first `reach` tokens: the next one of
    them begins there.
    """
    last = tokens // unit * unit
    more = min((last - first) // _TOKENS_PER_STEP, len(_NEAR_END) - 1)
    near = [last - unit * distance for distance in _NEAR_END[max(0, more)]]
    spaced = range(first // _SPACING * _SPACING, last - unit * _NEAR_END[-1][0], _SPACING)
    return tuple(sorted(end for end in {*spaced, reach // unit * unit, *near, last} if end > first))


class StatePool:
    """Hands out rows, the lowest free one first."""

    def __init__(self) -> None:
        self.rows = 0  # there are so many; `grow` adds some
        self.snapshots: set[int] = set()
        self.spares = 0  # rows that are spare ones of sequences
        self._readers: dict[int, int] = {}  # of rows, beside who uses them
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

    def take_run(self, count: int) -> range | None:
        """So many rows that follow each other and nobody uses, if there are."""
        free = sorted(self._free)
        for i in range(len(free) - count + 1):
            if free[i + count - 1] == free[i] + count - 1:
                taken = range(free[i], free[i] + count)
                self._free = [row for row in free if row not in taken]  # sorted: a heap
                return taken
        return None

    def retain(self, row: int) -> None:
        """A row that is in use has one more user, who releases it, too."""
        self._readers[row] = self._readers.get(row, 0) + 1

    def release(self, row: int) -> None:
        """A row has one user less. The last one gives it back."""
        if readers := self._readers.pop(row, 0):
            if readers > 1:
                self._readers[row] = readers - 1
            return
        self.snapshots.discard(row)
        heapq.heappush(self._free, row)
