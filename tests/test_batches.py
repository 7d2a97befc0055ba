"""A batch equals its parts: sequences that share steps give the logits that each gives alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.graph.batch import PAGE
from shaderlm.models.config import StepSpec
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.pages import MAX_SEQUENCES, KvSequence
from shaderlm.runtime.runner import Runner, SequenceChunk, StepResult
from shaderlm.runtime.sampler_settings import SamplerSettings

from .compare import assert_close
from .runners import runner_of
from .session import Session, token_of
from .sweeps import every_second
from .tiny_models import write_tiny_llama, write_tiny_qwen3

pytestmark = pytest.mark.xdist_group("tiny q8_0, batches")

CONTEXT = 3 * PAGE
Make = Callable[[], Runner]
F32 = np.typing.NDArray[np.float32]


@pytest.fixture(scope="module", params=["numpy", "cpu", "software", "gpu"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model in NumPy, with packed weights, on the adapter of the tests, and on the same taken for a GPU."""
    path = write_tiny_llama(tmp_path_factory.mktemp("batch") / "tiny.gguf", kind="q8_0", context=CONTEXT)
    names = {"software": "device", "gpu": "gpu"}
    device = request.getfixturevalue(names[request.param]) if request.param in names else None
    made = runner_of(path, "cpu" if request.param == "cpu" else device)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model in NumPy: logits of a sequence alone, in one go."""
    path = write_tiny_llama(tmp_path_factory.mktemp("oracle") / "tiny.gguf", kind="q8_0", context=CONTEXT)
    made = runner_of(path, None)

    def logits(ids: list[int]) -> F32:
        session = Session(made)
        try:
            found: F32 = session.all_logits(ids)[-1]
            return found
        finally:
            session.close()

    yield logits
    made.close()


def random_ids(rng: np.random.Generator, runner: Runner, count: int) -> list[int]:
    return [int(i) for i in rng.integers(0, runner.config.vocabulary, count)]


def check(runner: Runner, found: F32, ids: list[int], oracle: Callable[[list[int]], F32], what: str) -> None:
    assert_close(found, oracle(ids), "model", what)


@pytest.mark.parametrize("count", [1, 2, 5, 96])
def test_sequences_of_different_lengths_in_one_step(count: int, runner: Runner, oracle: Callable[..., F32]) -> None:
    """Prompts, then all decode rows together."""
    rng = np.random.default_rng(count)
    sequences = [runner.add() for _ in range(count)]
    # Many of them are short, and four share a step: software adapters take long for kernels of a GPU.
    longest, together = (24, 1) if count < 32 else (6, 8)
    prompts = [random_ids(rng, runner, int(n)) for n in rng.integers(1, longest, count)]
    parts = [SequenceChunk(sequence, ids, "nothing") for sequence, ids in zip(sequences, prompts, strict=True)]
    for first in range(0, count, together):
        runner.step(parts[first : first + together])
    nexts = random_ids(rng, runner, count)
    logits = runner.step([SequenceChunk(s, [i], "logits") for s, i in zip(sequences, nexts, strict=True)]).logits
    assert logits is not None
    for i in {0, count // 2, count - 1}:
        check(runner, logits[i], [*prompts[i], nexts[i]], oracle, f"sequence {i} of {count}")
    for sequence in sequences:
        runner.free(sequence)


def test_a_chunk_of_a_prompt_and_decode_rows_share_a_step(runner: Runner, oracle: Callable[..., F32]) -> None:
    rng = np.random.default_rng(7)
    a, b, c = (runner.add() for _ in range(3))
    ids = {s: random_ids(rng, runner, n) for s, n in ((a, 9), (b, 40), (c, 3))}
    runner.step([SequenceChunk(a, ids[a][:8], "nothing"), SequenceChunk(c, ids[c][:2], "nothing")])
    # One row of a, a chunk of b, one row of c; then the rest of b.
    found = runner.step(
        [
            SequenceChunk(a, ids[a][8:], "logits"),
            SequenceChunk(b, ids[b][:21], "nothing"),
            SequenceChunk(c, ids[c][2:], "logits"),
        ]
    )
    assert found.logits is not None
    check(runner, found.logits[0], ids[a], oracle, "a")
    check(runner, found.logits[1], ids[c], oracle, "c")
    rest = runner.step([SequenceChunk(b, ids[b][21:], "logits")]).logits
    assert rest is not None
    check(runner, rest[0], ids[b], oracle, "b, in two chunks")
    for sequence in (a, b, c):
        runner.free(sequence)


def test_forks_share_pages_until_they_write(runner: Runner, oracle: Callable[..., F32]) -> None:
    rng = np.random.default_rng(8)
    parent = runner.add()
    shared = random_ids(rng, runner, PAGE + 5)
    runner.step([SequenceChunk(parent, shared[:100], "nothing")])
    runner.step([SequenceChunk(parent, shared[100:], "nothing")])
    free = runner.pool.free
    child = runner.fork(parent)
    assert runner.pool.free == free, "a fork takes no page"
    mine, yours = random_ids(rng, runner, 3), random_ids(rng, runner, 4)
    found = runner.step([SequenceChunk(child, mine, "logits"), SequenceChunk(parent, yours, "logits")])
    assert found.logits is not None
    check(runner, found.logits[0], [*shared, *mine], oracle, "the fork")
    check(runner, found.logits[1], [*shared, *yours], oracle, "its parent")
    assert parent.pages[0] == child.pages[0]
    assert parent.pages[1] != child.pages[1]
    runner.free(parent)
    more = random_ids(rng, runner, 2)
    again = runner.step([SequenceChunk(child, more, "logits")]).logits
    assert again is not None
    check(runner, again[0], [*shared, *mine, *more], oracle, "the fork after its parent is gone")
    runner.free(child)


def test_truncated_sequences_go_on_from_there(runner: Runner, oracle: Callable[..., F32]) -> None:
    rng = np.random.default_rng(9)
    sequence = runner.add()
    ids = random_ids(rng, runner, 20)
    runner.step([SequenceChunk(sequence, ids, "nothing")])
    runner.truncate(sequence, 11)
    more = random_ids(rng, runner, 6)
    logits = runner.step([SequenceChunk(sequence, more, "logits")]).logits
    assert logits is not None
    check(runner, logits[0], [*ids[:11], *more], oracle, "after truncating")
    runner.free(sequence)


@pytest.mark.parametrize("seed", every_second(range(3)))
def test_random_schedules(seed: int, runner: Runner, oracle: Callable[..., F32]) -> None:
    """Sequences come, go, fork and are truncated; every logits row is compared with the sequence alone."""
    rng = np.random.default_rng(100 + seed)
    known: dict[KvSequence, list[int]] = {}
    checked = 0
    for step in range(25):
        action = rng.choice(["add", "fork", "truncate", "free", "step", "step", "step"])
        sequences = list(known)
        if action == "add" and len(known) < 6:
            known[runner.add()] = []
        elif action == "fork" and sequences:
            parent = sequences[rng.integers(len(sequences))]
            if len(known) < 6:
                known[runner.fork(parent)] = list(known[parent])
        elif action == "truncate" and sequences:
            sequence = sequences[rng.integers(len(sequences))]
            kept = int(rng.integers(0, len(known[sequence]) + 1))
            runner.truncate(sequence, kept)
            known[sequence] = known[sequence][:kept]
        elif action == "free" and len(sequences) > 2:
            sequence = sequences[rng.integers(len(sequences))]
            runner.free(sequence)
            del known[sequence]
        elif action == "step" and sequences:
            taken = [s for s in sequences if rng.random() < 0.8 and len(known[s]) < CONTEXT - 40]
            parts = []
            for sequence in taken:
                count = int(rng.choice([1, 1, 1, 2, 9, 17]))
                parts.append(SequenceChunk(sequence, random_ids(rng, runner, count), "logits"))
            if not parts:
                continue
            logits = runner.step(parts).logits
            assert logits is not None
            for part in parts:
                known[part.sequence] += list(part.ids or ())
            i = int(rng.integers(len(parts)))
            check(runner, logits[i], known[parts[i].sequence], oracle, f"step {step} of schedule {seed}")
            checked += 1
    assert checked > 3
    for sequence in known:
        runner.free(sequence)


def test_decoding_together_equals_decoding_alone(runner: Runner) -> None:
    """Greedy and sampled rows side by side, submitted ahead, across a page boundary; one sequence leaves meanwhile."""
    rng = np.random.default_rng(10)
    prompts = [random_ids(rng, runner, n) for n in (5, PAGE - 3, 30)]
    settings = [SamplerSettings(), SamplerSettings(0.9, 20, 0.9, 0.05, seed=3), SamplerSettings(1.2, seed=4)]
    alone = []
    for ids, how in zip(prompts, settings, strict=True):
        session = Session(runner)
        tokens = [session.sample(ids, how).wait()]
        tokens += [session.advance(how).wait() for _ in range(7)]
        alone.append(tokens)
        session.close()
    sequences = [runner.add() for _ in prompts]
    together: list[list[int]] = [[] for _ in prompts]
    for i, (sequence, ids) in enumerate(zip(sequences, prompts, strict=True)):
        together[i].append(token_of(runner.step([SequenceChunk(sequence, ids, "token", settings[i])]), sequence).wait())
    batch = runner.decode_batch(sequences, settings)
    pending = [batch.step() for _ in range(2)]
    for _ in range(2):
        pending.append(batch.step())
        found = pending.pop(0).wait()
        for i, sequence in enumerate(sequences):
            together[i].append(int(found[sequence.slot]))
    for left in pending:
        for i, (sequence, token) in enumerate(zip(sequences, left.wait()[[s.slot for s in sequences]], strict=True)):
            del sequence
            together[i].append(int(token))
    batch.close()
    # The middle one leaves; the others go on in another batch, whose rows the device has not seen.
    batch = runner.decode_batch([sequences[2], sequences[0]], [settings[2], settings[0]])
    for _ in range(3):
        found = batch.step().wait()
        together[2].append(int(found[sequences[2].slot]))
        together[0].append(int(found[sequences[0].slot]))
    batch.close()
    assert together[0] == alone[0]
    assert together[1] == alone[1][: len(together[1])]
    assert together[2] == alone[2]
    for sequence in sequences:
        runner.free(sequence)


def test_a_step_can_be_submitted_before_the_last_token_is_known(runner: Runner) -> None:
    """The batch changes while tokens are under way: the next step reads them on the device."""
    rng = np.random.default_rng(11)
    a, b = runner.add(), runner.add()
    ids_a, ids_b = random_ids(rng, runner, 6), random_ids(rng, runner, 12)
    first = runner.step([SequenceChunk(a, ids_a, "token")])
    second = runner.step([SequenceChunk(a, None, "token"), SequenceChunk(b, ids_b, "token")])
    third = runner.step([SequenceChunk(b, None, "token"), SequenceChunk(a, None, "token")])
    tokens = [token_of(first, a).wait(), token_of(second, a).wait(), token_of(third, a).wait()]
    session = Session(runner)
    assert tokens == [session.sample(ids_a).wait(), session.advance().wait(), session.advance().wait()]
    session.close()
    session = Session(runner)
    assert [token_of(second, b).wait(), token_of(third, b).wait()] == [
        session.sample(ids_b).wait(),
        session.advance().wait(),
    ]
    session.close()
    runner.free(a)
    runner.free(b)


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_long_prompt_is_waited_for_as_it_goes(ahead: int, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is submitted cannot be cancelled: Ctrl-C would be heard when all of the prompt was run."""
    session, under_way, most = Session(runner), set[int](), list[int]()
    expected = session.logits([7] * 9)
    session.rewind(0)
    monkeypatch.setattr(runner, "steps_ahead", ahead)
    monkeypatch.setattr(runner, "max_tokens", 2)
    step, numbers = runner.step, iter(range(9))

    def watched(parts: list[SequenceChunk]) -> StepResult:
        result, number = step(parts), next(numbers)
        under_way.add(number)
        most.append(len(under_way))

        def wait() -> None:
            result.wait()
            under_way.remove(number)

        return replace(result, wait_for_rows=wait)

    monkeypatch.setattr(runner, "step", watched)
    assert_close(session.logits([7] * 9), expected, "model", "in steps of two rows")
    assert most == [min(i, ahead) for i in range(1, 6)]
    session.close()


def test_tokens_that_nobody_wants_are_not_read_back(runner: Runner) -> None:
    sequence = runner.add()
    result = runner.step([SequenceChunk(sequence, [5, 6, 7])])
    if isinstance(runner, GpuRunner):
        given_back = runner.device._queue.ring._discarded
        before = len(given_back)
        del result
        assert len(given_back) == before + 1, "at once"
    after = token_of(runner.step([SequenceChunk(sequence, None)]), sequence).wait()
    runner.truncate(sequence, 0)
    token_of(runner.step([SequenceChunk(sequence, [5, 6, 7])]), sequence).wait()
    assert token_of(runner.step([SequenceChunk(sequence, None)]), sequence).wait() == after
    runner.free(sequence)


def test_mistakes_are_refused_and_change_nothing(runner: Runner) -> None:
    sequence = runner.add()
    runner.step([SequenceChunk(sequence, [1, 2, 3], "nothing")])
    for parts, message in (
        ([], "1 to"),
        ([SequenceChunk(sequence, [1] * (runner.max_tokens + 1))], "rows"),
        ([SequenceChunk(sequence, [1]), SequenceChunk(sequence, [2])], "one part"),
        ([SequenceChunk(sequence, [runner.config.vocabulary])], "token id"),
        ([SequenceChunk(sequence, [])], "at least one"),
    ):
        with pytest.raises(InputError, match=message):
            runner.step(parts)
    with pytest.raises(InputError, match="truncated"):
        runner.truncate(sequence, 4)
    assert sequence.length == 3
    runner.free(sequence)
    runner.free(sequence)
    with pytest.raises(InputError, match="freed"):
        runner.step([SequenceChunk(sequence, [1])])


def test_there_is_a_most_of_sequences(runner: Runner) -> None:
    sequences = [runner.add() for _ in range(MAX_SEQUENCES)]
    with pytest.raises(InputError, match=f"{MAX_SEQUENCES} sequences"):
        runner.add()
    for sequence in sequences:
        runner.free(sequence)


def test_heads_that_are_normed(tmp_path: Path, gpu: Device) -> None:
    path = write_tiny_qwen3(tmp_path / "tiny.gguf", kind="q8_0", context=64)
    cpu, other = runner_of(path, None), runner_of(path, gpu)
    rng = np.random.default_rng(12)
    a, b = other.add(), other.add()
    ids_a, ids_b = random_ids(rng, other, 9), random_ids(rng, other, 5)
    found = other.step([SequenceChunk(a, ids_a, "logits"), SequenceChunk(b, ids_b, "logits")]).logits
    assert found is not None
    for row, ids in zip(found, (ids_a, ids_b), strict=True):
        session = Session(cpu)
        assert_close(row, session.logits(ids), "model", "qwen3")
        session.close()
    cpu.close()
    other.close()


def test_long_runs_need_no_other_plans(tmp_path: Path, gpu: Device, plain_device: Device) -> None:
    """A prompt of several chunks is read in the first context class, and what it gives is right; without subgroups the
    class follows its length."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind="q8_0", layers=1, context=640)
    cpu = runner_of(path, None)
    ids = random_ids(np.random.default_rng(13), cpu, 400)
    session = Session(cpu)
    expected = session.logits(ids)
    session.close()
    cpu.close()
    other = runner_of(path, gpu)
    assert isinstance(other, GpuRunner)
    other.max_tokens = 32  # whose kernels other tests compile
    session = Session(other)
    assert_close(session.logits(ids), expected, "model", "400 tokens")
    assert {key.context for key in other._plans if isinstance(key, StepSpec) and key.tokens > 1} == {"single_pass"}
    other.close()
    other = runner_of(path, plain_device)
    assert isinstance(other, GpuRunner)
    assert not other.runs_have_any_length
    assert {other.step_of(32, keys, decode=False).context for keys in (32, 400)} == {"single_pass", "split"}
    other.close()
