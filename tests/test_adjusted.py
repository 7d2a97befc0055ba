"""Penalties, biases, masks and log probabilities of a model's rows, and final hidden states: in a batch as alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shaderlm.engine.sampling import SamplingParams, settings_of
from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.graph.batch import PAGE
from shaderlm.runtime.adjusted import mask_words
from shaderlm.runtime.gpu_runner import GpuDecode, GpuRunner
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.runner import Runner, SequenceChunk
from shaderlm.runtime.sampler_settings import SamplerSettings

from .compare import assert_close
from .host_sampling import log_probabilities, sample
from .policies import with_policy
from .runners import runner_of
from .session import Session, token_of
from .test_batches import random_ids
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0, batches")

CONTEXT = 2 * PAGE

PLAIN = SamplingParams(temperature=0.9, seed=3)
ROWS = (
    SamplingParams(),
    PLAIN,
    SamplingParams(presence_penalty=100),
    SamplingParams(temperature=1.1, top_k=30, seed=5, repetition_penalty=1.5, frequency_penalty=0.75, logprobs=3),
    SamplingParams(temperature=0.8, seed=6, logit_bias={7: 4.0, 9: -math.inf, 30: 2.5}, logprobs=20),
    SamplingParams(logit_bias={11: 100.0}, frequency_penalty=30, logprobs=0),
)


@pytest.fixture(scope="module", params=["cpu", "software", pytest.param("gpu", marks=pytest.mark.long)])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A tiny model in NumPy, on the adapter of the tests, and on the same taken for a GPU.

    Exact: one row and several are rounded by different routes, and a drawn token may be one or the other then.
    """
    path = write_tiny_llama(tmp_path_factory.mktemp("adjusted") / "tiny.gguf", kind="q8_0", layers=1, context=CONTEXT)
    fixture = {"software": "device", "gpu": "gpu"}.get(request.param)
    device = None if fixture is None else request.getfixturevalue(fixture)
    made = runner_of(path, device, cache="f32", **({} if device is None else {"precision": "exact"}))
    yield made
    made.close()


Reported = tuple[int, Any]


def alone(runner: Runner, ids: list[int], how: SamplerSettings, count: int) -> list[Reported]:
    """Tokens of a sequence that has its steps alone, all submitted ahead, and what they report."""
    session = Session(runner)
    if how.penalizes:
        session.set_history(ids)
    pending = [session.sample(ids, how)]
    pending += [session.advance(how) for _ in range(count - 1)]
    found = [(token.wait(), token.logprobs()) for token in pending]
    session.close()
    return found


def on_host(runner: Runner, ids: list[int], params: SamplingParams, count: int) -> list[Reported]:
    """The same, from logits that are read back."""
    session, how, history, found = Session(runner), settings_of(params), Counter(ids), list[Reported]()
    for step in range(count):
        logits = session.logits(ids if step == 0 else [found[-1][0]])
        token = sample(logits, params, history, how, session.length - 1)
        history[token] += 1
        found.append((token, None if params.logprobs is None else log_probabilities(logits, token, params.logprobs)))
    session.close()
    return found


def assert_same(found: list[Reported], expected: list[Reported], what: str) -> None:
    assert [token for token, _ in found] == [token for token, _ in expected], what
    for (_, report), (_, wanted) in zip(found, expected, strict=True):
        assert (report is None) == (wanted is None), what
        if report is not None:
            assert report[0] == pytest.approx(wanted[0], abs=1e-3), what
            assert [token for token, _ in report[1]] == [token for token, _ in wanted[1]], what
            assert [value for _, value in report[1]] == pytest.approx([v for _, v in wanted[1]], abs=1e-3), what


@pytest.mark.parametrize("row", range(2, len(ROWS)))
def test_the_device_does_what_the_host_did(row: int, runner: Runner) -> None:
    """The same tokens and log probabilities, submitted ahead, across the end of a page."""
    ids = random_ids(np.random.default_rng(row), runner, PAGE - 3)
    found = alone(runner, ids, settings_of(ROWS[row]), 6)
    assert_same(found, on_host(runner, ids, ROWS[row], 6), str(ROWS[row]))
    if ROWS[row].presence_penalty:
        assert not {token for token, _ in found} & set(ids), "tokens of the prompt are penalised"


def test_rows_with_different_adjustments_share_steps(runner: Runner) -> None:
    """Plain rows too; first in one step with their prompts, then in one batch, then two of them in another."""
    rng = np.random.default_rng(1)
    hows = [settings_of(each) for each in ROWS]
    prompts = [random_ids(rng, runner, int(n)) for n in rng.integers(2, 30, len(ROWS))]
    expected = [alone(runner, ids, how, 6) for ids, how in zip(prompts, hows, strict=True)]
    sequences = [runner.add() for _ in ROWS]
    for sequence, ids, how in zip(sequences, prompts, hows, strict=True):
        if how.penalizes:
            runner.set_history(sequence, ids)
    parts = [SequenceChunk(s, ids, "token", how) for s, ids, how in zip(sequences, prompts, hows, strict=True)]
    first = runner.step(parts)
    tokens = [[token_of(first, sequence)] for sequence in sequences]
    assert first.tokens is not None
    batch = runner.decode_batch(sequences, hows)
    steps = [batch.step() for _ in range(3)]
    found = [
        [(tokens[i][0].wait(), tokens[i][0].logprobs()), *((int(s.wait()[q.slot]), s.logprobs(q.slot)) for s in steps)]
        for i, q in enumerate(sequences)
    ]
    batch.close()
    batch = runner.decode_batch([sequences[4], sequences[2]], [hows[4], hows[2]])
    for _ in range(2):
        step = batch.step()
        for i in (4, 2):
            found[i].append((int(step.wait()[sequences[i].slot]), step.logprobs(sequences[i].slot)))
    batch.close()
    for i, each in enumerate(found):
        assert_same(each, expected[i][: len(each)], str(ROWS[i]))
    for sequence in sequences:
        runner.free(sequence)


def test_a_mask_says_what_may_be_sampled(runner: Runner) -> None:
    vocabulary = runner.config.vocabulary
    allowed = np.zeros(32 * mask_words(vocabulary), bool)
    allowed[[5, 40, vocabulary - 1]] = True
    mask = np.packbits(allowed, bitorder="little").tobytes()
    for how in (SamplerSettings(mask=mask), SamplerSettings(1.5, seed=3, mask=mask, bias=((6, 50.0),), logprobs=1)):
        found = [token for token, _ in alone(runner, [1, 2, 3], how, 5)]
        assert set(found) <= {5, 40, vocabulary - 1}
    only = np.packbits(np.arange(allowed.size) == 77, bitorder="little").tobytes()
    a, b = runner.add(), runner.add()
    step = runner.step(
        [
            SequenceChunk(a, [1, 2, 3], "token", SamplerSettings(mask=mask)),
            SequenceChunk(b, [1, 2, 3], "token", SamplerSettings(mask=only)),
        ]
    )
    assert token_of(step, a).wait() in {5, 40, vocabulary - 1}
    assert token_of(step, b).wait() == 77
    runner.free(a)
    runner.free(b)


def test_histories_belong_to_generations(runner: Runner) -> None:
    """A new generation counts what it is given. A fork and a new sequence in an old slot have no history; one that is
    truncated, or that gives anything without penalties, loses it."""
    how = SamplerSettings(presence_penalty=100.0)
    ids = random_ids(np.random.default_rng(2), runner, 12)
    first = alone(runner, ids, how, 5)
    assert alone(runner, ids, how, 5) == first, "in the same slot, which has counts of the other"
    parent = runner.add()
    with pytest.raises(InputError, match="set_history"):
        runner.step([SequenceChunk(parent, ids, "token", how)])
    assert parent.length == 0
    runner.set_history(parent, ids)
    token = token_of(runner.step([SequenceChunk(parent, ids, "token", how)]), parent).wait()
    assert token == first[0][0]
    child = runner.fork(parent)
    with pytest.raises(InputError, match="set_history"):
        runner.step([SequenceChunk(child, None, "token", how)])
    runner.set_history(child, [*ids, token])
    step = runner.step([SequenceChunk(child, [token], "token", how), SequenceChunk(parent, [token], "token", how)])
    assert token_of(step, child).wait() == token_of(step, parent).wait() == first[1][0]
    runner.truncate(parent, 3)
    with pytest.raises(InputError, match="set_history"):
        runner.step([SequenceChunk(parent, [token], "token", how)])
    for plain in (SamplerSettings(), SamplerSettings(logprobs=0)):
        runner.set_history(parent, ids)
        runner.step([SequenceChunk(parent, ids, "token", how)])
        batch = runner.decode_batch([parent], [plain])
        batch.step().wait()
        batch.close()
        with pytest.raises(InputError, match="set_history"):
            runner.step([SequenceChunk(parent, None, "token", how)])
    runner.set_history(parent, ids)
    runner.step([SequenceChunk(parent, ids, "logits")])
    with pytest.raises(InputError, match="set_history"):
        runner.step([SequenceChunk(parent, ids, "token", how)])
    runner.free(parent)
    runner.free(child)


def test_settings_that_cannot_be(runner: Runner) -> None:
    sequence = runner.add()
    for how, words in (
        (SamplerSettings(bias=((runner.config.vocabulary, 1.0),)), "bias has token"),
        (SamplerSettings(bias=((3, 1.0), (3, 2.0))), "twice"),
        (SamplerSettings(logprobs=21), "logprobs must be None or a whole number in 0 … 20, got 21"),
        (SamplerSettings(mask=b"1234"), "a mask must have .* got 4"),
    ):
        with pytest.raises(InputError, match=words):
            runner.step([SequenceChunk(sequence, [1, 2], "token", how)])
    assert sequence.length == 0
    runner.free(sequence)


def test_counts_grow_with_the_sequences(runner: Runner) -> None:
    """Sequences in higher slots make room for theirs; what others have counted stays."""
    how, ids = SamplerSettings(presence_penalty=100.0), [4, 5, 6, 7]
    expected = [token for token, _ in alone(runner, ids, how, 4)]
    sequences = [runner.add() for _ in range(19)]
    low, high = sequences[0], sequences[-1]
    runner.set_history(low, ids)
    found = [token_of(runner.step([SequenceChunk(low, ids, "token", how)]), low).wait()]
    batch = runner.decode_batch([low], [how])
    found.append(int(batch.step().wait()[low.slot]))
    runner.set_history(high, ids)
    found += [int(batch.step().wait()[low.slot]) for _ in range(2)]
    batch.close()
    assert found == expected
    assert token_of(runner.step([SequenceChunk(high, ids, "token", how)]), high).wait() == expected[0]
    for sequence in sequences:
        runner.free(sequence)


def test_recorded_ahead(
    tmp_path_factory: pytest.TempPathFactory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Command buffers come from a pool, nothing is written per step, and what they give is what the host gives."""
    path = write_tiny_llama(tmp_path_factory.mktemp("ahead") / "tiny.gguf", kind="q8_0", layers=1, context=CONTEXT)
    monkeypatch.setattr(device, "caps", with_policy(device.caps, record_ahead=True))
    made, params, ids = runner_of(path, device, cache="f32"), ROWS[3], [4, 5, 6, 7]
    how, other = settings_of(params), made.add()
    sequence = made.add()
    made.set_history(sequence, ids)
    made.set_history(other, ids)
    step = made.step([SequenceChunk(sequence, ids, "token", how), SequenceChunk(other, ids, "token", how)])
    found: list[Reported] = [(token_of(step, sequence).wait(), token_of(step, sequence).logprobs())]
    batch = made.decode_batch([sequence, other], [how, how])
    assert isinstance(batch, GpuDecode)
    steps = [batch.step()]
    assert batch._pool is not None
    with monkeypatch.context() as patch:
        patch.setattr(Device, "write", lambda *_: pytest.fail("a step wrote something"))
        steps += [batch.step() for _ in range(4)]
    for each in steps:
        assert each.wait()[sequence.slot] == each.wait()[other.slot]
        found.append((int(each.wait()[sequence.slot]), each.logprobs(sequence.slot)))
    batch.close()
    assert_same(found, on_host(made, ids, params, 6), "recorded ahead")
    made.close()


def test_plain_steps_do_without(tmp_path_factory: pytest.TempPathFactory, device: Device) -> None:
    """Neither buffers nor dispatches, until a row asks for them."""
    path = write_tiny_llama(tmp_path_factory.mktemp("plain") / "tiny.gguf", kind="q8_0", layers=1, context=CONTEXT)
    made = runner_of(path, device)
    assert isinstance(made, GpuRunner)
    alone(made, [1, 2, 3], settings_of(PLAIN), 3)
    ops = {launch.op for plan in made._plans.values() for launch in plan.launches}
    assert "sample" in ops
    assert not ops & {"adjust_logits", "logprobs"}
    names = {"adjustments", "biases", "masks", "counts", "logprobs"}
    assert not names & made._buffers.keys()
    alone(made, [1, 2, 3], settings_of(ROWS[3]), 2)
    assert names <= made._buffers.keys()
    made.close()


def test_final_hidden_states(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Alone, of one row, and in a step with rows that give tokens and logits: those of NumPy, and they give logits."""
    path = write_tiny_llama(tmp_path_factory.mktemp("hidden") / "tiny.gguf", kind="q8_0", layers=1, context=CONTEXT)
    oracle = runner_of(path, None)
    rng = np.random.default_rng(3)
    prompts = [random_ids(rng, runner, n) for n in (9, 1, 5, 4)]
    expected, logits = [], []
    for ids in prompts:
        sequence = oracle.add()
        states = oracle.step([SequenceChunk(sequence, ids, "hidden")]).hidden
        assert states is not None
        expected.append(states[0])
        oracle.truncate(sequence, 0)
        row = oracle.step([SequenceChunk(sequence, ids, "logits")]).logits
        assert row is not None
        logits.append(row[0])
        oracle.free(sequence)
    assert isinstance(oracle, NumpyRunner)
    for states, row in zip(expected, logits, strict=True):
        assert_close(oracle.weights["token_embd.weight"] @ states, row, "model", "what the output matrix reads")
    oracle.close()
    sequences = [runner.add() for _ in prompts]
    for sequence, ids, wanted in zip(sequences, prompts, expected, strict=True):
        step = runner.step([SequenceChunk(sequence, ids, "hidden")])
        assert step.logits is None
        assert step.tokens is None
        assert step.hidden is not None
        assert step.hidden.shape == (1, runner.config.hidden)
        assert_close(step.hidden[0], wanted, "model", f"{len(ids)} tokens alone")
        runner.truncate(sequence, 0)
    gives: Any = ("hidden", "hidden", "token", "logits")
    step = runner.step([SequenceChunk(s, ids, how) for s, ids, how in zip(sequences, prompts, gives, strict=True)])
    assert step.hidden is not None
    assert step.logits is not None
    for i in (0, 1):
        assert_close(step.hidden[i], expected[i], "model", f"row {i} of a step")
    assert_close(step.logits[3], logits[3], "model", "logits of the same step")
    assert token_of(step, sequences[2]).wait() == int(logits[2].argmax())
    for sequence in sequences:
        runner.free(sequence)
