"""Kernels in headless Chromium, beside wgpu and Dawn: a run of every route, and with --all every run of `kernel_runs`.

The device without subgroups has the limits that every browser grants, and Chromium holds programs to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shaderlm.errors import KernelError
from shaderlm.gpu import Program, Slot, Step
from shaderlm.kernels import Route

from .browser_device import BrowserDevice, browser_devices
from .cases import make
from .kernel_runs import Run, every_run, small_run
from .operands import Arrays
from .test_kernels import ROUTES, check, is_left_out

pytestmark = pytest.mark.browser

Devices = tuple[BrowserDevice, BrowserDevice]
_PART = 24  # runs in one round trip
# Byte products, which SwiftShader takes long to compile; linear/tile_int16 has the same ones.
_SLOW = {"linear_experts/grouped_int16", "linear/gemv_rows_int16"}


def _with_all(each: Any) -> Any:
    return pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.long])


@pytest.fixture(scope="session")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    """One Chromium for every worker of pytest-xdist."""
    with browser_devices(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.mark.parametrize(("op", "route"), [_with_all(each) if each.id in _SLOW else each for each in ROUTES])
def test_every_route(op: str, route: Route, devices: Devices, pytestconfig: pytest.Config) -> None:
    full, least = devices
    wanted = every_run if pytestconfig.getoption("--all") else small_run
    runs = wanted(op, route.name, full, least)
    problems = []
    for device in devices:
        mine = [run for run in runs if run.device is device]
        for at in range(0, len(mine), _PART):
            problems += _problems(device, mine[at : at + _PART])
    assert runs or is_left_out(route, full.caps), "no case ran"
    assert not problems, f"{len(problems)} of {len(runs)}:\n" + "\n".join(problems[:20])


def _problems(device: BrowserDevice, runs: list[Run]) -> list[str]:
    made: list[tuple[Program, Arrays]] = []
    for run in runs:
        operands, expected = make(run.case)
        made.append((run.program(operands), expected))
    found = device.run_all([program for program, _ in made])
    problems = []
    for run, (_, expected), raw in zip(runs, made, found, strict=True):
        try:
            if isinstance(raw, KernelError):
                raise raw
            check(run, raw, expected)
        except (AssertionError, KernelError) as problem:
            problems.append(f"{run.label}: {problem}")
    return problems


_WRITE = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size({threads})
fn main(@builtin(global_invocation_id) thread: vec3<u32>) {{ out[thread.x] = {value}; }}
"""


def _program(value: str, threads: int = 4, *, size: int | None = None) -> Program:
    step = Step(
        "the kernel", _WRITE.format(value=value, threads=threads), (Slot("out", "storage", 0, size),), (1, 1, 1)
    )
    return Program({"out": 16}, (step,), ("out",))


def test_the_device_with_the_least_that_browsers_grant(devices: Devices) -> None:
    full, least = (device.caps for device in devices)
    assert (least.max_invocations, least.max_workgroup_memory, least.max_storage_buffers) == (256, 16 << 10, 8)
    assert (least.subgroups, least.f16, least.max_binding) == (False, False, 128 << 20)
    assert full.subgroups
    assert full.max_binding >= least.max_binding


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (_program("unknown"), "the kernel: line 4: unresolved value 'unknown'"),
        (_program("7u", threads=257), "the kernel: .*257"),
        (_program("7u", size=32), "the kernel: Binding size .32."),
    ],
    ids=["source", "limit", "binding"],
)
def test_what_is_wrong_is_said_with_the_name_of_the_shader(devices: Devices, program: Program, said: str) -> None:
    good = _program("thread.x + 5u")
    for device in devices:
        first, problem, last = device.run_all([good, program, good])
        with pytest.raises(KernelError, match=said):
            raise problem if isinstance(problem, KernelError) else AssertionError("it ran")
        for found in (first, last):
            assert isinstance(found, dict)
            assert found["out"].view("u4").tolist() == [5, 6, 7, 8]
