"""Processors of GPUs that no table names are counted once, and the count is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import DeviceError
from shaderlm.gpu import Device, MatrixShape, Program, lanes, matrices, probe_cache, processors
from shaderlm.gpu.lanes import Lanes
from shaderlm.gpu.processors import count_by, probe, program, with_counted_processors


@pytest.mark.parametrize("count", [1, 2, 3, 8, 10, 20, 64, 132, 170, 304, 1024])
@pytest.mark.parametrize("start", [0.0, 0.3])
def test_workgroups_that_share_a_processor_take_longer(count: int, start: float) -> None:
    """`start`: what a submission takes, in units of a workgroup."""
    rng = np.random.default_rng(count)
    assert count_by(lambda workgroups: (start + math.ceil(workgroups / count)) * rng.uniform(1.0, 1.1)) == count


class _Timed:
    """A GPU of so many processors whose clock is the test's."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.caps = replace(LARGE_GPU, name="a GPU that nobody knows", processors=0, **changes)
        self.count, self.now, self.runs = count, 0.0, 0
        monkeypatch.setattr(processors, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def run(self, work: Program) -> dict[str, NDArray[np.uint8]]:
        rounds = work.buffers["rounds"]
        assert isinstance(rounds, np.ndarray)
        self.now += 2e-4 + (0.1 if self.runs == 0 else 0)  # compiling
        clock = min(1.0, 0.2 + self.now)  # low at first
        self.now += 1e-7 / clock * int(rounds[0]) * math.ceil(work.steps[0].grid[0] / self.count)
        self.runs += 1
        return {}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("count", [8, 20, 132])
def test_a_gpu_without_a_row_is_counted_once(count: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Timed(count, monkeypatch)
    assert with_counted_processors(gpu).processors == count
    assert gpu.now < 10  # seconds of its clock
    (kept,) = (cache / "tuning").iterdir()
    again = _Timed(count, monkeypatch)
    assert (with_counted_processors(again).processors, again.runs) == (count, 0)
    for damaged in ("", "[]", kept.read_text().replace(f'"result": {count}', '"result": -1')):
        kept.write_text(damaged)
        assert with_counted_processors(_Timed(count, monkeypatch)).processors == count
    other_driver = _Timed(count + 1, monkeypatch, driver="another")
    assert with_counted_processors(other_driver).processors == count + 1


def test_what_cannot_be_kept_is_not_counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "tuning").write_text("a file where a folder must be")
    gpu = _Timed(8, monkeypatch)
    assert (with_counted_processors(gpu), gpu.runs) == (gpu.caps, 0)


def test_known_gpus_and_software_are_not_counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"kind": "software"}, {"processors": 7}):
        gpu = _Timed(8, monkeypatch)
        gpu.caps = replace(gpu.caps, **changes)
        assert (with_counted_processors(gpu), gpu.runs) == (gpu.caps, 0)
    assert not list(cache.iterdir())


def test_a_gpu_that_cannot_be_counted_is_used_all_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Program) -> dict[str, NDArray[np.uint8]]:
        raise DeviceError("refused")

    gpu = _Timed(8, monkeypatch)
    monkeypatch.setattr(gpu, "run", fail)
    assert with_counted_processors(gpu) == gpu.caps
    again = _Timed(8, monkeypatch)
    assert (with_counted_processors(again).processors, again.runs) == (0, 0), "it is not tried at every start"


def test_times_that_say_nothing_are_no_count() -> None:
    assert count_by(lambda workgroups: 1.0) == 0
    assert count_by(lambda workgroups: math.ceil(workgroups / 1500)) == 0


def test_two_counts_that_differ_are_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Timed(64, monkeypatch)
    counts = iter((64, 128))
    monkeypatch.setattr(processors, "count_by", lambda seconds: next(counts))
    assert with_counted_processors(gpu).processors == 0


def test_ctrl_c_while_counting_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Timed(64, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(processors, "count_by", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            with_counted_processors(gpu)
    assert with_counted_processors(gpu).processors == 64


def _interrupted(seconds: object) -> int:
    raise KeyboardInterrupt


def test_a_part_of_a_device_is_not_counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Timed(64, monkeypatch)
    assert (with_counted_processors(gpu, whole=False).processors, gpu.runs) == (0, 0)
    assert with_counted_processors(gpu).processors == 64
    assert with_counted_processors(gpu, whole=False).processors == 64


def test_each_implementation_has_its_count(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the driver differently."""
    for _ in range(2):
        for implementation in ("wgpu", "dawn"):
            gpu = _Timed(64, monkeypatch, implementation=implementation, driver=implementation)
            assert with_counted_processors(gpu).processors == 64
    assert gpu.runs == 0


@pytest.mark.smoke
def test_the_kernel_computes_what_it_says(device: Device) -> None:
    sums = device.run(program(3, 100))["sums"].view(np.float32)
    assert np.array_equal(sums, np.full(3, 1 + 5 + 100 * 8 * 2 * 0.5, np.float32))  # lane 0 multiplies with 1


def test_a_count_is_possible_on_any_adapter(device: Device) -> None:
    assert 0 <= probe(device) <= 1024


# What other probes keep ------------------------------------------------------------------------------------

_NAME = "a GPU that is probed once"
_LANES = Lanes(32, 32, True)
_SHAPES = (MatrixShape("f16", "f32", 16, 16, 16), MatrixShape("f16", "f16", 16, 16, 16))


def _gpu(**changes: Any) -> Any:
    return SimpleNamespace(caps=replace(LARGE_GPU, name=_NAME, f16=True, matrix_shapes=_SHAPES, **changes))


@pytest.mark.parametrize(("kind", "runs"), [("discrete", 1), ("software", 3)])
def test_lanes_are_probed_once(kind: str, runs: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[object] = []

    def probe(device: object) -> Lanes:
        probed.append(device)
        return _LANES

    monkeypatch.setattr(lanes, "probe", probe)
    for _ in range(3):
        monkeypatch.setattr(lanes, "_known", {})  # as in another process
        assert lanes.with_probed_lanes(_gpu(kind=kind), ("wgpu", 0)).subgroup_max == 32
    assert len(probed) == runs, "versions of software adapters do not say what changed"
    monkeypatch.setattr(lanes, "_known", {})
    lanes.with_probed_lanes(_gpu(kind=kind, driver="another"), ("wgpu", 0))
    assert len(probed) == runs + 1


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"lanes": 1}', "nonsense"])
def test_lanes_that_are_damaged_are_probed_again(damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "probe", lambda device: _LANES)
    for _ in range(2):
        monkeypatch.setattr(lanes, "_known", {})
        assert lanes.with_probed_lanes(_gpu(), ("wgpu", 0)).subgroup_max == 32
        path = probe_cache.path_of(_gpu().caps)
        text = path.read_text()
        path.write_text(text.replace("32", '"x"') if damage == "nonsense" else damage)


def test_matrix_shapes_are_checked_once_and_wrong_ones_each_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    wrong = {_SHAPES[0]: "result [0, 0] is 1, it must be 2"}
    for answers in (wrong, wrong, {}, {}, {}):

        def problems(device: object, shapes: object, found: Any = answers) -> Any:
            runs.append(shapes)
            return found

        monkeypatch.setattr(matrices, "_wrong", {})
        monkeypatch.setattr(matrices, "problems", problems)
        assert matrices.with_probed_matrices(_gpu(), ("dawn", 0)).multiplies_f16 == (not answers)
    assert len(runs) == 3


def test_a_cache_that_cannot_be_written_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(lanes, "probe", lambda device: _LANES)
    monkeypatch.setattr(lanes, "_known", {})
    assert lanes.with_probed_lanes(_gpu(), ("wgpu", 0)).subgroup_max == 32
