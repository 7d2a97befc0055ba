"""One tiny model from end to end on the adapter, against NumPy. The full tier has the others.

A test compiles the kernels of one kind of step, so that none takes long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

import shaderlm
from shaderlm.engine import LanguageModel, Request
from shaderlm.engine.loading import load_with
from shaderlm.gpu import Device, Step
from shaderlm.gpu.pipelines import key_of

from .runners import runner_of
from .session import Session
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.smoke

IDS = [72, 14, 3, 250, 91, 7]
Models = tuple[LanguageModel, LanguageModel]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0")


class _GatheredError(Exception):
    """What would be compiled is known."""


@pytest.mark.parametrize("part", range(4))
def test_its_kernels_compile(part: int, path: Path, device: Device) -> None:
    steps: list[Step] = []

    def gather(wanted: Iterable[Step]) -> None:
        steps.extend({key_of(step): step for step in wanted}.values())
        raise _GatheredError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device._pipelines, "compile", gather)
        with pytest.raises(_GatheredError):
            runner_of(path, device, cache="f32", precision="exact")
    assert len(steps) > 8
    device._pipelines.compile(sorted(steps, key=lambda step: -len(step.source))[part::4])


@pytest.mark.parametrize("ids", [IDS[:1], IDS], ids=["a token", "a prompt"])
def test_logits(ids: list[int], path: Path, device: Device) -> None:
    runners = runner_of(path, device, cache="f32", precision="exact"), runner_of(path, None)
    found, expected = (Session(runner).logits(ids) for runner in runners)
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=5e-4)


@pytest.fixture(scope="module")
def models(path: Path, device: Device) -> Iterator[Models]:
    """On the adapter, and in NumPy. What the tests before compiled is there already."""
    with (
        load_with(path, device=device, cache="f32", precision="exact") as one,
        shaderlm.load(path, device="cpu") as other,
    ):
        yield one, other


def test_greedy_tokens(models: Models) -> None:
    found, expected = (model.generate(IDS, max_tokens=12, ignore_eos=True) for model in models)
    assert found.ids == expected.ids
    assert len(found.ids) == 12


def test_answers_together_are_those_of_each_alone(models: Models) -> None:
    prompts = [IDS[: 1 + i] for i in range(3)]
    on_adapter, _ = models
    handles = [on_adapter.engine.submit(Request(ids, max_tokens=5)) for ids in prompts]
    together = [[i for delta in handle for i in delta.ids] for handle in handles]
    assert together == [on_adapter.generate(ids, max_tokens=5, ignore_eos=True).ids for ids in prompts]
