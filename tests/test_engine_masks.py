"""Masks that take long hold up their own request alone. Constraints here block until a test lets them go on."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shaderlm.engine import EngineOptions, Handle, LanguageModel, mask_queue
from shaderlm.errors import UnavailableError
from shaderlm.graph.batch import PAGE
from shaderlm.runtime.runner import FIRST_PAGES

from .fake_runner import FakeRunner
from .test_engine_loop import Allowed, expected, ids_of, left_nothing, made, request, wait_until


class Slow(Allowed):
    """Its mask after `at` tokens is there when `go_on` is set. No two threads may use it at once."""

    def __init__(self, tokens: int = 7, at: int = 2, fails: bool = False) -> None:
        super().__init__(tokens, fails)
        self.at, self.asked, self.go_on = at, threading.Event(), threading.Event()
        self.used = threading.Lock()

    def mask(self) -> bytes:
        assert self.used.acquire(blocking=False)
        try:
            if self.masks == self.at:
                self.asked.set()
                assert self.go_on.wait(60)
            return super().mask()
        finally:
            self.used.release()

    def accept(self, token: int) -> bool:
        assert not self.used.locked()
        return super().accept(token)

    def is_complete(self, dropped: int, prefix: bytes) -> bool:
        assert not self.used.locked()
        return super().is_complete(dropped, prefix)


@pytest.fixture(autouse=True)
def other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute masks, however quick they are."""
    monkeypatch.setattr(mask_queue, "IN_PLACE_SECONDS", -1.0)


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def model(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    found, runner = made()
    runner.deterministic = request.param
    found.engine.configure(EngineOptions())
    yield found
    closed(found)


def closed(model: LanguageModel) -> None:
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    model.close()
    left_nothing(runner)


def blocked(model: LanguageModel, slow: Slow, tokens: int = 20, **options: Any) -> Handle:
    handle = model.engine.submit(request([6], tokens, constraint=slow, **options))
    assert slow.asked.wait(60)
    return handle


def idle(model: LanguageModel) -> bool:
    """Does whoever steps wait for masks?"""
    return model.engine._masks.is_waiting


@pytest.mark.parametrize("at", [0, 3])
def test_others_go_on_while_a_mask_is_computed(model: LanguageModel, at: int) -> None:
    slow = Slow(at=at)
    before = model.engine.submit(request([5], 60))
    handle = blocked(model, slow)
    after = model.engine.submit(request([7] * 70, 30))
    assert ids_of(before) == expected([5], 60)
    assert ids_of(after) == expected([7] * 70, 30)
    wait_until(lambda: idle(model))
    assert ids_of(model.engine.submit(request([8], 9))) == expected([8], 9), "a new request does not wait either"
    assert handle.usage.completion_tokens == at
    slow.go_on.set()
    assert ids_of(handle) == expected([6], 7) == slow.seen
    assert (handle.finish_reason, handle.stop_match) == ("stop", None)


def test_nobody_looks_again_and_again_for_a_mask(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, turns, turn = Slow(), [0], model.engine._iterate

    def counted() -> None:
        turns[0] += 1
        turn()

    monkeypatch.setattr(model.engine, "_iterate", counted)
    handle = blocked(model, slow)
    wait_until(lambda: idle(model))
    known = turns[0]
    time.sleep(0.02)
    assert turns[0] == known
    slow.go_on.set()
    assert ids_of(handle) == expected([6], 7)


@pytest.mark.parametrize("company", [False, True])
def test_a_request_can_be_cancelled_while_its_mask_is_computed(model: LanguageModel, company: bool) -> None:
    slow = Slow()
    other = model.engine.submit(request([5], 700)) if company else None
    handle = blocked(model, slow)
    handle.cancel()
    assert ids_of(handle) == expected([6], 2)
    assert handle.finish_reason == "closed"
    assert ids_of(model.engine.submit(request([7], 9, constraint=Allowed(5)))) == expected([7], 5)
    assert other is None or ids_of(other) == expected([5], 700)
    slow.go_on.set()


def test_a_deadline_while_a_mask_is_computed(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, times = Slow(at=0), [1000.0]
    monkeypatch.setattr("shaderlm.engine.inbox.time", SimpleNamespace(perf_counter=lambda: times[-1]))
    handle = blocked(model, slow, timeout=0.5)
    times.append(1001.0)
    assert ids_of(handle) == []
    assert handle.finish_reason == "deadline"
    slow.go_on.set()


def test_a_model_that_is_closed_while_a_mask_is_computed() -> None:
    model, runner = made()
    slow = Slow()
    handle = blocked(model, slow)
    closing = threading.Thread(target=model.close)
    closing.start()
    with pytest.raises(UnavailableError, match="this model is closed"):
        list(handle)  # its reader does not wait for the mask
    assert "masks" in {thread.name for thread in threading.enumerate()}
    slow.go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    left_nothing(runner)


def test_a_constraint_that_closes_its_model(model: LanguageModel) -> None:
    class Closes(Allowed):
        def mask(self) -> bytes:
            model.close()
            return super().mask()

    with pytest.raises(UnavailableError, match="this model is closed"):
        list(model.engine.submit(request([6], constraint=Closes(7))))
    wait_until(lambda: not model.engine._masks.has_threads)


@pytest.mark.parametrize("problem", [ZeroDivisionError("no mask"), SystemExit(1)])
def test_a_mask_that_fails_is_of_its_request_alone(model: LanguageModel, problem: BaseException) -> None:
    class Fails(Allowed):
        def mask(self) -> bytes:
            if self.masks == 2:
                raise problem
            return super().mask()

    other = model.engine.submit(request([5], 60))
    failing = model.engine.submit(request([6], 20, constraint=Fails(7)))
    found = list[int]()
    with pytest.raises(type(problem)):
        found.extend(token for delta in failing for token in delta.ids)
    assert found == expected([6], 2)
    assert failing.finish_reason == "error"
    assert ids_of(other) == expected([5], 60)


def test_a_sequence_is_preempted_while_its_mask_is_computed() -> None:
    """Three texts grow from one page to two, in the four that there are."""
    model, runner = made()
    model.engine.configure(EngineOptions(cache_tokens=FIRST_PAGES * PAGE))
    slow, prompts = Slow(60, at=1), [[i] * 100 for i in (5, 7, 6)]

    def awaited(tokens: object) -> None:  # nobody gets far before the mask that takes long
        wait_until(slow.asked.is_set if slow.seen else lambda: slow.masks > 0)

    runner.awaited = awaited  # type: ignore[method-assign]
    with runner.lock:  # no step before all are there
        others = [model.engine.submit(request(prompt, 60)) for prompt in prompts[:2]]
        handle = model.engine.submit(request(prompts[2], 60, constraint=slow))
    assert [ids_of(other) for other in others] == [expected(prompt, 60) for prompt in prompts[:2]]
    assert slow.asked.is_set()
    assert model.engine.stats().preemptions > 0
    slow.go_on.set()
    assert ids_of(handle) == expected(prompts[2], 60) == slow.seen
    closed(model)


class Undecided(Allowed):
    """Only its mask says whether a text is complete."""

    def mask(self) -> Any:
        found = super().mask()
        return None if self.seen and len(self.seen) == self.tokens else found

    def accept(self, token: int) -> Any:
        super().accept(token)
        return None


@pytest.mark.parametrize("seconds", [-1.0, math.inf])
@pytest.mark.parametrize(("tokens", "reason"), [(20, "stop"), (7, "stop"), (6, "length")])
@pytest.mark.parametrize("pulled", [False, True])
def test_a_mask_may_say_that_a_text_is_complete(
    model: LanguageModel, seconds: float, tokens: int, reason: str, pulled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_queue, "IN_PLACE_SECONDS", seconds)
    start = model.engine.submit_lazy if pulled else model.engine.submit
    handle = start(request([6], tokens, constraint=Undecided(7)))
    assert ids_of(handle) == expected([6], min(tokens, 7))
    assert (handle.finish_reason, handle.stop_match) == (reason, None)


def test_a_stop_string_comes_before_the_next_mask(model: LanguageModel) -> None:
    """A constraint is asked whether its text is complete while no other thread uses it."""
    ids = expected([6], 7)
    texts = [model.detokenize(ids[: i + 1]) for i in range(7)]
    stop = texts[6][len(texts[5]) :] or texts[6]
    slow = Slow(60, at=7)
    slow.go_on.set()
    handle = model.engine.submit(request([6], 20, constraint=slow, stop=(stop,)))
    handle.result()
    assert handle.stop_match == stop
    assert slow.masks == len(slow.seen), "the next mask is not asked for"


def test_one_caller_needs_no_thread_for_masks(model: LanguageModel) -> None:
    before = threading.active_count()
    for delta in model.engine.submit_lazy(request([6], 20, constraint=Allowed(20))):
        assert threading.active_count() == before, delta


def test_masks_that_are_known_to_be_quick_are_computed_in_place(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_queue, "IN_PLACE_SECONDS", math.inf)
    threads: list[str] = []

    class Noted(Allowed):
        def mask(self) -> bytes:
            threads.append(threading.current_thread().name)
            return super().mask()

    model.engine.submit(request([6], 20, constraint=Noted(6))).result()
    assert threads == ["masks"] * 2 + ["engine"] * 4, "the first says nothing of the others"


def test_a_thread_for_masks_that_cannot_be_started(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "masks":
            raise RuntimeError("can't start new thread")
        start(thread)

    other = model.engine.submit(request([5], 60))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            list(model.engine.submit(request([6], 9, constraint=Allowed(7))))
    assert ids_of(other) == expected([5], 60)
    assert ids_of(model.engine.submit(request([6], 9, constraint=Allowed(7)))) == expected([6], 7)


def during_wait(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do this when whoever steps is about to wait for a mask, in its thread, as a signal handler would."""
    wait = model.engine._masks.await_mask

    def interrupted(seconds: float | None) -> Any:
        monkeypatch.setattr(model.engine._masks, "await_mask", wait)
        work()
        return wait(seconds)

    monkeypatch.setattr(model.engine._masks, "await_mask", interrupted)
    monkeypatch.setattr(model.engine._masks, "in_place", lambda handle, active: False)


def test_a_request_that_comes_while_a_turn_begins_to_wait_for_masks(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is admitted by the turn that waits then: nobody would wake it for the mask of this one."""
    slow = Slow()
    blocked(model, slow)
    wait_until(lambda: idle(model))
    fill, came = model.engine._fill, list[Handle]()

    def filled() -> None:
        if not came:
            came.append(model.engine.submit(request([7], 9, constraint=Allowed(5))))
        fill()

    monkeypatch.setattr(model.engine, "_fill", filled)
    model.engine._masks.wake()  # a turn begins
    wait_until(lambda: bool(came) and came[0].finish_reason is not None)
    assert ids_of(came[0]) == expected([7], 5)
    slow.go_on.set()


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_masks_that_nobody_wants_any_more_are_not_computed(end: str) -> None:
    model, _ = made()
    slow = [Slow(at=0) for _ in range(3 * mask_queue._MAX_THREADS)]
    handles = [model.engine.submit(request([6], 9, constraint=each)) for each in slow]
    wait_until(lambda: sum(each.asked.is_set() for each in slow) == mask_queue._MAX_THREADS)

    def go_on() -> None:
        for each in slow:
            each.go_on.set()

    going_on = threading.Timer(0.1, go_on)
    if end == "close":
        going_on.start()  # which `close` waits for
        model.close()
    else:
        for handle in handles:
            handle.cancel()
        wait_until(lambda: not model.engine.stats().running)
        going_on.start()
        wait_until(lambda: not model.engine._masks.has_threads)
        model.close()
    going_on.join()
    assert sum(each.asked.is_set() for each in slow) == mask_queue._MAX_THREADS


def test_a_signal_handler_while_masks_are_awaited(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, others = Slow(), list[Handle]()
    handle = model.engine.submit_lazy(request([6], 20, constraint=slow))
    during_wait(model, monkeypatch, handle.cancel)
    assert ids_of(handle) == []
    assert handle.finish_reason == "closed"
    slow = Slow(at=0)
    handle = model.engine.submit_lazy(request([6], 20, constraint=slow))
    during_wait(model, monkeypatch, lambda: others.append(model.engine.submit(request([5], 9))))
    reader = threading.Thread(target=handle.result)
    reader.start()
    wait_until(lambda: bool(others))
    assert ids_of(others[0]) == expected([5], 9)
    slow.go_on.set()
    reader.join(60)
    assert slow.seen == expected([6], 7)


def test_ctrl_c_while_masks_are_awaited(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    slow = Slow(at=0)
    handle = model.engine.submit_lazy(request([6], 20, constraint=slow))
    during_wait(model, monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(handle)
    slow.go_on.set()
    assert ids_of(model.engine.submit(request([6], 20, constraint=Allowed(7)))) == expected([6], 7)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_constrained_requests_in_a_small_pool(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some masks are quick and some are not, some requests leave, and the pool is too small for all of them."""
    monkeypatch.setattr(mask_queue, "IN_PLACE_SECONDS", 100e-6)
    model, runner = made()
    runner.deterministic, runner.max_outputs = seed == 2, 32
    model.engine.configure(EngineOptions(cache_tokens=12 * PAGE))
    rng = random.Random(seed)

    class Mixed(Slow):
        def mask(self) -> bytes:
            if self.masks == self.at:
                time.sleep(0.001)
            return super().mask()

    prompts = [[rng.randrange(50) for _ in range(rng.randrange(60, 130))] for _ in range(24)]
    constraints = [Mixed(rng.randrange(1, 70), rng.randrange(20)) if i % 3 else None for i in range(24)]
    handles = []
    for prompt, constraint in zip(prompts, constraints, strict=True):
        if constraint is not None:
            constraint.go_on.set()
        handles.append(model.engine.submit(request(prompt, 60, constraint=constraint)))
    for handle in handles[::7]:
        handle.cancel()
    for i, (handle, prompt, constraint) in enumerate(zip(handles, prompts, constraints, strict=True)):
        found = ids_of(handle)
        wanted = expected(prompt, 60 if constraint is None else min(60, constraint.tokens))
        assert found == (wanted[: len(found)] if i % 7 == 0 else wanted)
        assert constraint is None or i % 7 == 0 or constraint.seen == found
    closed(model)
