"""Threads, tasks and signals that meet the engine in its worst moments, which are made to happen."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shaderlm.engine import EngineOptions, Handle, LanguageModel, Request, driver
from shaderlm.engine.scheduler import SequenceState
from shaderlm.errors import DeviceError, InputError, UnavailableError
from shaderlm.gpu.drivers import DRIVERS
from shaderlm.gpu.queue import Queue
from shaderlm.graph.batch import PAGE
from shaderlm.runtime.runner import FIRST_PAGES, U32, Tokens

from .fake_runner import FakeRunner
from .test_engine_loop import expected, fail_once, held, ids_of, left_nothing, made, request, wait_until
from .test_engine_masks import Slow


def in_time(work: Callable[[], Any]) -> None:
    """Do this in a thread, which must end."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    for problem in problems:
        raise problem


def at_once(runner: FakeRunner, work: Callable[[], Any]) -> None:
    """Do this in the middle of the next turn, in the thread that steps, as a signal handler would."""

    def awaited(tokens: object) -> None:
        runner.awaited = lambda tokens: None  # type: ignore[method-assign]
        work()

    runner.awaited = awaited  # type: ignore[method-assign]


def closed(model: LanguageModel) -> None:
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    model.close()
    left_nothing(runner)


# Submitting and cancelling -------------------------------------------------------------------------------


class Watched(deque[Handle]):
    """Requests to cancel. When the engine has taken the new ones and looks here, `then` is called, once."""

    def __init__(self, model: LanguageModel, then: Callable[[], Any]) -> None:
        super().__init__()
        self._model, self._then, self._left = model, then, 1

    def __len__(self) -> int:
        if self._left and self._model.engine.in_step:
            self._left = 0
            self._then()
        return super().__len__()


@pytest.mark.parametrize("how", ["cancelled", "late", "closed"])
def test_a_request_that_ends_before_the_engine_saw_it(how: str) -> None:
    model, runner = made()
    go_on, found = held(runner), list[Handle]()

    def submit() -> None:
        found.append(model.engine.submit(request([6], timeout=0 if how == "late" else None)))
        if how == "cancelled":
            found[0].cancel()
        if how == "closed":
            model.engine.close()

    running = model.engine.submit(request([5], 30))
    wait_until(lambda: len(runner.steps) == 2)
    model.engine._inbox.cancels = Watched(model, submit)
    go_on.set()
    if how == "closed":
        for handle in (running, found):
            with pytest.raises(UnavailableError, match="this model is closed"):
                ids_of(handle if isinstance(handle, Handle) else handle[0])
    else:
        assert ids_of(running) == expected([5], 30)
        assert ids_of(found[0]) == []
        assert found[0].finish_reason == ("closed" if how == "cancelled" else "deadline")
    closed(model)


@pytest.mark.parametrize("by", ["a signal handler", "a thread"])
def test_a_request_that_is_cancelled_while_it_is_submitted(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()
    handle = model.engine.submit_lazy(request([5]))
    canceller = threading.Thread(target=handle.cancel, daemon=True)

    def cancel() -> None:
        if by == "a thread":
            canceller.start()
            canceller.join(0.05)  # it waits for a lock
        else:
            handle.cancel()

    with monkeypatch.context() as patched:
        patched.setattr(model.engine, "check_queue", cancel)
        model.engine.start(handle)
    if by == "a thread":
        canceller.join(60)
    assert handle.finish_reason == "closed"
    assert model.engine.sequences() == []
    assert model.engine.drain(0)
    closed(model)


@pytest.mark.parametrize("how", ["cancelled", "submitted"])
def test_a_request_that_another_thread_is_about_to_submit(how: str) -> None:
    model, _ = made()
    engine, handle = model.engine, model.engine.submit_lazy(request([5], 9))
    starting = threading.Thread(target=engine.start, args=(handle,), daemon=True)
    with engine._inbox.lock:
        starting.start()
        time.sleep(0.05)  # now it waits for the lock
        if how == "cancelled":
            handle.cancel()
        else:
            engine.start(handle)
    starting.join(60)
    if how == "cancelled":
        assert handle.finish_reason == "closed"
    else:
        assert ids_of(handle) == expected([5], 9)
    assert engine.sequences() == []
    closed(model)


def test_who_asks_for_counters_does_not_hold_up_who_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is dropped while a request is submitted is cancelled there, for which the runner is needed."""
    model, runner = made()
    asking = threading.Thread(target=model.engine.stats, daemon=True)

    def ask() -> None:
        asking.start()
        time.sleep(0.02)  # now it waits for the lock of whoever submits
        assert runner.lock.acquire(timeout=60)
        runner.lock.release()

    with monkeypatch.context() as patched:
        patched.setattr(model.engine, "check_queue", ask)
        handle = model.engine.submit(request([5], 9))
    asking.join(60)
    assert ids_of(handle) == expected([5], 9)
    closed(model)


def test_a_stream_that_is_closed_when_the_thread_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads it, and the thread would leave it to its reader."""
    model, _ = made()
    stream = model.stream([5], max_tokens=900, ignore_eos=True)
    next(stream)
    deliver = model.engine._deliver

    def watched(confirmed: Any) -> None:
        deliver(confirmed)
        if other.finish_reason is not None:
            monkeypatch.setattr(model.engine, "_deliver", deliver)
            stream.close()

    monkeypatch.setattr(model.engine, "_deliver", watched)
    other = model.engine.submit(request([6], 3))
    assert ids_of(other) == expected([6], 3)
    wait_until(lambda: stream.completion is not None)
    closed(model)


def test_a_cancel_that_comes_while_another_one_is_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()
    over = model.engine.submit(request([6], 3))
    over.result()
    wait_until(lambda: not model.engine.has_thread)
    stream = model.stream([5], max_tokens=900, ignore_eos=True)
    next(stream)
    attend = model.engine._process_control

    def watched() -> None:
        attend()
        monkeypatch.setattr(model.engine, "_process_control", attend)
        in_time(stream.close)

    monkeypatch.setattr(model.engine, "_process_control", watched)
    model.engine.cancel(over)
    assert stream.completion is not None
    closed(model)


def test_a_cancel_that_fails_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()
    stream = model.stream([5], max_tokens=900, ignore_eos=True)
    next(stream)
    with monkeypatch.context() as patched:
        patched.setattr(model.engine._scheduler, "finish", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            stream.close()
    assert model.engine.sequences() == []
    assert model.generate([5], max_tokens=9, ignore_eos=True).ids == expected([5], 9)
    closed(model)


# Readers -------------------------------------------------------------------------------------------------


def test_a_reader_and_another_thread_wait_for_the_same_end() -> None:
    """The reader has seen that there is nothing, and is about to wait. What then comes must wake it."""
    model, runner = made()
    go_on, about_to, may_wait = held(runner), threading.Event(), threading.Event()
    handle = model.engine.submit(request([5], 1))

    class Slow(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is reader:
                about_to.set()
                may_wait.wait(60)
            return super().wait(timeout)

        def clear(self) -> None:
            if threading.current_thread() is not reader:
                wait_until(lambda: handle.finish_reason is not None)
            super().clear()

    handle._event = Slow()
    reader = threading.Thread(target=lambda: ids_of(handle), daemon=True)
    other = threading.Thread(target=handle.wait_for_end, daemon=True)
    reader.start()
    assert about_to.wait(60)
    other.start()
    time.sleep(0.02)  # now the other one waits
    go_on.set()
    other.join(60)
    may_wait.set()
    reader.join(60)
    assert not reader.is_alive()
    closed(model)


def test_what_came_before_an_error_can_be_read() -> None:
    model, runner = made(ahead=1)
    handle = model.engine.submit(request([5], 30))
    awaited = runner.awaited

    def third(tokens: Any) -> None:
        if len(runner.steps) == 3:
            raise ZeroDivisionError("a bug")
        awaited(tokens)

    runner.awaited = third  # type: ignore[method-assign]
    wait_until(lambda: handle.finish_reason is not None)
    assert list(next(handle).ids) == expected([5], 2)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        next(handle)
    assert list(handle) == []
    closed(model)


def test_draining_ends_after_the_last_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runner = made()
    go_on = held(runner)
    handle = model.engine.submit(request([5], 3))
    finish = handle.finish

    def slow(reason: str, error: BaseException | None) -> None:
        time.sleep(0.05)
        finish(reason, error)

    monkeypatch.setattr(handle, "finish", slow)
    go_on.set()
    assert model.engine.drain(20)
    assert handle.finish_reason == "length"
    closed(model)


# Signals -------------------------------------------------------------------------------------------------


def test_a_signal_handler_cannot_generate_while_its_own_thread_does() -> None:
    """It is told so. What it interrupts goes on."""
    model, runner = made()
    stream = model.stream([5], max_tokens=20, ignore_eos=True)

    def generate() -> None:
        with pytest.raises(InputError, match="Have it set a flag"):
            model.generate([6], max_tokens=3)
        with pytest.raises(InputError, match="Have it set a flag"):
            next(stream)

    at_once(runner, generate)
    in_time(lambda: list(stream))
    assert stream.completion is not None
    assert stream.completion.ids == expected([5], 20)
    assert model.engine.stats().finished == {"length": 1}
    closed(model)


def test_a_signal_handler_may_submit() -> None:
    model, runner = made()
    found: list[Handle] = []
    at_once(runner, lambda: found.append(model.engine.submit(request([6], 9))))
    assert model.generate([5], max_tokens=20, ignore_eos=True).ids == expected([5], 20)
    assert ids_of(found[0]) == expected([6], 9)
    closed(model)


def test_a_signal_handler_closes_what_is_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()
    clear = model.engine._cache.clear

    def interrupted() -> None:
        model.engine.close()
        clear()

    monkeypatch.setattr(model.engine._cache, "clear", interrupted)
    in_time(model.engine.close)
    closed(model)


def test_ctrl_c_is_for_the_thread_that_got_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runner = made()
    others: list[Handle] = []
    deliver = model.engine._deliver

    def interrupted(confirmed: Any) -> None:
        if model.engine._scheduler.running[-1:] == [others[0].sequence]:  # it shares the step after this one
            monkeypatch.setattr(model.engine, "_deliver", deliver)
            raise KeyboardInterrupt
        deliver(confirmed)

    at_once(runner, lambda: others.append(model.engine.submit(request([6], 9))))
    monkeypatch.setattr(model.engine, "_deliver", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate([5], max_tokens=20)
    with pytest.raises(UnavailableError, match="was interrupted; ask again"):
        list(others[0])
    assert model.generate([5], max_tokens=9, ignore_eos=True).ids == expected([5], 9)
    closed(model)


def test_ctrl_c_twice_leaves_the_engine_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first is being dealt with."""
    model, runner = made()
    reset = model.engine._scheduler.reset

    def interrupted(states: Any) -> None:
        monkeypatch.setattr(model.engine._scheduler, "reset", reset)
        raise KeyboardInterrupt

    fail_once(runner, KeyboardInterrupt())
    monkeypatch.setattr(model.engine._scheduler, "reset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate([5], max_tokens=9)
    assert model.engine.sequences() == []
    assert model.generate([5], max_tokens=9, ignore_eos=True).ids == expected([5], 9)
    closed(model)


# Threads and processes -----------------------------------------------------------------------------------


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            model.engine.submit(request([5], 9))
    assert model.engine.sequences() == []
    assert not model.engine.has_thread
    assert ids_of(model.engine.submit(request([5], 9))) == expected([5], 9)
    closed(model)


def test_an_engine_that_cannot_recover_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runner = made()
    model.engine.configure(EngineOptions(parallel=1))
    go_on = held(runner)
    handles = [model.engine.submit(request([i], 30)) for i in range(3)]
    wait_until(lambda: len(runner.steps) >= 2)
    monkeypatch.setattr(model.engine._scheduler, "reset", lambda states: 1 // 0)
    fail_once(runner, ValueError("a bug"))
    go_on.set()
    for handle in handles:
        with pytest.raises(DeviceError, match=r"the engine failed .* load it again"):
            list(handle)
    wait_until(lambda: not model.engine.has_thread)
    with pytest.raises(DeviceError, match="the engine failed"):
        model.engine.submit(request([1]))
    model.close()


def test_models_do_not_wait_for_each_other() -> None:
    """Tokens of one are awaited while those of another come."""
    go_on = threading.Event()

    def late() -> U32:
        assert go_on.wait(60)
        return np.zeros(1, np.uint32)

    slow = threading.Thread(target=Tokens(late).wait, daemon=True)
    slow.start()
    in_time(Tokens(lambda: np.zeros(1, np.uint32)).wait)
    go_on.set()
    slow.join()


def test_an_interrupt_while_a_sequence_leaves_the_batch_leaves_nothing() -> None:
    model, _ = made()
    engine = model.engine
    engine.configure(EngineOptions(parallel=1))
    engine._start_thread = lambda: None  # type: ignore[method-assign]
    runs, waits = engine.submit(request([1, 2, 3], 30)), engine.submit(request([4, 5, 6], 10))
    for _ in range(4):
        engine._guarded(engine._iterate)
    forget = engine._core.forget

    def interrupted(state: SequenceState) -> None:
        engine._core.forget = forget  # type: ignore[method-assign]
        raise KeyboardInterrupt

    engine._core.forget = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        waits.cancel()
    later = engine.submit(request([7, 8, 9], 30))
    while later.finish_reason is None:
        engine._guarded(engine._iterate)
    assert (waits.finish_reason, later.finish_reason) == ("error", "length")
    assert runs.finish_reason is not None
    closed(model)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_a_child_process_does_not_wait_for_threads_of_its_parent() -> None:
    model, runner = made()
    go_on = held(runner)
    handle = model.engine.submit(request([5], 9))
    assert model.engine in driver._engines
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of processes that have threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = len(driver._engines)
        try:
            model.generate([5], max_tokens=9)
            code += 10
        except UnavailableError as problem:
            code += 20 * ("fork" not in str(problem))
        model.engine.close()  # waits for no lock
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    go_on.set()
    assert ids_of(handle) == expected([5], 9)
    closed(model)


def test_in_a_fork_a_model_with_a_device_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the parent may have had any lock: none is waited for."""
    model, runner = made()
    queue = Queue(cast("Any", SimpleNamespace(lost=None)))
    with monkeypatch.context() as child:
        child.setattr(DRIVERS, "forked", True)
        child.setattr(FakeRunner, "forked", True)
        child.setattr(runner, "check_device", queue.check)
        locked, go_on = threading.Event(), threading.Event()
        other = threading.Thread(target=hold, args=(model.engine._step_lock, locked, go_on), daemon=True)
        other.start()
        assert locked.wait(60)
        with pytest.raises(
            DeviceError, match=r"a fork of one that started GPU drivers.* Load the model after the fork"
        ):
            model.generate([5], max_tokens=9)
        model.engine.close()
        go_on.set()
        other.join(60)


def hold(lock: Any, locked: threading.Event, go_on: threading.Event) -> None:
    with lock:
        locked.set()
        go_on.wait(60)


# Memory --------------------------------------------------------------------------------------------------


def test_memory_that_is_gone_while_sequences_decode() -> None:
    """Three texts grow from one page to two, in the four that there are: the youngest waits."""
    model, runner = made()
    grow = runner._grow

    def scarce(pages: int) -> None:
        if pages > FIRST_PAGES:
            raise DeviceError("no memory")
        grow(pages)

    runner._grow = scarce  # type: ignore[method-assign]
    go_on = held(runner)
    prompts = [[i] * 100 for i in range(3)]
    handles = [model.engine.submit(request(prompt, 60)) for prompt in prompts]
    go_on.set()
    assert [ids_of(handle) for handle in handles] == [expected(prompt, 60) for prompt in prompts]
    assert model.engine.stats().preemptions > 0
    closed(model)


def generate(model: LanguageModel) -> None:
    model.generate([5], max_tokens=9, ignore_eos=True)


def submit(model: LanguageModel) -> None:
    handles = [model.engine.submit(Request([i], max_tokens=9, timeout=1000)) for i in range(3)]
    for handle in handles:
        handle.result()
    wait_until(lambda: not model.engine.has_thread)


def leave(model: LanguageModel) -> None:
    next(model.stream([5], max_tokens=900, ignore_eos=True))
    model.stream([5])


def constrain(model: LanguageModel) -> None:
    constraint = Slow(at=1)
    weakref.finalize(model.runner, constraint.go_on.set)  # the thread that computes its mask does not keep the model
    handle = model.engine.submit(request([6], 20, constraint=constraint))
    assert constraint.asked.wait(60)
    handle.cancel()
    list(handle)
    wait_until(lambda: not model.engine.has_thread)


def fail(model: LanguageModel) -> None:
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    at_once(runner, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        list(model.engine.submit(request([5])))
    at_once(runner, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        generate(model)
    wait_until(lambda: not model.engine.has_thread)


@pytest.mark.parametrize("use", [generate, submit, leave, constrain, fail])
def test_a_model_that_nobody_refers_to_is_freed_at_once(use: Callable[[LanguageModel], None]) -> None:
    """Without waiting for Python to look for cycles: its memory is the GPU's, of which Python knows nothing."""
    gc.collect()
    gc.disable()
    try:
        model, runner = made()
        use(model)
        known = weakref.ref(runner)
        del model, runner
        wait_until(lambda: known() is None)
        wait_until(lambda: "masks" not in {thread.name for thread in threading.enumerate()})
    finally:
        gc.enable()


def test_tokens_before_an_error_are_not_lost() -> None:
    """A sequence is preempted by the step that fails, after its token was confirmed and before it was delivered."""
    model, runner = made(ahead=2)
    model.engine.configure(EngineOptions(cache_tokens=FIRST_PAGES * PAGE))
    scheduler, preempted = model.engine._scheduler, list[object]()
    preempt = scheduler.preempt

    def preempting(state: SequenceState) -> None:
        preempt(state)
        preempted.append(state)

    def failing(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if len(preempted) == 1:
                preempted.append("failed")
                raise DeviceError("out of memory")
            return run(*given)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "preempt", preempting)
        for name in ("decode", "_run"):
            patch.setattr(runner, name, failing(getattr(runner, name)))
        prompts = [[i] * 100 for i in (5, 7, 6)]
        with runner.lock:  # no step before all are there
            handles = [model.engine.submit(request(prompt, 60)) for prompt in prompts]
        ended = []
        for handle, prompt in zip(handles, prompts, strict=True):
            try:
                assert ids_of(handle) == expected(prompt, 60)
                ended.append("whole")
            except DeviceError:
                ended.append("error")
    assert ended.count("whole") == 1
    assert preempted[1] == "failed"
    model.close()
