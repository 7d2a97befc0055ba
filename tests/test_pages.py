"""The page pool keeps its books: whatever sequences do, no page is lost, owned twice or written by two."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from shaderlm.errors import InputError
from shaderlm.graph.batch import PAGE
from shaderlm.runtime.pages import MAX_SEQUENCES, KvSequence, PagePool, Reserved, pages_for

from .tiers import examples

CONTEXT = 5 * PAGE - 3
COUNTS = st.one_of(st.integers(1, 3), st.integers(1, 2 * PAGE + 1), st.just(PAGE))

# What a position holds, in terms of who wrote it: a number that no two writes share.
Contents = dict[int, list[int | None]]


class Pool(RuleBasedStateMachine):
    """A pool beside a simple model of it: the contents of pages, and of every sequence as it should read them."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(CONTEXT)
        self.table: dict[int, int] = {}
        self.memory: Contents = {}
        self.expected: dict[KvSequence, list[int]] = {}
        self.writes = 0

    # What a runner does with a pool

    def apply(self, reserved: Reserved) -> None:
        for source, target in reserved.copies:
            self.memory[target] = list(self.memory[source])
        for index, page in reserved.entries:
            self.table[index] = page

    def reserve(self, wanted: list[tuple[KvSequence, int]]) -> list[Reserved]:
        missing = self.pool.missing(wanted)
        if missing:
            pages = self.pool.pages + missing
            self.pool.grow(pages)
            assert self.pool.missing(wanted) == 0
        self.memory |= {page: [None] * PAGE for page in range(self.pool.pages) if page not in self.memory}
        return [self.pool.reserve(sequence, count) for sequence, count in wanted]

    def place(self, sequence: KvSequence, position: int) -> tuple[int, int]:
        """The page and the place in it, by the page table as kernels read it."""
        return self.table[self.pool.table_index(sequence) + position // PAGE], position % PAGE

    # Rules

    @rule(target=sequences)
    @precondition(lambda self: len(self.expected) < 6)
    def add(self) -> KvSequence:
        taken = {sequence.slot for sequence in self.expected}
        made = self.pool.add()
        assert (made.pages, made.length, made.slot) == ([], 0, min(set(range(7)) - taken))
        self.expected[made] = []
        return made

    @rule(target=sequences, parent=sequences)
    @precondition(lambda self: 0 < len(self.expected) < 6)
    def fork(self, parent: KvSequence) -> KvSequence:
        free = self.pool.free
        child, reserved = self.pool.share(parent.pages, parent.length)
        assert reserved.copies == ()
        assert self.pool.free == free, "a fork takes no page"
        self.apply(reserved)
        self.expected[child] = list(self.expected[parent])
        return child

    @rule(chosen=st.lists(st.tuples(sequences, COUNTS), min_size=1, max_size=3, unique_by=lambda pair: pair[0].slot))
    def write(self, chosen: list[tuple[KvSequence, int]]) -> None:
        """A step: pages for all rows first, then every row is written."""
        wanted = [(each, min(count, CONTEXT - each.length)) for each, count in chosen if each.length < CONTEXT]
        free = sorted(self.pool._free)
        before = self.pool.pages
        changed = self.reserve(wanted)
        taken = [page for reserved in changed for _, page in reserved.entries]
        lowest = sorted([*free, *range(before, self.pool.pages)])[: len(taken)]
        assert taken == lowest, "the lowest free page first"
        for reserved in changed:
            self.apply(reserved)
        for sequence, count in wanted:
            for position in range(sequence.length, sequence.length + count):
                page, at = self.place(sequence, position)
                assert self.pool._users[page] == 1, "a page with several users is written"
                self.writes += 1
                self.memory[page][at] = self.writes
                self.expected[sequence].append(self.writes)
            sequence.length += count

    @rule(chosen=st.lists(st.tuples(sequences, COUNTS), min_size=1, max_size=3, unique_by=lambda pair: pair[0].slot))
    def fail(self, chosen: list[tuple[KvSequence, int]]) -> None:
        """A step for which the device has no room: everything is as it was."""
        wanted = [(each, min(count, CONTEXT - each.length)) for each, count in chosen if each.length < CONTEXT]
        self.pool.grow(self.pool.pages + self.pool.missing(wanted))
        before = ([list(each.pages) for each, _ in wanted], sorted(self.pool._free), list(self.pool._users))
        changed = self.reserve(wanted)
        for (sequence, _), reserved in reversed(list(zip(wanted, changed, strict=True))):
            self.pool.revert(sequence, reserved)
        assert ([each.pages for each, _ in wanted], sorted(self.pool._free), self.pool._users) == before

    @rule(sequence=sequences, part=st.floats(0, 1))
    def truncate(self, sequence: KvSequence, part: float) -> None:
        length = round(part * sequence.length)
        self.pool.truncate(sequence, length)
        del self.expected[sequence][length:]
        assert (sequence.length, len(sequence.pages)) == (length, pages_for(length))

    @rule(sequence=consumes(sequences), twice=st.booleans())
    def remove(self, sequence: KvSequence, twice: bool) -> None:
        for _ in range(1 + twice):
            self.pool.remove(sequence)
        assert (sequence.pages, sequence.freed) == ([], True)
        del self.expected[sequence]

    # What always holds

    @invariant()
    def books_are_kept(self) -> None:
        users = Counter(page for sequence in self.expected for page in sequence.pages)
        free = self.pool._free
        assert self.pool._users == [users[page] for page in range(self.pool.pages)]
        assert len(set(free)) == len(free) == self.pool.free
        assert set(free) == {page for page in range(self.pool.pages) if not users[page]}

    @invariant()
    def no_sequence_has_a_page_twice(self) -> None:
        for sequence in self.expected:
            assert len(set(sequence.pages)) == len(sequence.pages)
            assert len(sequence.pages) >= pages_for(sequence.length)
        slots = [sequence.slot for sequence in self.expected]
        assert len(set(slots)) == len(slots)

    @invariant()
    def tables_match(self) -> None:
        for sequence in self.expected:
            first = self.pool.table_index(sequence)
            filled = range(pages_for(sequence.length))
            assert [self.table[first + i] for i in filled] == [sequence.pages[i] for i in filled]

    @invariant()
    def every_sequence_reads_what_was_written_to_it(self) -> None:
        for sequence, expected in self.expected.items():
            found = [self.memory[page][at] for page, at in (self.place(sequence, p) for p in range(sequence.length))]
            assert found == expected


TestPool = pytest.mark.smoke(Pool.TestCase)
TestPool.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.filter_too_much],
)


def filled(pool: PagePool, positions: int) -> KvSequence:
    sequence = pool.add()
    pool.grow(pool.pages + pool.missing([(sequence, positions)]))
    pool.reserve(sequence, positions)
    sequence.length = positions
    return sequence


def test_a_sequence_that_is_alone_lies_in_one_piece() -> None:
    pool = PagePool(CONTEXT)
    for _ in range(2):  # also after another one was there
        sequence = filled(pool, 3 * PAGE)
        assert sequence.pages == [0, 1, 2]
        assert sequence.contiguous
        other = filled(pool, 1)
        assert not other.contiguous
        pool.remove(other)
        pool.remove(sequence)


def test_only_what_is_written_is_copied() -> None:
    """Of three shared pages the last is copied, and only for the first who writes to it."""
    pool = PagePool(CONTEXT)
    parent = filled(pool, 2 * PAGE + 5)
    child, reserved = pool.share(parent.pages, parent.length)
    assert reserved == Reserved((), tuple((pool.table_index(child) + i, page) for i, page in enumerate(parent.pages)))
    assert pool.missing([(child, 1), (parent, 1)]) == 2
    pool.grow(8)
    assert pool.reserve(child, 1) == Reserved(((2, 3),), ((pool.table_index(child) + 2, 3),))
    assert pool.reserve(parent, 1) == Reserved((), ())
    assert (parent.pages, child.pages) == ([0, 1, 2], [0, 1, 3])


def test_mistakes_are_refused() -> None:
    pool = PagePool(CONTEXT)
    sequence = filled(pool, 7)
    for length in (-1, 8):
        with pytest.raises(InputError, match=f"of 7 positions cannot be truncated to {length}"):
            pool.truncate(sequence, length)
    more = [pool.add() for _ in range(MAX_SEQUENCES - 1)]
    with pytest.raises(InputError, match=f"{MAX_SEQUENCES} sequences already"):
        pool.add()
    with pytest.raises(InputError, match=f"{MAX_SEQUENCES} sequences already"):
        pool.share(sequence.pages, sequence.length)
    pool.remove(more[3])
    assert pool.add().slot == more[3].slot
