"""The prefix cache: what it returns holds the tokens that were asked for, and it lets go in the right order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shaderlm.graph.batch import PAGE
from shaderlm.runtime.pages import KvSequence, PagePool, pages_for
from shaderlm.runtime.prefix_cache import PrefixCache
from shaderlm.runtime.states import StatePool

from .tiers import examples


class Cache:
    """A cache, the pool under it, and what is in every page."""

    def __init__(self, pages: int = 64) -> None:
        self.pool = PagePool(1 << 20)
        self.pool.grow(pages)
        self.cache = PrefixCache(self.pool)
        self.contents: dict[int, list[int]] = {}

    def run(self, ids: list[int], *, keep: bool = True) -> tuple[int, KvSequence]:
        """A sequence of these tokens that begins with what is cached; how much that was."""
        match = self.cache.match(ids)
        sequence, _ = self.pool.share(match.pages, match.length)
        self.pool.reserve(sequence, len(ids) - match.length)
        shared = [i for page in match.pages for i in self.contents[page]][: match.length]
        assert shared == ids[: match.length], "the pages hold these tokens"
        sequence.length = len(ids)
        for i, page in enumerate(sequence.pages):
            if i >= match.length // PAGE:
                self.contents[page] = ids[i * PAGE : (i + 1) * PAGE]
        if keep:
            self.cache.insert(ids, sequence.pages)
        return match.length, sequence

    def over(self, ids: list[int]) -> int:
        length, sequence = self.run(ids)
        self.pool.remove(sequence)
        return length


def text(length: int, seed: int = 0) -> list[int]:
    return [(i * i + seed * 7) % 101 for i in range(length)]


TEXTS = st.builds(
    lambda shared, own, seed: text(shared) + text(own, seed + 1),
    st.sampled_from([0, 5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 7]),
    st.sampled_from([1, 2, 60, PAGE, PAGE + 3]),
    st.integers(0, 3),
)


@given(st.lists(TEXTS, min_size=1, max_size=12), st.integers(8, 40), st.data())
@settings(max_examples=examples(80))
def test_what_is_found_is_what_was_asked_for(texts: list[list[int]], pages: int, data: st.DataObject) -> None:
    """Against the obvious model: the longest beginning that any text before has in common, where nothing went."""
    cache, before = Cache(max(pages, 8)), list[list[int]]()
    evicted = False
    for ids in texts:
        while cache.pool.free < pages_for(len(ids)) + 1:
            evicted = True
            assert cache.cache.evict()
        found = cache.over(ids)
        common = [
            next((i for i, (a, b) in enumerate(zip(ids, old, strict=False)) if a != b), len(old)) for old in before
        ]
        best = min(max([0, *common]), len(ids) - 1)
        assert found <= len(ids) - 1
        assert evicted or best // PAGE * PAGE <= found <= best
        before.append(ids)
        if data.draw(st.booleans()):
            evicted |= cache.cache.evict()
    assert cache.pool.pages - cache.pool.free == len(cache.cache._nodes)
    cache.cache.clear()
    assert cache.pool.free == cache.pool.pages


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["a", "b", None])), min_size=1, max_size=10), st.data())
@settings(max_examples=examples(80))
def test_pieces_and_clients(texts: list[tuple[list[int], str | None]], data: st.DataObject) -> None:
    """Inserted in pieces, while others go: as if at once. And nobody finds what another one put in."""
    cache = Cache(200)
    pool, before = cache.pool, dict[str | None, list[list[int]]]()
    for ids, client in texts:
        found = cache.cache.match(ids, client=client).length
        own = before.setdefault(client, [])
        assert found <= max((_common(ids, other) for other in own), default=0)
        sequence, _ = pool.share((), 0)
        pool.reserve(sequence, len(ids))
        sequence.length, last = len(ids), None
        for length in (*range(PAGE, len(ids), PAGE), len(ids)):
            last = cache.cache.insert(ids, sequence.pages, length, client, last)
            if length < len(ids) and data.draw(st.booleans()):
                cache.cache.evict()
            if length < len(ids) and data.draw(st.integers(0, 9)) == 0:
                cache.cache.give_up(sequence.pages[:1])
        assert cache.cache.match([*ids, 0], client=client).length >= len(ids) // PAGE * PAGE
        assert set(pool.idle) == {page for page in cache.cache._nodes if pool.users(page) == 1}
        pool.remove(sequence)
        own.append(ids)
    cache.cache.clear()
    assert pool.free == pool.pages


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_last_token_is_always_computed() -> None:
    cache = Cache()
    ids = text(2 * PAGE)
    cache.over(ids)
    assert cache.over(ids) == 2 * PAGE - 1
    assert cache.over(ids[:PAGE]) == PAGE - 1
    assert cache.over(ids[: PAGE + 1]) == PAGE


def test_multiples() -> None:
    """A prefix that must end at fixed positions."""
    cache = Cache()
    cache.over(text(5 * PAGE))
    found = cache.cache.match(text(5 * PAGE), 2 * PAGE)
    assert (found.length, len(found.pages)) == (4 * PAGE, 4)
    assert cache.cache.match(text(4 * PAGE), 2 * PAGE).length == 2 * PAGE
    assert cache.cache.match(text(PAGE + 3), 2 * PAGE).length == 0


def test_the_least_recently_used_pages_go_first() -> None:
    cache = Cache()
    first, second, third = (text(2 * PAGE, seed) for seed in (1, 2, 3))
    for ids in (first, second, third):
        cache.over(ids)
    cache.cache.match([*first, 0])
    for _ in range(2):
        assert cache.cache.evict()
    assert [cache.cache.match([*ids, 0]).length for ids in (first, second, third)] == [2 * PAGE, 0, 2 * PAGE]
    assert cache.cache.evict(), "the second page of the oldest goes before its first"
    assert [cache.cache.match([*ids, 0]).length for ids in (first, third)] == [PAGE, 2 * PAGE]
    assert cache.cache.evicted == 3


def test_pages_in_use_are_not_given_back() -> None:
    cache = Cache()
    _, running = cache.run(text(2 * PAGE))
    cache.over(text(PAGE, 5))
    assert len(cache.pool.idle) == 1
    assert cache.cache.evict()
    assert not cache.cache.evict()
    cache.pool.remove(running)
    cache.cache.reclaim(9)
    assert len(cache.cache._nodes) == 0
    assert cache.pool.free == cache.pool.pages


def test_a_longer_page_replaces_its_beginning() -> None:
    cache = Cache()
    cache.over(text(40))
    cache.over(text(90))
    assert len(cache.cache._nodes) == 1
    assert cache.cache.match(text(90)).length == 89


def test_pages_that_are_given_up_take_their_followers_along() -> None:
    cache = Cache()
    cache.over(text(3 * PAGE))
    (page, *_) = cache.cache.match(text(3 * PAGE)).pages
    cache.cache.give_up([page, page])
    assert len(cache.cache._nodes) == 0
    assert cache.pool.free == cache.pool.pages


def test_a_long_text_is_given_up() -> None:
    """A page and all that come after it, more of them than Python calls functions inside functions."""
    cache, pages = Cache(3000), 2900
    cache.over(text(pages * PAGE))
    assert len(cache.cache._nodes) == pages
    cache.cache.give_up([0])
    assert len(cache.cache._nodes) == 0
    assert cache.pool.free == cache.pool.pages


@given(st.lists(TEXTS, min_size=1, max_size=12), st.data())
@settings(max_examples=examples(80))
def test_a_snapshot_is_that_of_the_tokens_before_it(texts: list[list[int]], data: st.DataObject) -> None:
    """A match ends with a snapshot, and rows are given back exactly once, whatever goes in between."""
    pool, states = PagePool(1 << 20, states=True), StatePool()
    cache = PrefixCache(pool, states)
    pool.grow(64)
    states.grow(6)
    stands_for: dict[int, list[int]] = {}
    for ids in texts:
        while pool.free < pages_for(len(ids)) + 1:
            assert cache.evict()
        match = cache.match(ids)
        assert match.length % PAGE == match.reach % PAGE == 0
        assert match.length <= match.reach == len(cache.pages_of(ids[:-1])) * PAGE
        assert (match.state is None) == (match.length == 0)
        if match.state is not None:
            assert stands_for[match.state] == ids[: match.length]
        sequence, _ = pool.share(match.pages, match.length)
        pool.reserve(sequence, len(ids) - match.length)
        sequence.length = len(ids)
        ends = range(match.length + PAGE, len(ids) + 1, PAGE)
        snapshots: dict[int, int] = {}
        for end in data.draw(st.sets(st.sampled_from(ends), max_size=2)) if ends else ():
            if not states.free:
                assert cache.evict_snapshot()
            snapshots[end] = row = states.take()
            states.snapshots.add(row)
            stands_for[row] = ids[:end]
        if ends:
            cache.insert(ids, sequence.pages, ends[-1], snapshots=snapshots)
        for row in snapshots.values():  # of tokens that are there already
            states.release(row)
        pool.remove(sequence)
        if data.draw(st.booleans()):
            cache.evict_snapshot()
        assert len(states.snapshots) == states.rows - states.free
    cache.clear()
    assert states.free == states.rows
    assert not states.snapshots


def test_the_snapshot_goes_that_saves_least() -> None:
    """Few pages are read again without it. One that is far from others goes, too, once nobody uses it."""
    pool, states = PagePool(1 << 20, states=True), StatePool()
    cache = PrefixCache(pool, states)
    pool.grow(128)
    states.grow(7)

    def insert(ids: list[int], ends: list[int]) -> None:
        sequence, _ = pool.share((), 0)
        pool.reserve(sequence, len(ids))
        for end in ends:
            if not states.free:
                assert cache.evict_snapshot()
            row = states.take()
            cache.insert(ids, sequence.pages, end * PAGE, snapshots={end * PAGE: row})
        pool.remove(sequence)

    long = text(32 * PAGE)
    insert(long, [8, 16, 24, 28, 30, 31, 32])
    for left in ([8, 16, 24, 28, 30, 32], [8, 16, 24, 28, 32], [8, 16, 24, 32]):
        assert cache.evict_snapshot()
        assert list(cache.snapshots_of(long)) == left
    for i in range(60):
        assert cache.match(long[: 16 * PAGE + 1]).length == 16 * PAGE
        insert([200 + i] * PAGE, [1])
    assert list(cache.snapshots_of(long)) == [16]
