"""Steps recorded ahead by other threads: the same tokens, whatever comes in between, and nothing left over."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine import load
from shaderlm.engine.sampling import Sampling, device_choice, uniforms
from shaderlm.errors import DeviceError
from shaderlm.gpu import Device, stock
from shaderlm.gpu.mailbox import Mailbox, ThroughClasses, ThroughHandles
from shaderlm.gpu.record import through_classes
from shaderlm.gpu.stock import COUNT, Stock
from shaderlm.profile.measure import profile
from shaderlm.runtime.gpu_model import GpuModel
from shaderlm.runtime.gpu_session import GpuSession

from .tiny_models import write_tiny_llama

PROMPT = [5, 9, 40, 77]
SAMPLED = Sampling(temperature=1.5, seed=3)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ahead"]


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return true()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    assert workers() == []
    yield
    gc.collect()
    assert eventually(lambda: workers() == [])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=1, context=300)


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def model(
    request: pytest.FixtureRequest, device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuModel]:
    monkeypatch.setattr(stock, "WORKERS", request.param)
    monkeypatch.setattr(device, "records_ahead", True)
    with load(tiny, device=device) as loaded:
        assert isinstance(loaded.runner, GpuModel)
        yield loaded.runner


@pytest.fixture
def session(model: GpuModel) -> Iterator[GpuSession]:
    made = model.session()
    assert isinstance(made, GpuSession)
    yield made
    made.close()


class Spy:
    """Counts the calls of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: type, name: str) -> None:
        self.calls, real = 0, getattr(place, name)

        def called(*given: Any, **named: Any) -> Any:
            self.calls += 1
            return real(*given, **named)

        monkeypatch.setattr(place, name, called)


# A stock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_as_many_as_were_ordered(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "WORKERS", count)
    made: list[int] = []
    left: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    shelf = Stock(make, left.append)
    assert eventually(lambda: len(made) == COUNT)
    time.sleep(0.01)
    assert len(made) == COUNT, "and no more"
    taken = [shelf.take()]
    shelf.order()
    assert eventually(lambda: len(made) == COUNT + 1)
    taken.append(shelf.take())
    assert len(workers()) == count
    shelf.close()
    shelf.close()
    assert (shelf.closed, workers()) == (True, [])
    assert sorted(taken + left) == list(range(COUNT + 1))


def test_a_forgotten_stock_ends_its_threads() -> None:
    shelf = Stock(object, lambda made: None)
    assert workers()
    del shelf
    gc.collect()
    assert eventually(lambda: workers() == [])


# The same tokens ------------------------------------------------------------------------------------------------


STEPS = 6 + 5 + 3 + 4 + 3 + 3 + 2 + 10 + 3  # of the story


def story(model: GpuModel, directly: bool) -> list[int]:
    """Everything that may come between two steps."""
    model.device.records_ahead = not directly
    one, other = model.session(), model.session()
    draws = uniforms(SAMPLED.seed)
    found: list[int] = []

    def steps(session: Any, count: int, sampled: bool = False) -> None:
        tokens = [session.advance(device_choice(SAMPLED, next(draws)) if sampled else None) for _ in range(count)]
        found.extend(token.wait() for token in tokens)

    try:
        one.feed(PROMPT)
        found.append(one.choose(None).wait())
        steps(one, 6)
        steps(one, 5, sampled=True)
        steps(one, 3)
        one.rewind(7)
        one.feed([8, 30])
        found.append(one.choose(device_choice(SAMPLED, next(draws))).wait())
        steps(one, 4)
        other.feed(PROMPT[:2])
        found.append(other.choose(None).wait())
        for _ in range(3):
            steps(other, 1)
            steps(one, 1)
        one.rewind(one.length - 2)
        steps(one, 2)
        one.feed([3] * (252 - one.length))
        found.append(one.choose(None).wait())
        steps(one, 10)  # the cache grows from 256 to 300 positions in the middle
        steps(one, 3, sampled=True)
        return found
    finally:
        one.close()
        other.close()


def test_tokens_are_the_same(model: GpuModel, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, ahead = Spy(monkeypatch, Device, "submit"), Spy(monkeypatch, Device, "submit_from")
    expected = story(model, directly=True)
    assert (ahead.calls, len(set(expected)) > 8) == (0, True)
    before = direct.calls
    assert story(model, directly=False) == expected
    assert ahead.calls == STEPS, "every step was taken from a stock"
    assert direct.calls - before == before - STEPS


def test_a_step_writes_nothing(session: GpuSession, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position is written after something else moved it, and else moves on by itself."""
    session.feed(PROMPT)
    session.choose(None)
    written, words = Spy(monkeypatch, Device, "write"), Spy(monkeypatch, Device, "write_words")
    for wanted in (1, 1, 1):
        session.advance(None)
        assert written.calls == wanted
        assert device.read(session._inputs["positions"], 4).view(np.uint32)[0] == session.length
    session.rewind(session.length - 1)
    session.advance(None)
    session.advance(None)
    assert (written.calls, words.calls) == (2, 0)
    session.advance(device_choice(SAMPLED, 0.5)).wait()
    assert (written.calls, words.calls) == (2, 1)


def test_the_public_functions_do_the_same(model: GpuModel, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wgpu without the native functions."""
    expected = story(model, directly=True)
    real = device.load
    monkeypatch.setattr(device, "_mailbox", Mailbox(device._native, ThroughClasses()))
    monkeypatch.setattr(
        device, "load", lambda *given: replace(found := real(*given), encode=through_classes(found.steps))
    )
    assert story(model, directly=False) == expected


@pytest.mark.parametrize("way", [ThroughHandles, ThroughClasses])
def test_words_are_written_in_order(way: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    post = way(device._native) if way is ThroughHandles else way()
    monkeypatch.setattr(device, "_mailbox", Mailbox(device._native, post))
    buffer = device.buffer(np.arange(8, dtype=np.uint32))
    for first in (100, 200):
        device.write_words(buffer, np.arange(first, first + 3, dtype=np.uint32))
    assert device.read(buffer, 32).view(np.uint32).tolist() == [200, 201, 202, 3, 4, 5, 6, 7]
    buffer.destroy()


# When there is one ------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_before_the_first_step(session: GpuSession, device: Device) -> None:
    session.feed(PROMPT)
    session.choose(None).wait()
    assert workers() == []
    session.advance(None).wait()
    assert len(workers()) == stock.WORKERS
    session.advance(device_choice(SAMPLED, 0.5)).wait()
    assert len(workers()) == stock.WORKERS, "one stock per session"


def test_a_software_adapter_records_directly(device: Device, tiny: Path) -> None:
    assert device.records_ahead == (not device.caps.software)
    with load(tiny, device=device) as loaded, loaded.stream("hello", max_tokens=8, ignore_eos=True) as answer:
        assert len([*itertools.islice(answer, 3)]) == 3  # an answer that has ended has no threads on any device
        assert bool(workers()) == device.records_ahead


def test_a_model_that_is_closed_has_no_threads(model: GpuModel) -> None:
    session = model.session()
    session.feed(PROMPT)
    session.advance(None).wait()
    assert workers()
    model.close()
    assert workers() == []
    session.close()


def test_everything_is_given_back(model: GpuModel, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed with two steps under way: no command buffer stays, and staging buffers of letters not opened alone."""
    from wgpu.backends.wgpu_native import GPUCommandBuffer, GPUCommandEncoder

    finished = Spy(monkeypatch, GPUCommandEncoder, "finish")
    released = Spy(monkeypatch, GPUCommandBuffer, "_release")
    mailbox = Mailbox(device._native)
    monkeypatch.setattr(device, "_mailbox", mailbox)
    stage, staged = mailbox.stage, list[Any]()

    def kept(*given: Any) -> Any:
        staged.append(stage(*given))
        return staged[-1]

    monkeypatch.setattr(mailbox, "stage", kept)
    session = model.session()
    session.feed(PROMPT)
    for _ in range(9):
        session.advance(None).wait()
    pending = [session.advance(None) for _ in range(2)]
    session.close()
    gc.collect()
    assert finished.calls == released.calls > 12
    assert len({*map(id, mailbox._free)}) == len(mailbox._free) == len({*map(id, staged)}) - 2
    assert [0 <= token.wait() < 300 for token in pending] == [True, True]
    assert {*map(id, mailbox._free)} == {*map(id, staged)}


# When it goes wrong -----------------------------------------------------------------------------------------------


def rejection(session: GpuSession, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a step says whose command buffer cannot be finished; the steps before and after it are right."""
    import wgpu
    from wgpu.backends.wgpu_native import GPUCommandEncoder

    def refused(self: Any, **named: Any) -> Any:
        raise wgpu.GPUValidationError("not today")

    session.feed(PROMPT)
    session.choose(None)
    with monkeypatch.context() as broken:
        broken.setattr(GPUCommandEncoder, "finish", refused)
        with pytest.raises(DeviceError) as caught:
            session.advance(None)
    assert session.length == len(PROMPT)
    session.advance(None).wait()
    return str(caught.value)


def test_an_error_has_the_same_words(model: GpuModel, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for ahead in (False, True):
        monkeypatch.setattr(device, "records_ahead", ahead)
        session = model.session()
        said.append(rejection(session, monkeypatch))  # type: ignore[arg-type]
        session.close()
    assert said == [f"{device.caps.name} refused to run a plan: not today"] * 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_leaves_the_session_usable(
    moment: str, session: GpuSession, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a command buffer is taken, and while it is submitted; more often than there are in stock."""

    def tokens() -> list[int]:
        session.rewind(0)
        session.feed(PROMPT)
        return [session.choose(None).wait(), *(session.advance(None).wait() for _ in range(5))]

    expected = tokens()
    real = device._mailbox.submit

    def interrupted(*given: Any) -> Any:
        if moment == "after":
            real(*given)
        raise KeyboardInterrupt

    for _ in range(COUNT + 1):
        with monkeypatch.context() as pressed:
            pressed.setattr(device._mailbox, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.advance(None)
        session.advance(None)
    assert tokens() == expected


CHILD = """
import sys
from shaderlm.gpu import open_device
from tests.test_gpu_room import adding, program
device = open_device(sys.argv[1])
device.records_ahead = True
loaded = device.load(program(adding("at the end"), steps=200))
stock = device.stock([loaded], loaded.buffers["out"])
letters = [device.submit_from(stock) for _ in range(5)]
print("done")
"""


def test_an_interpreter_that_ends_in_the_middle(device: Device) -> None:
    """Nothing closed, steps under way, threads at work."""
    command = [sys.executable, "-c", CHILD, device.caps.name]
    ended = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=30, check=False, cwd=Path(__file__).parent.parent
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


# Watched ----------------------------------------------------------------------------------------------------------


def test_a_watch_sees_what_runs(session: GpuSession, device: Device) -> None:
    """Under a watch the steps are taken from a stock too, unless every dispatch is stamped."""
    for grain in ("host", "submission", "dispatch"):
        session.rewind(0)
        session.feed(PROMPT)
        session.choose(None)
        session.advance(None).wait()
        with device.watched(grain) as watch:
            for _ in range(6):
                session.advance(None).wait()
        session.advance(None).wait()  # with a stock that is not the watch's
        seen = watch.collect()
        here, there = (["encode", "finish"], []) if grain == "dispatch" else (["take"], ["encode", "finish"])
        assert [list(submission.host) for submission in seen] == [[*here, "submit"]] * 6
        assert [list(submission.ahead) for submission in seen] == [there] * 6
        for submission in seen:
            assert all(begin <= end for begin, end in (*submission.host.values(), *submission.ahead.values()))
            if there:
                assert submission.ahead["finish"][1] <= submission.host["submit"][0]
        if grain != "host" and device.caps.timestamps:
            every = np.concatenate([submission.ends for submission in seen])
            assert (np.diff(every) >= 0).all(), "in the order of submissions"


def test_a_profile_tells_the_threads_apart(model: GpuModel) -> None:
    (prefill, _, _), (decode, _, _) = profile(model, 4, 12, 0, 2, 0.0, lambda text: None)
    assert list(prefill.host_us) == ["prepare", "encode", "finish", "submit", "wait"]
    assert list(decode.host_us) == ["prepare", "take", "submit", "wait"]
    assert (prefill.ahead_us, list(decode.ahead_us)) == ({}, ["encode", "finish"])
    assert min(decode.ahead_us.values()) > 0
    busy = sum(us for name, us in decode.host_us.items() if name != "wait")
    assert decode.host_us_per_dispatch == pytest.approx(busy / len(decode.dispatches))
    assert sum(decode.host_us.values()) <= decode.wall_us * (1 + 1e-9)
    assert decode.gpu_us is None or sum(timed.us for timed in decode.dispatches) == pytest.approx(decode.gpu_us)
