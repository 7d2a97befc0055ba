"""Plans of larger caches are made ahead by another thread, which ends with the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shaderlm.engine import load
from shaderlm.gpu import Device
from shaderlm.models.architecture import Step
from shaderlm.runtime.gpu_model import GpuModel

from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=1, context=300)


@pytest.fixture
def model(device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuModel]:
    monkeypatch.setattr(device, "records_ahead", True)
    with load(tiny, device=device) as loaded:
        assert isinstance(loaded.runner, GpuModel)
        yield loaded.runner


def test_the_plan_of_a_larger_cache_is_there_before_it_is_wanted(model: GpuModel) -> None:
    """Making and compiling one takes as long as hundreds of tokens of a small model."""
    larger, session = Step(1, 300, model.cache), model.session()
    session.feed([7] * 127)
    session.choose(None).wait()
    session.advance(None).wait()
    assert not model.planned(larger), "too early"
    session.advance(None).wait()
    deadline = time.monotonic() + 5
    while not model.planned(larger) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert model.planned(larger)
    assert session.length == 129
    session.close()


def test_nothing_is_prepared_where_steps_are_recorded_directly(
    model: GpuModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A software adapter needs its cores for the tokens."""
    monkeypatch.setattr(model.device, "records_ahead", False)
    monkeypatch.setattr(model, "prepare", lambda step: pytest.fail("it was prepared"))
    session = model.session()
    session.feed([7] * 140)
    session.choose(None).wait()
    session.advance(None).wait()
    session.close()


def test_a_model_is_closed_while_a_plan_is_made(model: GpuModel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), []

    def compile_slowly(*_: Any) -> None:
        begun.set()
        time.sleep(0.1)
        over.append(True)

    monkeypatch.setattr(model.device, "compile", compile_slowly)
    model.prepare(Step(1, 300, model.cache))
    assert begun.wait(5)
    model.close()
    assert over == [True]
