"""Generations without a model: read-backs, locks, threads, and what text costs per token."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shaderlm.errors import DeviceError, InputError

from .fake_runner import FakeRunner, FakeTokens, fake_model

END = "<|im_end|>"
TEXT = "the owl in the night"
CHAT = [{"role": "user", "content": "hello"}]


def fates(runner: FakeRunner) -> set[str]:
    return set(runner.fates)


def has_given_back(runner: FakeRunner) -> bool:
    """Are there neither sequences nor pages that somebody uses? Those of the prefix cache have one user."""
    return runner.pool.sequences == 0 and all(users <= 1 for users in runner.pool._users)


# Read-backs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("chat", [False, True])
def test_every_token_is_read_or_discarded(ahead: int, chat: bool) -> None:
    """However the generation ends. What the device sampled beyond the end is discarded, once."""

    def ended(text: str, **options: Any) -> FakeRunner:
        model, runner = fake_model(text, ahead=ahead)
        stream = model.stream_chat(CHAT, **options) if chat else model.stream("x", **options)
        for _ in stream:
            if options.get("seed") == 1:  # leave it
                stream.close()
        assert stream.completion is not None
        assert fates(runner) <= {"read", "discarded"}
        assert has_given_back(runner)
        model.close()
        assert runner.pool.free == runner.pool.pages, "the cache of prefixes ends with the model"
        return runner

    early = {"read", "discarded"} if ahead > 1 else {"read"}
    assert fates(ended(TEXT + END, max_tokens=900)) == early
    assert fates(ended(TEXT, max_tokens=900, stop="owl")) == early
    assert fates(ended(TEXT, max_tokens=900, seed=1)) == early
    limited = ended(TEXT, max_tokens=9)
    assert fates(limited) == {"read"}
    assert len(limited.fates) == 9, "nothing beyond max_tokens is computed"


@pytest.mark.parametrize("ahead", [2, 3])
def test_nothing_is_submitted_after_a_stop_token(ahead: int) -> None:
    model, runner = fake_model(TEXT + END, ahead=ahead)
    found = model.generate("x")
    assert (str(found), found.finish_reason) == (TEXT, "stop")
    assert len(runner.fates) == len(found.ids) + ahead  # its own, and those under way when it came


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_an_error_discards_what_is_under_way(ahead: int) -> None:
    model, runner = fake_model(TEXT, ahead=ahead)

    def lost(tokens: FakeTokens) -> None:
        if len(runner.fates) > 4:
            raise DeviceError("lost")

    runner.awaited = lost  # type: ignore[method-assign]
    stream = model.stream("x")
    with pytest.raises(DeviceError, match="lost"):
        list(stream)
    assert stream.completion is None
    del stream  # it has the error, and the error has what was under way
    gc.collect()
    assert fates(runner) == {"read", "discarded"}
    assert has_given_back(runner)


def test_a_stream_that_is_forgotten_gives_its_session_back() -> None:
    model, runner = fake_model(TEXT)
    stream = model.stream("x")
    next(stream)
    del stream
    gc.collect()
    assert has_given_back(runner)
    assert fates(runner) == {"read", "discarded"}
    steps = len(runner.steps)
    model.stream("x")  # never read
    gc.collect()
    assert len(runner.steps) == steps


@pytest.mark.parametrize(("ahead", "expected"), [(1, 0), (2, 2), (3, 3)])
def test_the_next_steps_are_submitted_before_the_text_is_made(ahead: int, expected: int) -> None:
    model, runner = fake_model(TEXT, ahead=ahead)
    with model.stream("x", max_tokens=100) as stream:
        for _ in range(5):
            next(stream)
            assert runner.fates.count("pending") == expected


# Threads and locks ---------------------------------------------------------------------------------------


def waiting(runner: FakeRunner) -> tuple[threading.Event, threading.Event]:
    """Whoever waits for a token says so by the first event, and goes on after the second."""
    arrived, go_on = threading.Event(), threading.Event()

    def awaited(tokens: FakeTokens) -> None:
        arrived.set()
        assert go_on.wait(60)

    runner.awaited = awaited  # type: ignore[method-assign]
    return arrived, go_on


def in_thread(run: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def caught() -> None:
        try:
            found.append(run())
        except Exception as problem:
            found.append(problem)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    return thread, found


def test_no_lock_of_the_model_is_held_while_a_token_is_awaited() -> None:
    model, runner = fake_model(TEXT)
    arrived, go_on = waiting(runner)
    first, found = in_thread(lambda: model.generate("x", max_tokens=5))
    assert arrived.wait(60)
    second, running = in_thread(lambda: model.engine.stats().running)
    second.join(60)
    assert running == [1], "another thread has its turn"
    go_on.set()
    first.join(60)
    assert len(found[0].ids) == 5


def test_closing_waits_for_the_token_that_a_thread_awaits() -> None:
    model, runner = fake_model(TEXT)
    arrived, go_on = waiting(runner)
    reader, read = in_thread(lambda: model.generate("x", max_tokens=50))
    idle = model.stream("y")
    assert arrived.wait(60)
    closer, _ = in_thread(model.close)
    time.sleep(0.05)
    assert not runner.closed, "a token of this runner is awaited"
    go_on.set()
    for thread in (reader, closer):
        thread.join(60)
    assert runner.closed
    assert isinstance(read[0], InputError)
    assert "this model is closed" in str(read[0])
    with pytest.raises(InputError, match="this model is closed"):
        next(idle)
    assert has_given_back(runner)
    assert fates(runner) <= {"read", "discarded"}


def test_a_stream_is_closed_while_another_thread_waits() -> None:
    model, runner = fake_model(TEXT)
    arrived, go_on = waiting(runner)
    stream = model.stream("x")
    reader, read = in_thread(lambda: list(stream))
    assert arrived.wait(60)
    stream.close()
    assert stream.completion is None
    go_on.set()
    reader.join(60)
    assert stream.completion is not None
    assert (stream.completion.finish_reason, len(stream.completion.ids)) == ("closed", 1)
    assert read == [[str(stream.completion)]]
    assert has_given_back(runner)


def test_a_signal_handler_may_close_what_its_own_thread_reads() -> None:
    model, runner = fake_model(TEXT)
    stream = model.stream("x")
    runner.awaited = lambda tokens: stream.close()  # type: ignore[method-assign]
    assert len(list(stream)) == 1
    assert stream.completion is not None
    assert stream.completion.finish_reason == "closed"
    runner.awaited = lambda tokens: model.close()  # type: ignore[method-assign]
    with pytest.raises(InputError, match="this model is closed"):
        model.generate("x")


def test_several_threads_may_read_one_stream() -> None:
    model, _ = fake_model(TEXT)
    stream = model.stream("x", max_tokens=500)
    threads = [in_thread(lambda: list(stream)) for _ in range(3)]
    for thread, _ in threads:
        thread.join(60)
    assert sum(len(found[0]) for _, found in threads) == 500


# Speed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"stop": ["never", "<end>"]}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_what_text_costs_per_token(options: dict[str, Any]) -> None:
    """Everything but the device, of all threads: at most as long as Python takes to write 480 numbers."""
    model, _ = fake_model("The owl — “Über” 😀 — lived in the old oak tree. " * 8)
    tokens = 2000

    def seconds(work: Callable[[], object]) -> float:
        started = time.process_time()  # other processes may have the cores meanwhile
        work()
        return time.process_time() - started

    def once() -> float:
        text = seconds(lambda: list(model.stream("x", max_tokens=tokens, **options)))
        return text / seconds(lambda: [" ".join(map(str, range(40))) for _ in range(tokens)])

    found = [once() for _ in range(7)]
    assert min(found) < 12, statistics.median(found)
