"""Steps recorded ahead by other threads: the same tokens, whatever comes in between, and nothing left over."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine import load
from shaderlm.errors import DeviceError
from shaderlm.gpu import Buffer, CommandBuffer, CommandBufferPool, Device, command_pool
from shaderlm.gpu.command_pool import COUNT
from shaderlm.gpu.read_back import ReadBackRing, Staged
from shaderlm.gpu.webgpu_h import Encoder, NativeError
from shaderlm.graph.batch import PAGE
from shaderlm.profile.measure import profile
from shaderlm.runtime.gpu_runner import GpuDecode, GpuRunner
from shaderlm.runtime.runner import FIRST_PAGES, SequenceChunk
from shaderlm.runtime.sampler_settings import GREEDY, SamplerSettings

from .policies import with_policy
from .session import Session, token_of
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny f32")

PROMPT = [5, 9, 40, 77]
SAMPLED = SamplerSettings(temperature=1.5, seed=3)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "record-ahead"]


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
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
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=1, context=600)


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def model(
    request: pytest.FixtureRequest, device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuRunner]:
    monkeypatch.setattr(command_pool, "WORKERS", request.param)
    monkeypatch.setattr(device, "caps", with_policy(device.caps, record_ahead=True))
    with load(tiny, device=device) as loaded:
        assert isinstance(loaded.runner, GpuRunner)
        yield loaded.runner


@pytest.fixture
def session(model: GpuRunner) -> Iterator[Session]:
    made = Session(model)
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


# A pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_as_many_as_were_requested(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_pool, "WORKERS", count)
    made: list[int] = []
    left: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    pool = CommandBufferPool(make, left.append)
    assert eventually(lambda: len(made) == COUNT)
    time.sleep(0.01)
    assert len(made) == COUNT, "and no more"
    taken = [pool.take()]
    pool.request()
    assert eventually(lambda: len(made) == COUNT + 1)
    taken.append(pool.take())
    assert len(workers()) == count
    pool.close()
    pool.close()
    assert (pool.closed, workers()) == (True, [])
    assert sorted(taken + left) == list(range(COUNT + 1))


def test_a_forgotten_pool_ends_its_threads() -> None:
    pool = CommandBufferPool(object, lambda made: None)
    assert workers()
    del pool
    gc.collect()
    assert eventually(lambda: workers() == [])


# The same tokens ------------------------------------------------------------------------------------------------


STEPS = 6 + 5 + 3 + 4 + 3 + 3 + 2 + 10 + 3 + 12  # of the story


def story(model: GpuRunner, directly: bool) -> list[int]:
    """Everything that may come between two steps."""
    model.device.caps = with_policy(model.device.caps, record_ahead=not directly)
    one, other = Session(model), Session(model)
    found: list[int] = []

    def steps(session: Session, count: int, sampled: bool = False) -> None:
        tokens = [session.advance(SAMPLED if sampled else GREEDY) for _ in range(count)]
        found.extend(token.wait() for token in tokens)

    try:
        found.append(one.sample(PROMPT).wait())
        steps(one, 6)
        steps(one, 5, sampled=True)
        steps(one, 3)
        one.rewind(7)
        found.append(one.sample([8, 30], SAMPLED).wait())
        steps(one, 4)
        found.append(other.sample(PROMPT[:2]).wait())
        for _ in range(3):
            steps(other, 1)
            steps(one, 1)
        one.rewind(one.length - 2)
        steps(one, 2)
        found.append(one.sample([3] * (380 - one.length)).wait())
        steps(one, 10)  # the pool grows from 512 to 1024 positions in the middle: another one has a page of it
        steps(one, 3, sampled=True)
        found.append(one.sample([5] * (505 - one.length)).wait())
        steps(one, 12)  # the context class ends at 512 keys
        return found
    finally:
        one.close()
        other.close()


def test_tokens_are_the_same(model: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, ahead = Spy(monkeypatch, Device, "submit"), Spy(monkeypatch, Device, "submit_from")
    assert model.pool.pages == FIRST_PAGES
    found = story(model, directly=False)
    assert model.pool.pages > FIRST_PAGES, "the pool grew in the middle"
    assert ahead.calls == STEPS, "every step was taken from a pool"
    before = direct.calls
    expected = story(model, directly=True)
    assert found == expected
    assert (ahead.calls, len(set(expected)) > 8) == (STEPS, True)
    assert direct.calls - before == before + STEPS


def test_a_step_writes_nothing(session: Session, model: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are written after something else moved them (batch and outputs), and else move on by themselves."""
    session.sample(PROMPT)
    session.advance()
    written = Spy(monkeypatch, Device, "write")
    for _ in range(3):
        session.advance()
        assert written.calls == 0
        record = model.device.read(model._buffers["batch"], 32).view(np.uint32)[4:]
        assert record[1] == session.length
    session.rewind(session.length - 1)
    session.advance()
    session.advance()
    assert written.calls == 2
    session.advance(SAMPLED).wait()
    assert written.calls == 4
    session.advance(SAMPLED).wait()
    assert written.calls == 4


def test_the_page_after_the_next_is_there_in_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry of the page table is written once, when the sampler is about to look it up."""
    session.sample([7] * (PAGE - 6))
    session.advance()
    written = Spy(monkeypatch, Device, "write")
    seen = []
    for _ in range(8):
        session.advance().wait()
        seen.append((session.length, written.calls))
    entries = [length for (length, calls), (_, before) in zip(seen[1:], seen, strict=False) if calls > before]
    assert entries == [PAGE], "the step at position PAGE − 1 makes the record of position PAGE"
    assert written.calls == 1


def test_writes_are_in_order(device: Device) -> None:
    buffer = device.buffer(np.arange(8, dtype=np.uint32))
    for first in (100, 200):
        device.write(buffer, np.arange(first, first + 3, dtype=np.uint32))
    assert device.read(buffer, 32).view(np.uint32).tolist() == [200, 201, 202, 3, 4, 5, 6, 7]
    buffer.destroy()


# When there is one ------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_before_the_first_step(session: Session, device: Device) -> None:
    session.sample(PROMPT).wait()
    assert workers() == []
    session.advance().wait()
    assert len(workers()) == command_pool.WORKERS
    session.advance(SAMPLED).wait()
    assert len(workers()) == command_pool.WORKERS, "one pool per session"


def test_a_software_adapter_records_directly(device: Device, tiny: Path) -> None:
    assert device.caps.policy.record_ahead == (not device.caps.software and device.caps.implementation == "wgpu")
    with load(tiny, device=device) as loaded, loaded.stream("hello", max_tokens=8, ignore_eos=True) as answer:
        assert len([*itertools.islice(answer, 3)]) == 3  # an answer that has ended has no threads on any device
        assert bool(workers()) == device.caps.policy.record_ahead


def test_a_model_that_is_closed_has_no_threads(model: GpuRunner) -> None:
    session = Session(model)
    session.sample(PROMPT)
    session.advance().wait()
    assert workers()
    model.close()
    assert workers() == []
    session.close()


def test_everything_is_given_back(model: GpuRunner, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed with two steps under way: no command buffer stays, and staging buffers of what is not read alone."""
    finished, alive = Spy(monkeypatch, Encoder, "finish"), list[weakref.ref[Any]]()
    ring = ReadBackRing(device._native)
    monkeypatch.setattr(device._queue, "ring", ring)
    stage, staged = ring.stage, list[Buffer]()

    def kept(*given: Any) -> Staged:
        made = stage(*given)
        staged.append(made.buffer)
        return made

    def free() -> list[int]:
        return [id(buffer) for buffers in ring._free.values() for buffer in buffers]

    monkeypatch.setattr(ring, "stage", kept)
    made = CommandBuffer.__init__

    def seen(self: CommandBuffer, commands: Any, *given: Any) -> None:
        alive.append(weakref.ref(commands))
        made(self, commands, *given)

    monkeypatch.setattr(CommandBuffer, "__init__", seen)
    session = Session(model)
    session.sample(PROMPT)
    for _ in range(9):
        session.advance().wait()
    pending = [session.advance() for _ in range(2)]
    session.close()
    gc.collect()
    assert len(alive) == finished.calls > 12
    assert [commands() for commands in alive] == [None] * len(alive)
    assert len({*free()}) == len(free()) == len({*map(id, staged)}) - 2
    assert [0 <= token.wait() < 300 for token in pending] == [True, True]
    assert {*free()} == {*map(id, staged)}


# When it goes wrong -----------------------------------------------------------------------------------------------


def rejection(session: Session, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a step says whose command buffer cannot be finished; the steps before and after it are right."""

    def refused(self: Any) -> Any:
        raise NativeError("not today")

    session.sample(PROMPT)
    with monkeypatch.context() as broken:
        broken.setattr(Encoder, "finish", refused)
        with pytest.raises(DeviceError) as caught:
            session.advance()
    assert session.length == len(PROMPT)
    session.advance().wait()
    return str(caught.value)


def test_an_error_has_the_same_words(model: GpuRunner, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for ahead in (False, True):
        monkeypatch.setattr(device, "caps", with_policy(device.caps, record_ahead=ahead))
        session = Session(model)
        said.append(rejection(session, monkeypatch))
        session.close()
    assert said == [f"{device.caps.name} refused to run a plan: not today"] * 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_leaves_the_session_usable(
    moment: str, session: Session, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a command buffer is taken, and while it is submitted; more often than the pool is large."""

    def tokens() -> list[int]:
        session.rewind(0)
        return [session.sample(PROMPT).wait(), *(session.advance().wait() for _ in range(5))]

    expected = tokens()
    real = device._queue.submit

    def interrupted(*given: Any) -> Any:
        if moment == "after":
            real(*given)
        raise KeyboardInterrupt

    for _ in range(COUNT + 1):
        with monkeypatch.context() as pressed:
            pressed.setattr(device._queue, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.advance()
        session.advance()
    assert tokens() == expected


CHILD = """
import sys
from shaderlm.gpu import open_device
from tests.gpu_programs import adding, program
from tests.policies import with_policy
device = open_device(sys.argv[1])
device.caps = with_policy(device.caps, record_ahead=True)
bound = device.bind(program(adding("at the end"), steps=200))
pool = device.command_pool([bound], (bound.buffers["out"], 16))
pending = [device.submit_from(pool) for _ in range(5)]
print("done")
"""


def test_an_interpreter_that_ends_in_the_middle(device: Device) -> None:
    """Nothing closed, steps under way, threads at work."""
    command = [sys.executable, "-c", CHILD, device.caps.name]
    ended = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=30, check=False, cwd=Path(__file__).parent.parent
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


# Traced -----------------------------------------------------------------------------------------------------------


def test_a_tracer_sees_what_runs(session: Session, device: Device) -> None:
    """Under a tracer the steps are taken from a pool too, unless every dispatch has a timestamp."""
    for grain in ("host", "submission", "dispatch"):
        session.rewind(0)
        session.sample(PROMPT)
        session.advance().wait()
        with device.traced(grain) as tracer:
            for _ in range(6):
                session.advance().wait()
        session.advance().wait()  # with a pool that is not the tracer's
        seen = tracer.collect()
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


def test_a_profile_tells_the_threads_apart(model: GpuRunner) -> None:
    (prefill, _, _), (decode, _, _) = profile(model, 4, 12, 0, 2, 0.0, lambda text: None)
    assert list(prefill.host_us) == ["prepare", "encode", "finish", "submit", "wait"]
    assert list(decode.host_us) == ["prepare", "take", "submit", "wait"]
    assert (prefill.ahead_us, list(decode.ahead_us)) == ({}, ["encode", "finish"])
    assert min(decode.ahead_us.values()) > 0
    busy = sum(us for name, us in decode.host_us.items() if name != "wait")
    assert decode.host_us_per_dispatch == pytest.approx(busy / len(decode.dispatches))
    assert sum(decode.host_us.values()) <= decode.wall_us * (1 + 1e-9)
    assert decode.gpu_us is None or sum(timed.us for timed in decode.dispatches) == pytest.approx(decode.gpu_us)


def test_what_is_recorded_for_other_plans_is_kept_for_later(model: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded and never submitted is not freed by wgpu."""
    monkeypatch.setattr("shaderlm.runtime.gpu_runner._KEPT_POOLS", 1)
    sequences = [model.add() for _ in range(3)]
    for each in sequences:
        token_of(model.step([SequenceChunk(each, [5, 6])]), each).wait()
    batch = model.decode_batch(sequences[:1], [GREEDY])
    assert isinstance(batch, GpuDecode)
    pools = []
    for count in (3, 2, 1, 2, 1, 2, 3, 2, 1):  # the largest first: buffers grow for it
        batch.replace(sequences[:count], [GREEDY] * count)
        batch.step().wait()
        pools.append(batch._pool)
    closed, pools = pools[0], pools[2:]
    one, two, _, _, three, _, last = pools
    assert closed is not None
    assert closed.closed
    assert pools[:6] == [one, two, one, two, three, two]
    assert last is not one, "one of them is kept"
    made = {each for each in pools if each is not None}
    assert len(made) == 4
    assert {each for each in made if not each.closed} == {two, last}
    batch.close()
    assert all(each.closed for each in made)
    for each in sequences:
        model.free(each)


def test_other_sequences_keep_what_is_recorded_ahead(model: GpuRunner) -> None:
    """As long as the plans are the same: of as many rows, with the same kind of sampling."""
    prompts = [[5, 6, 7], [8, 9], [3, 1, 4, 1]]
    alone = []
    for ids in prompts:
        session = Session(model)
        alone.append([session.sample(ids).wait(), *(session.advance().wait() for _ in range(5))])
        session.close()
    a, b, c = sequences = [model.add() for _ in prompts]
    found = [
        [token_of(model.step([SequenceChunk(each, ids)]), each).wait()]
        for each, ids in zip(sequences, prompts, strict=True)
    ]
    batch = model.decode_batch([a, b], [GREEDY] * 2)
    assert isinstance(batch, GpuDecode)
    pools = []
    for running in ((a, b), (c, a), (b, c), (b, c), (a, b), (c, a), (b, c), (a,)):
        batch.replace(running, [GREEDY] * len(running))
        tokens = batch.step().wait()
        pools.append(batch._pool)
        for each in running:
            found[sequences.index(each)].append(int(tokens[each.slot]))
    assert pools[0] is not None
    assert all(pool is pools[0] for pool in pools[:-1])
    assert pools[-1] is not pools[0]
    batch.replace([a, b], [GREEDY, SamplerSettings(logprobs=1)])
    reported = batch.step()
    for each in (a, b):
        found[sequences.index(each)].append(int(reported.wait()[each.slot]))
    assert reported.logprobs(b.slot) is not None
    batch.close()
    for ids, expected in zip(found, alone, strict=True):
        assert ids[:6] == expected[: len(ids)]
    for each in sequences:
        model.free(each)
