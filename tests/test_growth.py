"""The pool and the rope table grow: what was there stays, all or nothing, without a plan or a kernel more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.errors import DeviceError, InputError
from shaderlm.gpu import Device
from shaderlm.graph.batch import CONTEXTS, PAGE, single_pass_keys
from shaderlm.models.config import StepSpec
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.runner import FIRST_PAGES, Runner, SequenceChunk

from .compare import assert_close
from .conftest import taken_for
from .policies import with_policy
from .runners import runner_of
from .session import Session, token_of
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny f32")

FIRST = FIRST_PAGES * PAGE  # positions before the pool grows
CONTEXT = 4 * FIRST
SOON = single_pass_keys(16) * 3 // 4  # the length at which the next context class is prepared


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=1, context=CONTEXT)


@pytest.fixture
def runner(device: Device, tiny: Path) -> Iterator[GpuRunner]:
    made = runner_of(tiny, device, cache="f32")
    assert isinstance(made, GpuRunner)
    yield made
    made.close()


@pytest.fixture(params=["cpu", "gpu"])
def either(request: pytest.FixtureRequest, device: Device, tiny: Path) -> Iterator[Runner]:
    made = runner_of(tiny, None if request.param == "cpu" else device, cache="f32")
    yield made
    made.close()


def some_ids(count: int, seed: int = 3) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, count)]


def caches(runner: Runner) -> dict[str, Any]:
    """The whole pool, by buffer."""
    if isinstance(runner, NumpyRunner):
        return {name: pool.copy().reshape(len(pool), -1) for name, pool in runner._pools.items()}
    assert isinstance(runner, GpuRunner)
    states = runner.plan(StepSpec(1, CONTEXTS[0], runner.cache)).of_role("state")
    rows = runner.pool.pages * PAGE
    return {
        name: runner.device.read(runner._buffers[name], spec.nbytes * rows).view(np.float32).reshape(rows, -1)
        for name, spec in states.items()
    }


def all_logits(runner: Runner, ids: list[int]) -> Any:
    session = Session(runner)
    try:
        return session.all_logits(ids)
    finally:
        session.close()


def run(runner: Runner, sequence: Any, ids: list[int]) -> None:
    for first in range(0, len(ids), 64):
        runner.step([SequenceChunk(sequence, ids[first : first + 64], "nothing")])


def test_what_was_there_is_copied(either: Runner) -> None:
    ids = some_ids(FIRST + 5)
    one, other = either.add(), either.add()
    run(either, one, ids[: FIRST - PAGE - 3])
    run(either, other, ids[:PAGE])
    assert either.pool.pages == FIRST_PAGES
    before = caches(either)
    assert all(np.abs(cache).max() > 0.1 for cache in before.values())
    run(either, one, ids[FIRST - PAGE - 3 :])
    assert either.pool.pages >= FIRST_PAGES + 2
    for name, cache in caches(either).items():
        for page in (*one.pages[:2], *other.pages):
            rows = slice(page * PAGE, (page + 1) * PAGE)
            assert (cache[rows] == before[name][rows]).all()
    logits = either.step([SequenceChunk(one, [7], "logits"), SequenceChunk(other, [8], "logits")]).logits
    assert logits is not None
    assert_close(logits[0], all_logits(either, [*ids, 7])[-1], "model", "the sequence that grew")
    assert_close(logits[1], all_logits(either, [*ids[:PAGE], 8])[-1], "model", "the other one")


def test_growth_makes_no_plan_and_compiles_nothing(runner: GpuRunner) -> None:
    """Up to the end of a context class: the next one has kernels of its own (test_plans_without_lengths)."""
    sequences = [runner.add() for _ in range(3)]
    for sequence in sequences[:2]:
        run(runner, sequence, some_ids(64))
    made, compiled = len(runner._plans), len(runner.device._pipelines)
    for sequence in sequences:
        run(runner, sequence, some_ids(FIRST - 64))
    assert runner.pool.pages >= 2 * FIRST_PAGES
    assert (len(runner._plans), len(runner.device._pipelines)) == (made, compiled)


@pytest.mark.parametrize("left", [0, 1])
def test_growth_is_all_or_nothing(left: int, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first or the second of the pool's buffers cannot be made."""
    ids = some_ids(FIRST + 9)
    sequence = runner.add()
    run(runner, sequence, ids[: FIRST - 1])
    before, buffers = caches(runner), dict(runner._buffers)
    made: list[Any] = []
    whole = runner.device.buffer

    def scarce(contents: Any) -> Any:
        if len(made) == left:
            raise DeviceError("no room")
        made.append(whole(contents))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(runner.device, "buffer", scarce)
        with pytest.raises(DeviceError, match="no room"):
            runner.step([SequenceChunk(sequence, ids[FIRST - 1 :])])
    assert len(made) == left
    assert all(buffer.destroyed for buffer in made), "what was made is given back"
    assert (runner.pool.pages, sequence.length, len(sequence.pages)) == (FIRST_PAGES, FIRST - 1, FIRST_PAGES)
    assert runner._buffers == buffers
    assert all((caches(runner)[name] == cache).all() for name, cache in before.items())
    logits = runner.step([SequenceChunk(sequence, ids[FIRST - 1 :], "logits")]).logits
    assert logits is not None
    assert_close(logits[0], all_logits(runner, ids)[-1], "model", "after the failure")


def test_growth_is_all_or_nothing_in_numpy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(tiny, None)
    assert isinstance(runner, NumpyRunner)
    ids = some_ids(FIRST + 9)
    sequence = runner.add()
    run(runner, sequence, ids[: FIRST - 1])
    zeros, made = np.zeros, iter([1])

    def scarce(*given: Any) -> Any:
        if next(made, None) is None:
            raise MemoryError
        return zeros(*given)

    before = caches(runner)
    with monkeypatch.context() as patched:
        patched.setattr("shaderlm.runtime.numpy_runner.np.zeros", scarce)
        with pytest.raises(MemoryError):
            runner.step([SequenceChunk(sequence, ids[FIRST - 1 :])])
    assert (runner.pool.pages, sequence.length) == (FIRST_PAGES, FIRST - 1)
    assert all((caches(runner)[name] == cache).all() for name, cache in before.items())
    logits = runner.step([SequenceChunk(sequence, ids[FIRST - 1 :], "logits")]).logits
    assert logits is not None
    assert_close(logits[0], all_logits(runner, ids)[-1], "model", "after the failure")
    runner.close()


def test_pages_that_cannot_be_copied_stay_shared(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy within a buffer goes by way of another one, for which there may be no room."""
    ids = some_ids(PAGE + 9)
    parent = runner.add()
    run(runner, parent, ids)
    child = runner.fork(parent)
    pages, free = list(child.pages), runner.pool.free
    other = runner.add()
    runner.step([SequenceChunk(other, [1, 2], "all logits")])  # what a step of two rows needs is there
    runner.free(other)

    def none(contents: Any) -> Any:
        raise DeviceError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(runner.device, "buffer", none)
        with pytest.raises(DeviceError, match="no room"):
            runner.step([SequenceChunk(child, [5], "logits"), SequenceChunk(parent, [6], "logits")])
    assert (child.pages, parent.pages, child.length, runner.pool.free) == (pages, pages, len(ids), free)
    logits = runner.step([SequenceChunk(child, [5], "logits"), SequenceChunk(parent, [6], "logits")]).logits
    assert logits is not None
    assert child.pages[1] != parent.pages[1]
    for row, last in zip(logits, (5, 6), strict=True):
        assert_close(row, all_logits(runner, [*ids, last])[-1], "model", f"after the failure, {last}")


def test_a_pool_that_fills_a_binding_is_not_grown(device: Device, tiny: Path) -> None:
    """2 kv heads × 16 × f32 are 128 bytes a position: a binding of 128 KiB takes 8 pages for all sequences together."""
    small = taken_for(device, max_binding=1 << 17)
    runner = runner_of(tiny, small, cache="f32")
    assert (runner.max_pages, runner.config.context) == (8, 8 * PAGE)
    one, other = runner.add(), runner.add()
    run(runner, one, some_ids(6 * PAGE))
    run(runner, other, some_ids(2 * PAGE))
    assert runner.pool.pages == 8
    with pytest.raises(
        DeviceError, match="the cache holds 1,024 tokens of all sequences on this device, and it is full"
    ):
        runner.step([SequenceChunk(other, [1])])
    assert (other.length, runner.pool.free) == (2 * PAGE, 0)
    runner.free(one)
    assert token_of(runner.step([SequenceChunk(other, [1])]), other).wait() >= 0
    runner.close()


def test_the_rope_table_grows_with_the_positions(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its first positions, of which there are fewer than usual here."""
    monkeypatch.setattr("shaderlm.runtime.gpu_steps.FIRST_POSITIONS", 128)
    path = write_tiny_llama(tmp_path / "long.gguf", layers=1, context=200)
    runner, oracle = runner_of(path, device, cache="f32"), runner_of(path, None)
    assert isinstance(runner, GpuRunner)
    ids = some_ids(140)
    session = Session(runner)
    session.feed(ids[:-20])
    size = runner._buffers["rope_table"].size
    assert size == 128 * 4 * 16
    found = session.logits(ids[-20:])
    assert runner._buffers["rope_table"].size == 200 * 4 * 16
    expected = Session(oracle)
    expected.feed(ids[:-1])
    assert_close(found, expected.logits(ids[-1:]), "model", "position 139")
    runner.close()
    oracle.close()


def test_a_full_context_is_refused(tmp_path: Path, device: Device) -> None:
    """Long before its last page is full, when a step is made of records that the device has made itself."""
    path = write_tiny_llama(tmp_path / "short.gguf", layers=1, context=12)
    for on in (None, device):
        runner = runner_of(path, on)
        session = Session(runner)
        session.sample(some_ids(9)).wait()
        tokens = [session.advance().wait() for _ in range(3)]
        assert len(tokens) == 3
        for _ in range(2):
            with pytest.raises(InputError, match="the context holds 12 tokens; 12 are there and 1 more"):
                session.advance()
        assert session.length == 12
        session.rewind(8)
        assert session.advance().wait() >= 0
        runner.close()


def test_a_freed_sequence_is_refused(either: Runner) -> None:
    """Its pages may be another's: a batch that decodes it must not go on."""
    sequence = either.add()
    either.step([SequenceChunk(sequence, some_ids(5))])
    batch = either.decode_batch([sequence], [SequenceChunk(sequence, None).settings])
    for _ in range(2):
        batch.step().wait()
    either.free(sequence)
    for use in (batch.step, lambda: either.fork(sequence), lambda: either.step([SequenceChunk(sequence, [1])])):
        with pytest.raises(InputError, match="this sequence was freed"):
            use()
    batch.close()


# Plans of longer contexts are made ahead by another thread, which ends with the model --------------------------------


def test_plans_of_longer_contexts_are_there_before_they_are_wanted(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making and compiling one takes as long as hundreds of tokens of a small model."""
    monkeypatch.setattr(runner.device, "caps", with_policy(runner.device.caps, record_ahead=True))
    following = StepSpec(1, CONTEXTS[1], runner.cache)
    session = Session(runner)
    session.sample([7] * (SOON - 2)).wait()
    session.advance().wait()
    assert following not in runner._plans, "more than a quarter of the class is left"
    session.advance().wait()
    session.advance().wait()
    assert runner._background is not None
    runner._background.join(60)
    assert following in runner._plans
    session.close()


@pytest.mark.parametrize("more", [0, 1])
def test_nothing_is_prepared_for_sequences_that_end_before(
    more: int, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.device, "caps", with_policy(runner.device.caps, record_ahead=True))
    prepared = list[StepSpec]()
    monkeypatch.setattr(runner, "prepare", prepared.append)
    sequence = runner.add()
    sequence.expected = single_pass_keys(16) + more
    for first in range(0, SOON - 1, runner.max_tokens):
        runner.step([SequenceChunk(sequence, [7] * min(runner.max_tokens, SOON - 1 - first), "nothing")])
    token_of(runner.step([SequenceChunk(sequence, [7])]), sequence).wait()
    batch = runner.decode_batch([sequence], [SequenceChunk(sequence, None).settings])
    batch.step().wait()
    batch.close()
    assert prepared == [StepSpec(1, CONTEXTS[1], runner.cache)] * more


def test_the_graph_of_a_longer_context_is_that_of_a_new_model(runner: GpuRunner) -> None:
    for context in CONTEXTS:
        step = StepSpec(1, context, runner.cache)
        found = runner.graph(step)
        runner._last_graph = runner._decode_graph = None
        assert runner.graph(step) == found


def test_nothing_is_prepared_where_steps_are_recorded_directly(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A software adapter needs its cores for the tokens."""
    monkeypatch.setattr(runner.device, "caps", with_policy(runner.device.caps, record_ahead=False))
    monkeypatch.setattr(runner, "_prepare", lambda step: pytest.fail("it was prepared"))
    session = Session(runner)
    session.sample([7] * SOON).wait()
    session.advance().wait()
    assert runner._background is None
    session.close()


def test_a_model_is_closed_while_a_plan_is_made(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.device, "caps", with_policy(runner.device.caps, record_ahead=True))
    begun, over = threading.Event(), []

    def compile_slowly(*_: Any) -> None:
        begun.set()
        time.sleep(0.1)
        over.append(True)

    monkeypatch.setattr(runner.device, "compile", compile_slowly)
    runner.prepare(StepSpec(1, "split", runner.cache))
    assert begun.wait(60)
    runner.close()
    assert over == [True], "it ends with the one that it was making"
