"""Pages of the KV cache: which are free, who uses them, and what must be copied before it is written.

A pool of pages of `PAGE` positions serves all sequences. Sequences share pages; a page that is shared is copied
before one of them writes to it. Knows neither GPU nor arrays.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import InputError
from ..graph.batch import PAGE

MAX_SEQUENCES = 256  # at the same time: each has a row of the page table and a place for its last token


def pages_for(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // PAGE)


def table_stride(pages: int, states: bool) -> int:
    """Words of the page table for a sequence: an entry for each page; of states the first spare row, and its row."""
    return pages + 2 * states


@dataclass(eq=False)
class KvSequence:
    """One sequence: its place in the tables, its pages in order, and how many positions are filled."""

    slot: int
    pages: list[int] = field(default_factory=list)
    state: int | None = None  # its row of the states, once it has one
    spares: range = range(0)  # rows for the states after rows that verify drafts
    verified: range = range(0)  # positions after which a spare row has the state, the first spare row first
    length: int = 0
    freed: bool = False
    has_history: bool = False  # its tokens are counted, for penalties
    shift: int = 0  # of the positions of its next rows, where images came before them
    expected: int | None = None  # positions that it has at its end, at most, where that is known

    @property
    def contiguous(self) -> bool:
        """Are its pages the pool from the first one on?"""
        return all(page == i for i, page in enumerate(self.pages))


@dataclass(frozen=True)
class Reserved:
    """What a reservation changed: pages to copy (from, to), and entries of the page table (index in it, page)."""

    copies: tuple[tuple[int, int], ...]
    entries: tuple[tuple[int, int], ...]


KEPT_PAGES = 64  # a pool of so many grows quickly


class PagePool:
    """Hands out pages, the lowest free one first, so that a sequence that is alone lies in one piece."""

    def __init__(self, context: int, *, states: bool = False) -> None:
        """`states`: before the entries of a sequence in the page table are its first spare row and its row of them."""
        self.pages_per_sequence = pages_for(context)
        self._states = states
        self.pages = 0  # there are so many; `grow` adds some
        self.max_pages = 1 << 31  # there may be so many, as far as is known
        self.pages_kept_alone = 0  # there may be so many for cached ones, where one sequence runs at most
        self.idle: OrderedDict[int, None] = OrderedDict()  # pages that only a cache uses, the longest idle first
        self._most_used = 0  # pages of sequences, at the same time
        self._free: list[int] = []
        self._users: list[int] = []
        self._cached: set[int] = set()  # a cache is one of their users
        self._slots = list(range(MAX_SEQUENCES))

    @property
    def free(self) -> int:
        """How many pages nobody uses."""
        return len(self._free)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return MAX_SEQUENCES - len(self._slots)

    def unused_slots(self, count: int) -> list[int]:
        """The first slots that no sequence has, up to so many: places for tokens of a step that no later one reads."""
        return heapq.nsmallest(count, self._slots)

    def grow(self, pages: int) -> None:
        """So many pages in all."""
        for page in range(self.pages, pages):
            heapq.heappush(self._free, page)
            self._users.append(0)
        self.pages = max(self.pages, pages)

    def pages_worth_keeping(self, more: int) -> int:
        """Up to how many pages the pool grows rather than give up cached ones, now that sequences want so many more.

        Twice as many as sequences ever used at the same time: all streams wait while the pool grows (docs/log.md).
        Where there is one at most, nobody else does: then as many as the cache may have.
        """
        used = self.pages - len(self.idle) + more  # free pages are taken first
        self._most_used = max(self._most_used, used)
        alone = self.pages_kept_alone if self.sequences <= 1 else 0
        return max(self.pages, 2 * self._most_used, KEPT_PAGES, alone)

    @property
    def table_words(self) -> int:
        """Words of the page table."""
        return MAX_SEQUENCES * table_stride(self.pages_per_sequence, self._states)

    def table_index(self, sequence: KvSequence) -> int:
        """Where a sequence's entries begin in the page table."""
        return sequence.slot * table_stride(self.pages_per_sequence, self._states) + 2 * self._states

    # sequences -------------------------------------------------------------------------------------------

    def add(self) -> KvSequence:
        """A new, empty sequence."""
        if not self._slots:
            raise InputError(f"there are {MAX_SEQUENCES} sequences already, which is the most; free one first")
        return KvSequence(heapq.heappop(self._slots))

    def share(self, pages: Sequence[int], length: int) -> tuple[KvSequence, Reserved]:
        """A sequence whose first `length` positions are in pages that others use too."""
        child = self.add()
        child.pages, child.length = list(pages[: pages_for(length)]), length
        self.retain(child.pages)
        first = self.table_index(child)
        return child, Reserved((), tuple((first + i, page) for i, page in enumerate(child.pages)))

    def retain(self, pages: Iterable[int]) -> None:
        """Pages that are in use have one more user."""
        for page in pages:
            self._users[page] += 1
            self.idle.pop(page, None)

    def users(self, page: int) -> int:
        """How many sequences use a page; caches that retain it count too."""
        return self._users[page]

    def truncate(self, sequence: KvSequence, length: int) -> None:
        """Forget what comes after the first `length` positions, and give pages back that are empty now."""
        if not 0 <= length <= sequence.length:
            raise InputError(f"a sequence of {sequence.length} positions cannot be truncated to {length}")
        sequence.length = length
        count = pages_for(length)
        self.release(reversed(sequence.pages[count:]))
        del sequence.pages[count:]

    def remove(self, sequence: KvSequence) -> None:
        """Give all pages of a sequence back. Twice does no harm."""
        if not sequence.freed:
            sequence.freed = True
            self.release(reversed(sequence.pages))
            sequence.pages = []
            heapq.heappush(self._slots, sequence.slot)

    def release(self, pages: Iterable[int]) -> None:
        """Pages have one user less. Those without any are free. Of a sequence the last page comes first: of what a
        cache keeps, the end is worth least.
        """
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                heapq.heappush(self._free, page)
            elif self._users[page] == 1 and page in self._cached:
                self.idle[page] = None

    def cache(self, page: int) -> None:
        """A cache is one more user of a page that a sequence has."""
        self.retain((page,))
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        """It is not any more."""
        self._cached.discard(page)
        self.idle.pop(page, None)
        self.release((page,))

    # pages -----------------------------------------------------------------------------------------------

    def needed(self, sequence: KvSequence, count: int) -> int:
        """How many pages it takes to write so many positions to a sequence."""
        pages, length = sequence.pages, sequence.length
        first, end, allocated = length // PAGE, -(-(length + count) // PAGE), len(pages)
        needed = max(0, end - allocated)
        for i in range(first, min(end, allocated)):
            needed += self._users[pages[i]] > 1
        return needed

    def missing(self, counts: Iterable[tuple[KvSequence, int]]) -> int:
        """How many pages more than are free it takes to write so many positions to each sequence."""
        return max(0, sum(self.needed(sequence, count) for sequence, count in counts) - self.free)

    def reserve(self, sequence: KvSequence, count: int) -> Reserved:
        """Pages of its own for the next `count` positions of a sequence. Call `missing` and `grow` first."""
        first = self.table_index(sequence)
        copies, entries = [], []
        for i in self._shared(sequence, count):
            page = self._take()
            copies.append((sequence.pages[i], page))
            self.release([sequence.pages[i]])
            sequence.pages[i] = page
            entries.append((first + i, page))
        for i in self._new(sequence, count):
            sequence.pages.append(self._take())
            entries.append((first + i, sequence.pages[i]))
        return Reserved(tuple(copies), tuple(entries))

    def revert(self, sequence: KvSequence, reserved: Reserved) -> None:
        """Undo a reservation that nothing was written to yet. Of several, the last one first."""
        first, count = self.table_index(sequence), len(sequence.pages) + len(reserved.copies) - len(reserved.entries)
        self.release(sequence.pages[count:])
        del sequence.pages[count:]
        for (shared, page), (index, _) in zip(reserved.copies, reserved.entries, strict=False):
            sequence.pages[index - first] = shared
            self.retain((shared,))
            self.release([page])

    def take(self, count: int) -> list[int]:
        """So many free pages, with one user who is no sequence. Call `grow` first."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def _new(self, sequence: KvSequence, count: int) -> range:
        return range(len(sequence.pages), pages_for(sequence.length + count))

    def _shared(self, sequence: KvSequence, count: int) -> list[int]:
        """Pages that will be written and belong to others too."""
        end = min(len(sequence.pages), pages_for(sequence.length + count))
        return [i for i in range(sequence.length // PAGE, end) if self._users[sequence.pages[i]] > 1]
