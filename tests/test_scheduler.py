"""The scheduler, without an engine: whatever comes, every sequence gets its rows, once, in order, within the limits.

The rows that it schedules are run by a runner whose cache holds token ids: a token is right only if all rows before it
are where the page table says. The obvious model is the sequence alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shaderlm.engine.scheduler import Batch, DoesNotFitError, Scheduler, SchedulerLimits, SequenceState
from shaderlm.graph.batch import PAGE
from shaderlm.runtime.pages import KEPT_PAGES, KvSequence
from shaderlm.runtime.prefix_cache import PrefixCache
from shaderlm.runtime.runner import SequenceChunk, Tokens
from shaderlm.runtime.states import StatePool

from .fake_runner import FakeRunner, continued, hashed
from .tiers import examples

VOCABULARY = 50
TOKEN = hashed(VOCABULARY)
CONTEXT = 6 * PAGE


@dataclass(frozen=True)
class Wanted:
    """A request: how much of a common text it begins with, what follows, what it asks for, and when."""

    shared: int
    own: int
    left: int
    priority: int = 0
    waits: bool = False
    masked: int = 0  # turns for which each token is held up before it is sampled
    cached: bool = True
    at: int = 0  # the step before which it comes
    cancelled: int | None = None  # the step before which it is cancelled
    client: str | None = None


def prompt_of(wanted: Wanted, number: int) -> list[int]:
    return [i * i % 7 for i in range(wanted.shared)] + [(number * 31 + i) % VOCABULARY for i in range(wanted.own)]


@dataclass
class Driver:
    """Runs what the scheduler says, with steps in flight, and looks at every step."""

    limits: SchedulerLimits
    ahead: int
    max_pages: int
    deterministic: bool = False
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(TOKEN, VOCABULARY, context=CONTEXT, max_tokens=self.limits.max_rows)
        self.runner.max_pages = self.runner.pool.max_pages = self.max_pages
        self.runner.deterministic = self.limits.fixed_chunk > 0
        self.cache = PrefixCache(self.runner.pool)
        self.runner.reclaim = self.cache.reclaim
        self.scheduler = Scheduler(self.runner.pool, self.cache, self.limits, self.runner.share, self.runner.free)
        self.scheduler.preempted = self.forget
        self.flying: deque[tuple[list[tuple[SequenceState, int]], Tokens | None]] = deque()
        self.found: dict[int, list[int]] = {}
        self.refused: set[int] = set()
        self.steps: list[Batch] = []
        self.masked: dict[int, int] = {}
        self.held: dict[SequenceState, int] = {}  # for how many turns

    def forget(self, state: SequenceState) -> None:
        for sampled, _ in self.flying:
            sampled[:] = [each for each in sampled if each[0] is not state]

    def end(self, state: SequenceState) -> None:
        self.forget(state)
        self.found[state.number] = state.tokens[state.prompt_tokens :]
        self.scheduler.finish(state)

    def submit(self) -> bool:
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        try:
            batch = self.scheduler.schedule()
        except DoesNotFitError as problem:
            self.refused.add(problem.state.number)
            self.scheduler.finish(problem.state)
            return True
        if batch is None:
            return False
        self.check(batch, waiting, running)
        parts = []
        for rows in batch.rows:
            assert rows.state.sequence is not None
            parts.append(SequenceChunk(rows.state.sequence, rows.ids, "token" if rows.samples else "nothing"))
        result = self.runner.step(parts)
        sampled = [
            (rows.state, part.sequence.slot) for rows, part in zip(batch.rows, parts, strict=True) if rows.samples
        ]
        self.scheduler.submitted(batch)
        self.flying.append((sampled, result.tokens))
        self.steps.append(batch)
        return True

    def check(self, batch: Batch, waiting: list[SequenceState], running: list[SequenceState]) -> None:
        limits, scheduler = self.limits, self.scheduler
        counts = [1 if rows.ids is None else len(rows.ids) for rows in batch.rows]
        assert min(counts) >= 1
        assert sum(counts) <= limits.max_rows
        assert len({rows.state.number for rows in batch.rows}) == len(counts), "one part of a sequence"
        assert len(scheduler.running) <= limits.max_running
        assert scheduler.running == sorted(scheduler.running, key=lambda state: state.order)
        started = [state for state in waiting if state.running]
        assert started == waiting[: len(started)], "in order of priority and arrival"
        assert batch.decode == all(rows.ids is None for rows in batch.rows)
        assert not any(rows.samples and rows.state.mask_pending for rows in batch.rows)
        has_row = {rows.state.number for rows in batch.rows}
        if not limits.fixed_chunk:
            for state in running:  # nobody who can decode is left out, whatever else is read
                known = state.in_flight or (state.sequence and state.sequence.length >= len(state.tokens) - 1)
                ready = state.remaining and not state.mask_pending and not (state.needs_host_token and state.in_flight)
                assert not (state.running and known and ready) or state.number in has_row
        for rows in batch.rows if limits.fixed_chunk else ():
            assert rows.state.sequence is not None
            first, end = rows.state.sequence.length, rows.state.sequence.length + len(rows.ids or [0])
            if first < rows.state.prompt_tokens:
                assert len(batch.rows) == 1, "a chunk is alone"
                assert first % limits.fixed_chunk == 0
                assert end == min(rows.state.prompt_tokens, first + limits.fixed_chunk)
            else:
                assert end == first + 1, "what was generated is run row by row"

    def confirm(self) -> None:
        sampled, tokens = self.flying.popleft()
        if tokens is None:
            return
        known = tokens.wait()
        for state, slot in list(sampled):
            state.in_flight -= 1
            state.tokens.append(int(known[slot]))
            self.hold(state)
            if not state.remaining and not state.in_flight:
                self.end(state)

    def hold(self, state: SequenceState) -> None:
        """As the engine does while it has no mask."""
        turns = self.masked.get(state.number, 0)
        state.mask_pending = turns > 0
        self.held[state] = turns

    def go_on(self) -> None:
        for state in [state for state in self.held if state.mask_pending]:
            self.held[state] -= 1
            state.mask_pending = self.held[state] > 0

    def run(self, requests: list[Wanted], *, keep: bool = False) -> None:
        """`keep`: the cache stays as it is."""
        self.masked = {i: each.masked for i, each in enumerate(requests) if each.waits}
        states = [
            SequenceState(i, prompt_of(each, i), each.shared + each.own, each.left, each.priority, each.cached)
            for i, each in enumerate(requests)
        ]
        turn, over = 0, set[int]()
        coming = deque(sorted(zip(requests, states, strict=True), key=lambda pair: (pair[0].at, pair[1].number)))
        while coming or self.scheduler.waiting or self.scheduler.running or self.flying:
            while coming and (coming[0][0].at <= turn or not (self.scheduler.waiting or self.scheduler.running)):
                request, state = coming.popleft()
                state.needs_host_token, state.client = request.waits, request.client
                self.hold(state)
                self.scheduler.add(state)
            for request, state in zip(requests, states, strict=True):
                there = state in self.scheduler.waiting or state in self.scheduler.running
                if request.cancelled is not None and request.cancelled <= turn and there:
                    over.add(state.number)
                    self.end(state)
            while len(self.flying) < self.ahead and self.submit():
                pass
            if self.flying:
                self.confirm()
            self.go_on()
            turn += 1
            assert turn < 9000, "it goes on"
        for request, state in zip(requests, states, strict=True):
            expected = continued(prompt_of(request, state.number), TOKEN, request.left)
            if state.number in over:
                assert self.found[state.number] == expected[: len(self.found[state.number])]
            elif state.number in self.refused:
                assert request.shared + request.own + request.left > self.max_pages * PAGE
            else:
                assert self.found[state.number] == expected, f"request {state.number}"
        pool = self.runner.pool
        assert pool.sequences == 0
        assert pool.pages - pool.free == len(self.cache._nodes)
        if keep:
            return
        self.cache.clear()
        assert pool.free == pool.pages <= max(self.max_pages, 4)


LENGTHS = st.one_of(st.integers(1, 12), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 5]))
REQUESTS = st.builds(
    Wanted,
    shared=st.sampled_from([0, 3, PAGE - 2, PAGE, PAGE + 40, 2 * PAGE + 1]),
    own=LENGTHS,
    left=st.one_of(st.integers(1, 6), st.sampled_from([20, PAGE])),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    waits=st.booleans(),
    masked=st.integers(0, 3),
    cached=st.booleans() | st.just(True),
    at=st.integers(0, 20),
    cancelled=st.none() | st.none() | st.integers(1, 60),
    client=st.sampled_from([None, None, "another"]),
)


@pytest.mark.smoke
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    ahead=st.integers(1, 3),
    max_rows=st.sampled_from([16, 64, 256]),
    max_running=st.integers(1, 6),
    max_pages=st.integers(5, 14),
    chunk=st.sampled_from([8, 64]),
    fixed_chunk=st.sampled_from([0, 0, 64, PAGE]),
)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_every_sequence_gets_what_it_gets_alone(
    requests: list[Wanted], ahead: int, max_rows: int, max_running: int, max_pages: int, chunk: int, fixed_chunk: int
) -> None:
    max_rows = max(max_rows, fixed_chunk, max_running)
    Driver(SchedulerLimits(max_rows, max_running, chunk, fixed_chunk), ahead, max_pages).run(requests)


@pytest.mark.parametrize("fixed_chunk", [0, PAGE])
def test_a_pool_that_is_too_small_preempts_the_youngest(fixed_chunk: int) -> None:
    """Six texts that grow from one page to two, in a pool of seven."""
    driver = Driver(SchedulerLimits(PAGE, 6, 64, fixed_chunk), 2, 7)
    driver.run([Wanted(0, 100, 60) for _ in range(6)])
    assert driver.scheduler.preemptions >= 2
    firsts = [rows.state.number for batch in driver.steps for rows in batch.rows]
    assert firsts[0] == 0
    assert not driver.refused
    # The oldest is never the victim: it runs its rows once, 100 of the prompt and 59 of what it generates.
    oldest = sum(len(rows.ids or [0]) for batch in driver.steps for rows in batch.rows if rows.state.number == 0)
    assert oldest == 159


def test_a_long_prompt_leaves_decode_rows_in_every_step() -> None:
    driver = Driver(SchedulerLimits(64, 4, 32, 0), 2, 100)
    driver.run([Wanted(0, 4, 40), Wanted(0, 4, 40), Wanted(0, 4 * PAGE, 2, at=5)])
    reading = [batch for batch in driver.steps if any(rows.state.number == 2 and rows.ids for rows in batch.rows)]
    assert len(reading) >= 4 * PAGE // 32
    busy = [batch for batch in reading if len(batch.rows) == 3]
    assert len(busy) >= 16, "both others have a row beside the chunk"
    assert max(len(rows.ids or ()) for batch in busy for rows in batch.rows) == 32


def test_a_short_prompt_passes_a_long_one() -> None:
    driver = Driver(SchedulerLimits(64, 4, 64, 0), 1, 100)
    driver.run([Wanted(0, 5 * PAGE, 2), Wanted(0, 10, 2, at=1)])
    order = [rows.state.number for batch in driver.steps for rows in batch.rows if rows.samples]
    assert order[0] == 1, "its first token comes before the long prompt is read"


def test_a_prefix_is_computed_once() -> None:
    """The second request begins after the pages of the first; also while the first is still there."""
    driver = Driver(SchedulerLimits(64, 1, 64, 0), 2, 100)
    driver.run([Wanted(2 * PAGE + 9, 5, 3), Wanted(2 * PAGE + 9, 5, 3)])
    assert driver.cache.hits == 2 * PAGE + 9
    driver = Driver(SchedulerLimits(64, 2, 64, 0), 2, 100)
    driver.run([Wanted(2 * PAGE + 9, 5, 60), Wanted(2 * PAGE + 9, 5, 3, at=12)])
    assert driver.cache.hits == 2 * PAGE, "whole pages, which the first does not write to any more"


def test_clients_share_no_prefixes() -> None:
    """Unless they are told to; then in whole pages."""
    texts = [Wanted(2 * PAGE + 9, 5, 3, client=client) for client in ("a", "b", "a")]
    driver = Driver(SchedulerLimits(64, 1, 64), 2, 100)
    driver.run(texts)
    assert driver.cache.hits == 2 * PAGE + 9
    driver = Driver(SchedulerLimits(64, 1, 64, shares_prefixes=True), 2, 100)
    driver.run(texts)
    assert driver.cache.hits == 2 * (2 * PAGE)


def test_the_pool_grows_before_cached_pages_go() -> None:
    driver = Driver(SchedulerLimits(64, 1, 64), 2, 12)
    driver.run([Wanted(0, 3 * PAGE, 1) for _ in range(4)], keep=True)
    assert (driver.runner.pool.pages, len(driver.cache._nodes), driver.cache.evicted) == (12, 12, 0)
    driver.run([Wanted(0, 3 * PAGE + 1, 1, client="another")], keep=True)
    assert (driver.runner.pool.pages, driver.cache.evicted) == (12, 4), "it cannot grow any more"


def test_cached_pages_do_not_take_all_memory() -> None:
    """The pool grows for them up to twice what sequences use, and seldom: all wait while it grows."""
    driver = Driver(SchedulerLimits(64, 1, 64), 2, 1 << 20)
    grown, grow = list[int](), driver.runner._grow

    def counted(pages: int) -> None:
        grown.append(pages)
        grow(pages)

    driver.runner._grow = counted  # type: ignore[method-assign]
    driver.run([Wanted(0, 3 * PAGE, 1) for _ in range(60)], keep=True)
    assert grown == [4, 8, 16, 32, KEPT_PAGES], "twice as many each time"
    assert driver.cache.evicted >= 60 * 3 - KEPT_PAGES
    beside = Driver(SchedulerLimits(64, 16, 64), 2, 1 << 20)  # 16 at the same time, of up to six pages
    beside.run([Wanted(0, 3 * PAGE, 300) for _ in range(40)], keep=True)
    assert KEPT_PAGES < beside.runner.pool.pages <= 2 * 16 * 6


@pytest.mark.parametrize("fixed_chunk", [0, 32])
def test_rows_that_give_something_are_counted(fixed_chunk: int) -> None:
    """Every row of some prompts does. Beside the others there are as many as a step has outputs for."""
    driver = Driver(SchedulerLimits(64, 8, 64, fixed_chunk, max_outputs=8), 1, 100)
    states = [SequenceState(i, [1] * 50, 50, 6, cached=False, all_outputs=i % 2 == 0) for i in range(6)]
    for state in states:
        driver.scheduler.add(state)
    given = dict.fromkeys(states, 0)
    while any(count < 50 for state, count in given.items() if state.all_outputs):
        batch = driver.scheduler.schedule()
        assert batch is not None
        outputs = 0
        for rows in batch.rows:
            count = len(rows.ids or (0,)) if rows.state.all_outputs else int(rows.samples)
            given[rows.state] += count
            outputs += count
            assert rows.state.sequence is not None
            driver.runner.step([SequenceChunk(rows.state.sequence, rows.ids, "token" if rows.samples else "nothing")])
        assert outputs <= 8
        driver.scheduler.submitted(batch)
        for rows in batch.rows:
            if rows.samples:
                rows.state.in_flight -= 1
                rows.state.tokens.append(1)
                if rows.state.all_outputs:
                    driver.scheduler.finish(rows.state)
    assert all(count == 50 for state, count in given.items() if state.all_outputs)


def test_a_request_that_can_never_fit_is_refused() -> None:
    driver = Driver(SchedulerLimits(64, 4, 64, 0), 2, 3)
    driver.run([Wanted(0, 20, 5), Wanted(0, 4 * PAGE, 3), Wanted(0, 30, 5)])
    assert driver.refused == {1}


def test_a_page_that_is_cached_in_part_takes_nobodys_place() -> None:
    """The second text fills the pool. Its beginning is cached: one page, and a part of another, which is not used."""
    driver = Driver(SchedulerLimits(64, 1, 64, 0), 2, 6)
    driver.run([Wanted(200, 440, 3), Wanted(200, 560, 3)])
    assert not driver.refused
    assert driver.cache.hits == PAGE
    driver = Driver(SchedulerLimits(64, 1, 64, 0), 2, 7)
    driver.run([Wanted(200, 440, 3), Wanted(200, 560, 3)])
    assert driver.cache.hits == 200, "a page more"


def test_nothing_changes_while_the_same_sequences_decode() -> None:
    """The same batch comes again: the engine need not look at its rows."""
    driver = Driver(SchedulerLimits(64, 4, 64, 0), 1, 100)
    driver.run([Wanted(0, 4, 50), Wanted(0, 9, 50)])
    assert len({id(batch) for batch in driver.steps}) < 12


class StateReader:
    """Reads prompts of a model with states, one after the other, with what is cached."""

    def __init__(self, rows: int = 512, fixed_chunk: int = 0, snapshots: int = 64) -> None:
        self.runner, self.states = FakeRunner(TOKEN, VOCABULARY, context=100 * PAGE, max_tokens=rows), StatePool()
        self.states.grow(snapshots)
        self.cache = PrefixCache(self.runner.pool, self.states)
        limits = SchedulerLimits(rows, 4, rows, fixed_chunk, has_states=True)
        self.scheduler = Scheduler(self.runner.pool, self.cache, limits, self.runner.share, self.runner.free)
        self.scheduler.snapshot, self.scheduler.release_state = self.snapshot, self.states.release
        self.taken: list[int] = []

    def snapshot(self, sequence: KvSequence) -> int:
        assert sequence.length % PAGE == 0
        self.taken.append(sequence.length // PAGE)
        if not self.states.free:
            assert self.cache.evict_snapshot()
        return self.states.take()

    def read(self, prompt: list[int]) -> tuple[int | None, list[int], int]:
        """How many tokens were cached, after which pages snapshots were taken, and in how many steps it was read."""
        self.taken, steps = [], 0
        state = SequenceState(0, list(prompt), len(prompt), 1)
        self.scheduler.add(state)
        while not state.in_flight:
            batch = self.scheduler.schedule()
            assert batch is not None
            (part,) = batch.rows
            self.runner.step([SequenceChunk(state.kv_sequence, part.ids, "token" if part.samples else "nothing")])
            self.scheduler.submitted(batch)
            steps += 1
        self.scheduler.finish(state)
        return state.cached_tokens, self.taken, steps


@pytest.mark.parametrize("rows", [300, 384, 512])
def test_chunks_end_where_snapshots_are_taken(rows: int) -> None:
    """After eight pages each, and closer near the end, however many rows a step has for a prompt."""
    assert StateReader(rows).read([1] * (27 * PAGE + 5))[1] == [8, 16, 23, 25, 26, 27]
    assert StateReader(rows).read([1] * (9 * PAGE + 5))[1] == [5, 8, 9]
    assert StateReader(rows).read([1] * (7 * PAGE + 5))[1] == [7]


def test_fixed_chunks_end_where_they_did() -> None:
    """Snapshots are taken at their ends alone."""
    reader = StateReader(fixed_chunk=2 * PAGE)
    assert reader.read([1] * (27 * PAGE + 5)) == (0, [8, 16, 18, 22, 24, 26], 14)
    assert reader.read([1] * (19 * PAGE) + [2] * (8 * PAGE + 5)) == (18 * PAGE, [24, 26], 5)


@pytest.mark.parametrize("length", [90, 512, 900, 1023, 1100, 2047, 2300, 8100])
def test_snapshots_near_the_end_take_few_steps(length: int) -> None:
    """None more of a short prompt, and two more of a long one: beside those up to the last whole page and the rest."""
    whole = length // PAGE * PAGE
    steps = -(-whole // 512) + (length > whole)
    assert StateReader().read([1] * length)[2] == steps + min(2, whole // 1024)


def test_prompts_begin_close_to_where_they_part() -> None:
    """The second one begins after a snapshot near the end of the first; a third one where the second left one."""
    common = [i * i % 7 for i in range(8000)]
    whole = 8000 // PAGE
    for own, cached, second, third in (
        (100, whole, [63], [63]),
        (400, whole - 1, [whole, 65], [65]),
        (1500, 56, [whole, 64, 70, 72, 73, 74], [64, 70, 73, 74]),
    ):
        reader = StateReader()
        prompts = [common + [10 + i] * own for i in range(3)]
        assert reader.read(prompts[0])[0] == 0
        assert reader.read(prompts[1])[:2] == (cached * PAGE, second)
        assert reader.read(prompts[2])[:2] == (whole * PAGE, third)
    reader = StateReader()
    short = [reader.read(common[:600] + [10 + i] * 300) for i in range(3)]
    assert short == [(0, [7], 3), (0, [4, 7], 3), (4 * PAGE, [7], 2)], "no prompt was cut for nothing"


def test_a_common_beginning_outlasts_the_ends_of_prompts() -> None:
    """Snapshots are few, and other prompts leave as many as there may be before the next one begins like that."""
    reader = StateReader(snapshots=10)
    common = [i * i % 7 for i in range(20 * PAGE)]
    reader.read(common + [9] * 300)
    for i in range(6):
        cached = reader.read(common + [10 + i] * 300)[0]
        assert cached is not None
        assert cached >= 16 * PAGE
        for j in range(3):
            reader.read([20 + 3 * i + j] * (12 * PAGE))  # three snapshots each
        assert len(reader.cache._snapshots) == reader.states.rows - reader.states.free <= 10
