"""What a model takes on a device: as predicted, refused where it cannot fit, and given back where it failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shaderlm.engine.planning import memory
from shaderlm.errors import DeviceError, TooLargeError
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Device
from shaderlm.graph.batch import PAGE
from shaderlm.models.checkpoint import architecture_of
from shaderlm.models.config import StepSpec
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.sizes import memory_of

from .checkpoints import recorded, write_gguf
from .command_line import shaderlm
from .conftest import taken_for
from .runners import config_of, runner_of
from .session import Session
from .tiny_models import write_tiny_llama

CONTEXT = 768


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("memory") / "tiny.gguf", kind="q8_0", context=CONTEXT)


def held(runner: Any) -> int:
    """Bytes of all buffers of a model."""
    return sum(buffer.size for kept in (runner._weights, runner._buffers) for buffer in kept.values())


@pytest.mark.parametrize("reserve", [0, CONTEXT])
def test_a_model_takes_what_is_predicted(device: Device, tiny: Path, reserve: int) -> None:
    """With a full cache, whether its memory was there from the beginning or grew."""
    runner = runner_of(tiny, device, reserve=reserve)
    assert isinstance(runner, GpuRunner)
    before = runner.pool.pages
    session = Session(runner)
    session.sample([1] * (CONTEXT - 3)).wait()
    for _ in range(3):
        session.advance().wait()
    assert session.length == CONTEXT
    assert (runner.pool.pages == before) == bool(reserve)
    with GgufFile.open(tiny) as file:
        predicted = memory(architecture_of(file), config_of(file, dense=False), device.caps, CONTEXT)
    assert predicted == runner.memory(CONTEXT)
    assert predicted.total == pytest.approx(held(runner), rel=0.05)
    runner.close()


@pytest.mark.full
def test_the_copy_of_a_state_is_counted(device: Device, tmp_path: Path) -> None:
    """Beside the rows of the states: a copy goes by way of a buffer."""
    runner = runner_of(write_gguf(tmp_path / "tiny.gguf", recorded("qwen35")), device)
    assert isinstance(runner, GpuRunner)
    session = Session(runner)
    session.feed([1] * 3)
    runner.free(runner.fork(session.sequence))
    plan = runner.plan(StepSpec(1, cache=runner.cache))
    stateless = replace(plan, buffers={name: b for name, b in plan.buffers.items() if b.role != "recurrent"})
    one, other = (memory_of([each], [], runner.config, device.caps, PAGE) for each in (plan, stateless))
    assert one.scratch - other.scratch == runner.state_bytes == runner._state_copy.size
    runner.close()


def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny, device)
    assert isinstance(runner, GpuRunner)
    needed = runner.memory(CONTEXT).total
    runner.close()
    small = taken_for(device, heap=needed - 1)
    monkeypatch.setattr(small, "buffer", lambda *given: pytest.fail("something was allocated"))
    with pytest.raises(TooLargeError, match=r"768 tokens of context need .*weights .*cache .*scratch .* has .*shorter"):
        runner_of(tiny, small, reserve=CONTEXT)
    monkeypatch.undo()
    runner_of(tiny, taken_for(device, heap=needed), reserve=CONTEXT).close()


def test_a_failed_allocation_gives_everything_back(device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the size of the memory is not known: the cache is allocated before weights are copied."""
    made: list[Any] = []
    small = taken_for(device, heap=0)
    real = small.buffer

    def short(contents: Any) -> Any:
        keys = CONTEXT * 2 * 16 * (2 if small.caps.policy.half_cache else 4)
        if isinstance(contents, int) and contents == keys:
            raise DeviceError("no memory")
        made.append(real(contents))
        return made[-1]

    monkeypatch.setattr(small, "buffer", short)
    with pytest.raises(DeviceError, match="no memory"):
        runner_of(tiny, small, reserve=CONTEXT)
    assert made
    assert all(buffer.destroyed for buffer in made)


def test_a_pool_grows_no_further_than_its_sequences_can_fill(device: Device, tiny: Path) -> None:
    runner = runner_of(tiny, device)
    assert isinstance(runner, GpuRunner)
    runner.config = replace(runner.config, context=5 * PAGE)
    runner.pool.pages_per_sequence = 5
    session = Session(runner)
    session.feed([1] * (4 * PAGE + 1))
    assert runner.pool.pages == 5
    runner.close()


def test_the_command_line_says_what_a_context_takes(tiny: Path) -> None:
    done = shaderlm("info", tiny, "--context", 700)
    assert done.code == 0
    line = next(line for line in done.out.splitlines() if line.startswith("memory"))
    assert "700 tokens of context (weights" in line
    found = json.loads(shaderlm("info", tiny, "--context", 700, "--json").out)["memory"]
    assert found["total"] == found["weights"] + found["cache"] + found["scratch"]
    shape = json.loads(shaderlm("info", "synthetic:llama-3.2-1b:q4_0", "--context", 32768, "--json").out)["memory"]
    assert shape["cache"] == 32768 * 2 * 16 * 8 * 64 * 2
    assert shaderlm("info", "synthetic:llama-3.2-1b:q4_0").code != 0
    assert "must be a whole number from 1 to the model's 768" in shaderlm("info", tiny, "--context", 5000).err
