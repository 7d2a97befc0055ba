"""The parts of an engine, each without the others: step core, inbox, masks, recovery, counters."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shaderlm.engine import Handle, Request
from shaderlm.engine.completion import Timing
from shaderlm.engine.counters import Counters
from shaderlm.engine.inbox import Inbox
from shaderlm.engine.mask_queue import MaskQueue
from shaderlm.engine.recovery import Recovery
from shaderlm.engine.scheduler import Batch, Rows, Scheduler, SchedulerLimits
from shaderlm.engine.step_core import StepCore
from shaderlm.runtime.prefix_cache import PrefixCache

from .fake_runner import FakeRunner, continued, hashed
from .test_engine_loop import VOCABULARY, Allowed, made

TOKEN = hashed(VOCABULARY)


def handles(*requests: Request) -> list[Handle]:
    """Not submitted to any engine."""
    model, _ = made()
    return [model.engine.submit_lazy(request) for request in requests]


# Step core ----------------------------------------------------------------------------------------------------


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(TOKEN, VOCABULARY)


def started(runner: FakeRunner, *requests: Request) -> list[Handle]:
    found = handles(*requests)
    for handle in found:
        handle.sequence.sequence = runner.add()
    return found


def prompts(*given: Handle) -> Batch:
    return Batch(tuple(Rows(handle.sequence, handle.sequence.tokens, True) for handle in given), decode=False)


def decode(*given: Handle) -> Batch:
    return Batch(tuple(Rows(handle.sequence, None, True) for handle in given), decode=True)


def awaited(core: StepCore) -> list[int]:
    step = core.in_flight.popleft()
    tokens = step.wait()
    assert tokens is not None
    return [int(tokens[slot]) for _, slot in step.sampled]


def test_steps_are_run_in_order_and_counted(runner: FakeRunner) -> None:
    core, (a, b) = StepCore(runner), started(runner, Request([1, 2, 3]), Request([4]))
    core.submit(prompts(a, b))
    same = decode(a, b)
    for _ in range(3):
        core.submit(same)
    core.submit(decode(b))
    found = [awaited(core) for _ in range(5)]
    assert [tokens[0] for tokens in found[:4]] == continued([1, 2, 3], TOKEN, 4)
    assert [tokens[-1] for tokens in found] == continued([4], TOKEN, 5)
    assert (core.steps, core.rows) == (5, 4 + 3 * 2 + 1)


def test_nobody_waits_for_a_sequence_that_is_forgotten(runner: FakeRunner) -> None:
    core, (a, b) = StepCore(runner), started(runner, Request([1]), Request([2]))
    core.submit(prompts(a))
    core.submit(prompts(b))
    core.submit(decode(a, b))
    core.forget(a.sequence)
    assert [step.states for step in core.in_flight] == [[b.sequence], [b.sequence]]
    assert [awaited(core)[0] for _ in range(2)] == continued([2], TOKEN, 2)


@pytest.mark.parametrize("output", ["hidden", "logits"])
def test_what_a_prompt_gives_is_found_among_the_others(runner: FakeRunner, output: Any) -> None:
    core = StepCore(runner)
    a, b, c = started(runner, Request([9]), Request([3, 4, 5], output=output), Request([8]))
    core.submit(prompts(a, b, c))
    step = core.in_flight[0]
    step.wait()
    assert step.result is not None
    ((state, rows),) = step.outputs.items()
    b.take_output(step.result, rows)
    assert state is b.sequence
    if output == "hidden":
        assert b.hidden is not None
        assert b.hidden.tolist() == [3.0, 5.0]  # its length and its last id
    else:
        assert b.logits is not None
        assert b.logits.argmax(1).tolist() == [TOKEN([3]), TOKEN([3, 4]), TOKEN([3, 4, 5])]


def test_a_pool_that_cannot_grow_keeps_what_it_has(runner: FakeRunner) -> None:
    core, (a,) = StepCore(runner), started(runner, Request([1] * 60))
    batch = prompts(a)
    runner._reserve([(a.sequence.sequence, 1)])  # type: ignore[list-item]
    assert not core.could_not_grow(batch), "its pages do"
    (b,) = started(runner, Request([1] * 600))
    assert core.could_not_grow(prompts(b))
    assert runner.pool.max_pages == runner.pool.pages
    assert not core.could_not_grow(prompts(b)), "this is known"


# Inbox --------------------------------------------------------------------------------------------------------


def test_deadlines_are_over_once() -> None:
    inbox, (a, b, c) = Inbox(), handles(Request([1], timeout=0.0), Request([2], timeout=60.0), Request([3]))
    assert inbox.seconds_to_deadline() is None
    for handle in (a, b, c):
        inbox.add(handle)
    assert inbox.seconds_to_deadline() == 0
    assert inbox.late() == [a]
    assert inbox.late() == []
    left = inbox.seconds_to_deadline()
    assert left is not None
    assert 0 < left <= 60


def test_an_inbox_is_idle_after_the_last_request() -> None:
    inbox, (a, b) = Inbox(), handles(Request([1]), Request([2]))
    assert inbox.wait_until_idle(0)
    inbox.add(a)
    inbox.add(b)
    assert list(inbox.new) == inbox.all_active() == [a, b]
    assert not inbox.wait_until_idle(0)
    with inbox.lock:
        assert [inbox.remove(handle) for handle in (a, b)] == [False, True]
    assert inbox.wait_until_idle(0)


def test_a_request_that_is_cancelled_while_it_is_added() -> None:
    inbox, (handle,) = Inbox(), handles(Request([1]))
    handle.cancelled = True
    inbox.add(handle)
    assert list(inbox.cancels) == [handle]


def test_deadlines_of_requests_that_are_over_do_not_pile_up() -> None:
    inbox = Inbox()
    for handle in handles(*[Request([1], timeout=60.0)] * 300):
        with inbox.lock:
            inbox.add(handle)
            inbox.remove(handle)
    assert len(inbox._deadlines) < 70


# Masks --------------------------------------------------------------------------------------------------------


def test_masks_of_a_single_caller_are_computed_here() -> None:
    queue, (a, b) = MaskQueue(VOCABULARY), handles(*[Request([1], constraint=Allowed(5))] * 2)
    queue.add(a)
    assert queue.has(a)
    (mask,) = queue.dispatch({a.id: a})
    assert (mask.number, mask.error, mask.settings is not None) == (a.id, None, True)
    assert not queue
    queue.add(b)
    assert list(queue.dispatch({})) == [], "it is over"


def test_masks_of_several_are_computed_by_threads() -> None:
    queue, given = MaskQueue(VOCABULARY), handles(*[Request([1], constraint=Allowed(5))] * 3)
    for handle in given:
        queue.add(handle)
    assert list(queue.dispatch({handle.id: handle for handle in given})) == []
    queue.drop(given[1])
    assert [queue.has(handle) for handle in given] == [True, False, True]
    found, end = set[int](), time.monotonic() + 60
    while queue and time.monotonic() < end:
        found |= {mask.number for mask in queue.wait(1.0, lambda: False)}
    assert found >= {given[0].id, given[2].id}
    assert queue.wait(None, lambda: False) == [], "nothing is awaited, so nobody waits"
    queue.release()
    queue.join()
    assert not queue.has_threads


# Recovery -----------------------------------------------------------------------------------------------------


def recovery(runner: FakeRunner, waiting: list[Handle], new: list[Handle]) -> Recovery:
    """Of an engine in which these requests wait, or are new."""
    cache = PrefixCache(runner.pool)
    scheduler = Scheduler(runner.pool, cache, SchedulerLimits(64, 16, 64), runner.share, runner.free)
    inbox = Inbox()
    for handle in waiting:
        scheduler.add(handle.sequence)
    inbox.new.extend(new)
    return Recovery(runner, StepCore(runner), scheduler, inbox, MaskQueue(VOCABULARY))


@pytest.mark.parametrize("interrupted", [False, True])
def test_who_fails_with_a_step(runner: FakeRunner, interrupted: bool) -> None:
    constrained = Request([1], constraint=Allowed(5))
    ran, waits, new, raising = handles(*[Request([1])] * 4)
    masked, unmasked, new_masked = handles(*[constrained] * 3)
    parts = recovery(runner, [waits, raising, masked, unmasked], [new, new_masked])
    parts.masks.add(masked)
    parts.inbox.active = dict(enumerate((ran, waits, new, raising, masked, unmasked, new_masked)))
    failed = parts.failed_handles(raising, interrupted)
    assert failed == [ran, raising, *([masked] if interrupted else []), unmasked]


def test_a_turn_that_fails_without_any_step_takes_all(runner: FakeRunner) -> None:
    given = handles(*[Request([1])] * 2)
    parts = recovery(runner, given, [])
    parts.inbox.active = dict(enumerate(given))
    assert parts.failed_handles(None, False) == given


# Counters -----------------------------------------------------------------------------------------------------


def test_gaps_and_seconds_are_counted() -> None:
    counters = Counters()
    counters.observe_gaps(10.0, [9.99, 9.99, 9.0, 9.99])
    buckets, total = counters.token_gaps.buckets()
    assert buckets[-1][1] == 4
    assert total == pytest.approx(3 * 0.01 + 1.0)
    counters.finish(Timing(2.0, 3.0, 5, 0.0), "stop")
    counters.finish(Timing(0.0, 1.0, 5, 0.0), "length")
    assert (counters.seconds_per_request, dict(counters.finished)) == (3.0, {"stop": 1, "length": 1})
