"""However the tokens of a checkpoint are cut into steps, alone or beside others, its logits are those recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine import EngineOptions, Handle, LanguageModel
from shaderlm.engine.cpu import CPU_DEVICES
from shaderlm.engine.loading import load_with
from shaderlm.gpu import Device
from shaderlm.graph.fuse import FUSIONS
from shaderlm.models.config import StepSpec
from shaderlm.runtime.pages import KvSequence
from shaderlm.runtime.runner import F32, Runner, SequenceChunk

from . import checkpoints
from .oracles import ARCHITECTURES, NAMES, Case, Oracle, assert_logits
from .session import Session, rewind
from .sweeps import by_default, every_third_by_default, some_by_default, with_all

pytestmark = pytest.mark.xdist_group("test_oracles")
Oracles = dict[str, Oracle]

# Every fusion applies to one of these; test_checkpoints has every checkpoint without fusions.
FUSED = ("gemma3", "gpt-oss-mxfp4", "qwen3moe", "smollm3", "starcoder2")
# Checkpoints of architectures that no oracle has.
OTHERS = [
    name for name in checkpoints.names() if checkpoints.recorded(name)["architecture"] not in ARCHITECTURES.values()
]
# Windows, sinks, experts and states.
SCORED = ("gemma2", "gpt-oss-mxfp4", "lfm2moe", "mamba2", "mixtral", "qwen3moe", "qwen35")
# By default: every kind of attention and of state has one of these.
SHORT = ("gemma3", "gpt-oss-mxfp4", "mamba2", "phi3-longrope", "qwen35")


class Loaded:
    """A checkpoint with a context of 512 and an f32 cache."""

    def __init__(self, oracle: Oracle, device: Device | str) -> None:
        self.model = load(oracle, device)
        self.runner, self.cases = self.model.runner, oracle.cases()[512]
        assert [len(case.prompt) for case in self.cases] == [5, 17, 40, 300]
        self._alone, self._known = load(oracle, "numpy"), dict[tuple[int, ...], F32]()

    def whole(self, ids: list[int]) -> F32:
        """Logits [tokens, vocabulary] of a sequence alone, in one go, in NumPy."""
        if tuple(ids) not in self._known:
            self._known[tuple(ids)] = self._alone.logits(ids)
        return self._known[tuple(ids)]

    def close(self) -> None:
        self.model.close()
        self._alone.close()

    def logits(self, *parts: SequenceChunk) -> F32:
        """Of a step."""
        found = self.runner.step(list(parts)).logits
        assert found is not None
        return found


def load(oracle: Oracle, device: Device | str, **options: Any) -> LanguageModel:
    return load_with(oracle.gguf, device=device, context=512, cache="f32", precision="exact", **options)


def places() -> Iterator[Any]:
    """A software adapter takes long to compile these: test_batches has such steps of a smaller model."""
    for name in NAMES:
        for where in ("numpy", "cpu", "device", "gpu"):
            short = name in SHORT and (where == "numpy" or (where == "cpu" and name in FUSED))
            marks = () if short else pytest.mark.full if where in CPU_DEVICES else pytest.mark.long
            yield pytest.param((name, where), id=f"{name}-{where}", marks=marks)


@pytest.fixture(scope="module", params=list(places()))
def model(request: pytest.FixtureRequest, oracles: Oracles) -> Iterator[Loaded]:
    """Every checkpoint in NumPy, with packed weights, on the adapter of the tests, and on the same taken for a GPU."""
    name, where = request.param
    with closing(Loaded(oracles[name], where if where in CPU_DEVICES else request.getfixturevalue(where))) as made:
        yield made


def test_a_prompt_in_chunks(model: Loaded) -> None:
    """They end within pages, of 128 positions, and within windows, of 12. Those of 8 rows and more are runs."""
    _, short, middle, long = model.cases
    schedules = [(short, [1] * 17), (short, [3] * 5 + [2]), (middle, [8] * 5), (long, [127, 1, 1, 99, 3, 8, 61])]
    for case, counts in schedules:
        assert sum(counts) == len(case.prompt)
        expected, session, at = model.whole(case.prompt), Session(model.runner), 0
        for count in counts:
            found = session.logits(case.prompt[at : at + count])
            at += count
            assert_logits(found, expected[at - 1], f"{at} tokens, the last {count} of them at once")
        case.check(found)
        session.close()


def test_prompts_that_share_steps(model: Loaded) -> None:
    """Chunks and single rows of all prompts in one step, until each is read."""
    rng = np.random.default_rng(0)
    left = [(model.runner.add(), case, list(case.prompt)) for case in model.cases]
    steps = 0
    while left:
        parts, ended, steps = [], [], steps + 1
        for sequence, case, ids in left:
            count = int(rng.choice([1, 9, 17] if len(case.prompt) < 300 else [1, 60, 70]))
            taken = [ids.pop(0) for _ in range(min(count, len(ids)))]
            parts.append(SequenceChunk(sequence, taken, "nothing" if ids else "logits"))
            ended += [] if ids else [case]
        found = model.runner.step(parts).logits
        for i, case in enumerate(ended):
            assert found is not None
            case.check(found[i])
        for sequence, _, ids in left:
            if not ids:
                model.runner.free(sequence)
        left = [each for each in left if each[2]]
    assert steps > 5


def test_forks_and_what_is_forgotten(model: Loaded) -> None:
    """A fork shares a page and a half; both go on, the fork to more keys than one pass of attention takes."""
    runner, case, other = model.runner, model.cases[3], model.cases[2].prompt
    alone = model.whole([*case.prompt, *other])
    parent = runner.add()
    for first in (0, 100):
        runner.step([SequenceChunk(parent, case.prompt[first : first + 100], "nothing")])
    child = runner.fork(parent)
    found = model.logits(SequenceChunk(child, case.prompt[200:260], "logits"), SequenceChunk(parent, other, "logits"))
    assert_logits(found[0], alone[259], "the fork")
    assert_logits(found[1], model.whole([*case.prompt[:200], *other])[-1], "its parent")
    rewind(runner, parent, case.prompt, 190)
    found = model.logits(
        SequenceChunk(parent, case.prompt[190:250], "logits"), SequenceChunk(child, case.prompt[260:], "logits")
    )
    assert_logits(found[0], alone[249], "the parent, from an earlier position on")
    case.check(found[1])
    runner.free(parent)
    at = 300
    for count in (30, 4, 1):
        found = model.logits(SequenceChunk(child, other[at - 300 : at - 300 + count], "logits"))
        at += count
        assert_logits(found[0], alone[at - 1], f"the fork, after its parent is gone: {at} tokens")
    runner.free(child)


@pytest.mark.parametrize("name", every_third_by_default(OTHERS))
@pytest.mark.parametrize(
    "where", ["numpy", pytest.param("cpu", marks=pytest.mark.full), with_all("device"), with_all("gpu")]
)
def test_checkpoints_without_an_oracle(name: str, where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Chunks of 3, 1 and 8 rows beside others, a fork, and an earlier position, as all in one go in NumPy."""
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", checkpoints.recorded(name))
    short, ids = checkpoints.PROMPTS
    with load_with(path, device="numpy") as model:
        alone, other, forked = (model.logits(each) for each in (ids, short, [*ids[:12], *short]))
    device = where if where in CPU_DEVICES else request.getfixturevalue(where)
    with load_with(path, device=device, cache="f32", precision="exact") as model:
        runner = model.runner
        first, second = runner.add(), runner.add()

        def step(*parts: tuple[KvSequence, list[int], F32]) -> None:
            """The last rows of these parts, and what they give."""
            found = runner.step([SequenceChunk(sequence, given, "logits") for sequence, given, _ in parts]).logits
            assert found is not None
            assert_logits(found, np.stack([wanted for _, _, wanted in parts]), f"{[len(part[1]) for part in parts]}")

        step((first, ids[:3], alone[2]), (second, short[:1], other[0]))
        step((second, short[1:], other[4]), (first, ids[3:4], alone[3]))
        step((first, ids[4:12], alone[11]))
        third = runner.fork(first)
        step((third, short, forked[-1]), (first, ids[12:39], alone[38]))
        rewind(runner, third, ids, 10)
        step((first, ids[39:], alone[39]), (third, ids[10:30], alone[29]))


@pytest.mark.parametrize("name", some_by_default(SCORED, ("gpt-oss-mxfp4", "qwen3moe")))
@pytest.mark.parametrize("where", ["numpy", "cpu", pytest.param("device", marks=pytest.mark.long)])
def test_deterministic_generations(name: str, where: str, oracles: Oracles, request: pytest.FixtureRequest) -> None:
    """Their log probabilities do not depend on what runs beside them, to the bit: experts take rows of others, too."""
    device = where if where in CPU_DEVICES else request.getfixturevalue(where)
    prompts = [case.prompt for case in oracles[name].cases()[512]]
    with load(oracles[name], device, deterministic=True) as model:
        model.engine.configure(EngineOptions(parallel=len(prompts)))
        options: Any = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
        alone = [bits(model.engine.submit(model.request(each, cache_prompt=False, **options))) for each in prompts]
        handles = [model.engine.submit(model.request(each, **options)) for each in prompts]
        assert [bits(handle) for handle in handles] == alone


def bits(handle: Handle) -> list[tuple[int, float]]:
    found = handle.result()
    assert found is not None
    assert found.logprobs is not None
    return [(each.id, each.logprob) for each in found.logprobs]


@pytest.mark.parametrize("name", by_default(NAMES, FUSED.__contains__))
def test_every_fusion_in_numpy(name: str, oracles: Oracles) -> None:
    """None, all, each alone, and all but each: the same logits, of a chunk and of one row."""
    case, sizes = oracles[name].cases()[512][1], set()
    every = [fusion.name for fusion in FUSIONS]
    for fusions in (
        [],
        every,
        *([one] for one in every),
        *([other for other in every if other != one] for one in every),
    ):
        with load(oracles[name], "numpy", fusions=fusions) as model:
            sizes.add(len(model.runner.graph(StepSpec(4))[0].nodes))
            check_in_two_parts(model.runner, case)
    assert len(sizes) > 4, "fusions that apply make graphs smaller"


@pytest.mark.parametrize("name", by_default(NAMES, ("gemma3", "qwen3moe").__contains__))
@pytest.mark.parametrize("where", ["device", pytest.param("gpu", marks=pytest.mark.long)])
def test_no_fusion_on_a_device(name: str, where: str, oracles: Oracles, request: pytest.FixtureRequest) -> None:
    with load(oracles[name], request.getfixturevalue(where), fusions=()) as model:
        check_in_two_parts(model.runner, oracles[name].cases()[512][2])


def check_in_two_parts(runner: Runner, case: Case) -> None:
    session = Session(runner)
    session.feed(case.prompt[:-1])
    case.check(session.logits(case.prompt[-1:]))
    session.close()
