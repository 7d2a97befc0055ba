"""Kernel = float64 reference: every route of every op, on every case, planned for every kind of device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.compile import lower
from shaderlm.errors import RouteError
from shaderlm.gpu import WEBGPU_DEFAULT, Device, DeviceCaps
from shaderlm.graph import resolve
from shaderlm.graph.batch import CONTEXTS
from shaderlm.kernels import Kernel, Route, all_routes, choose, routes_of, verdicts
from shaderlm.models.shapes import MODELS, ModelShape

from .cases import CASES, Case, make, result, tolerance
from .compare import assert_close
from .conftest import taken_for
from .kernel_runs import Run, all_runs, default_runs, small_run, unspecialised
from .operands import Arrays
from .tiers import runs_all, runs_by_default


def _param(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[pytest.mark.xdist_group(case.group), pytest.mark.long])


def check(run: Run, raw: dict[str, NDArray[np.uint8]], expected: Arrays) -> None:
    """The outputs of a run are as expected."""
    for name, wanted in expected.items():
        assert wanted is not None
        label = f"{run.case.op}/{run.route.name} {name} ({run.plan})"
        assert_close(result(run.case, name, raw[name], wanted), wanted, tolerance(run.case, run.route, name), label)


@pytest.mark.parametrize("case", [_param(case) for case in CASES])
def test_routes_match_the_reference(
    case: Case, device: Device, plain_device: Device, pytestconfig: pytest.Config
) -> None:
    operands, expected = make(case)
    runs = list(all_runs(case, device, plain_device, pytestconfig.getoption("--all")))
    for run in runs:
        check(run, run.device.run(run.program(operands)), expected)
    assert runs or (case.op == "matrix_chain" and not device.caps.subgroup_matrix), "no route ran"


ROUTES = [
    pytest.param(op, route, id=f"{op}/{route.name}", marks=pytest.mark.xdist_group(f"kernels {op} {route.name}"))
    for op, routes in all_routes().items()
    for route in routes
]


def is_left_out(route: Route, caps: DeviceCaps) -> bool:
    """No case runs it here, because the device lacks f16 or matrix units. Those have tests of their own."""
    said = {route.reason(case.dims, replace(caps, kind="discrete")) for case in CASES if case.op == route.op}
    return any(words in (reason or "") for reason in said for words in ("needs f16", "no matrix units"))


def _runs(op: str, route: str, device: Device, plain_device: Device) -> list[Run]:
    return default_runs(op, route, device, plain_device, wide=device.caps.implementation == "wgpu")


def _check_all(runs: list[Run], route: Route, device: Device) -> None:
    for run in runs:
        operands, expected = make(run.case)
        check(run, run.device.run(run.program(operands)), expected)
    assert runs or is_left_out(route, device.caps), "no case ran"


@pytest.mark.smoke
@pytest.mark.parametrize(("op", "route"), ROUTES)
def test_one_run_of_every_route(op: str, route: Route, device: Device, plain_device: Device) -> None:
    """Those whose shaders take a software adapter seconds to compile are in the full tier.

    There it is a run of the cover: nothing else is compiled.
    """
    cover = [] if runs_by_default() else _runs(op, route.name, device, plain_device)
    _check_all(small_run(op, route.name, device, plain_device, cover), route, device)


def _smallest(op: str, wanted: Callable[[Case], bool]) -> Case:
    return min((case for case in CASES if case.op == op and wanted(case)), key=lambda case: case.flops)


def _check_first_run(case: Case, route: str, device: Device, plain_device: Device) -> None:
    run = next(all_runs(case, device, plain_device, route_name=route))
    operands, expected = make(case)
    check(run, run.device.run(run.program(operands)), expected)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", sorted({case.dims["format"] for case in CASES if case.op == "embedding"}))
def test_every_format_is_read(kind: str, device: Device, plain_device: Device) -> None:
    """By the kernel that compiles fastest: GPU dequantise = `formats`."""
    case = _smallest("embedding", lambda case: case.dims["format"] == kind)
    _check_first_run(case, "rows", device, plain_device)


@pytest.mark.smoke
def test_keys_within_a_window(device: Device, plain_device: Device) -> None:
    case = _smallest("attention", lambda case: bool(case.dims["window"]) and case.dims["tokens"] == 1)
    _check_first_run(case, "flash", device, plain_device)


@pytest.mark.parametrize(("op", "route"), ROUTES)
def test_a_cover_of_all_shaders(op: str, route: Route, device: Device, plain_device: Device) -> None:
    _check_all(_runs(op, route.name, device, plain_device), route, device)


def test_every_route_runs_somewhere(device: Device, plain_device: Device) -> None:
    """A route that no case reaches would be untested. f16 routes need an f16 device; Dawn compiles them.

    Those that need matrix units have tests of their own, which emulate them (test_matrix, test_attention_matrix).
    """
    declared = {(op, route.name) for op, routes in all_routes().items() for route in routes}
    if not device.caps.subgroup_matrix:
        products = ("linear", "linear_experts", "matrix_chain")
        attention = ("attention", "attention_reach", "attend_spans")
        declared -= {(op, "matrix") for op, _ in declared if op in products or op.endswith(attention)}
    reached = {(op, route) for op, route in declared if _runs(op, route, device, plain_device)}
    assert declared - reached == set()


@pytest.mark.parametrize(
    ("op", "more"), [*(("linear", {"epilogue": how}) for how in ("none", "add", "silu_mul")), ("linear_q4gsw", {})]
)
def test_an_adapter_on_the_cpu_gets_rows_and_a_gpu_does_not(op: str, more: dict[str, str]) -> None:
    for tokens, on_gpu in ((1, ("gemv", "gemv_packed")), (9, ("tile_shared",))):
        dims = resolve(op, {"tokens": tokens, "K": 64, "N": 64, **more})
        assert choose(op, dims, replace(WEBGPU_DEFAULT, kind="software"), None).name == "rows"
        assert choose(op, dims, WEBGPU_DEFAULT, None).name in on_gpu
        assert choose(op, dims, WEBGPU_DEFAULT, "rows").name == "rows", "named, it runs anywhere"
        said = verdicts(op, dims, replace(WEBGPU_DEFAULT, kind="software"))
        assert [(said[0].route, said[0].default)] == [("rows", True)]


def test_rows_of_images_are_attended_to_by_tiles_on_a_gpu() -> None:
    """A thread for each row and head would leave most of it idle; barriers cost a CPU more."""
    dims = resolve("attention_reach", {"tokens": 300, "Hq": 8, "Hkv": 4, "D": 256, "cache": "f16", "paged": True})
    gpu = replace(WEBGPU_DEFAULT, max_workgroup_memory=48 << 10)
    assert choose("attention_reach", dims, gpu, None).name == "tiles"
    assert choose("attention_reach", {**dims, "tokens": 4}, gpu, None).name == "rows"
    software = replace(gpu, kind="software", subgroups=True)
    assert choose("attention_reach", dims, software, None).name == "rows"


@pytest.mark.parametrize(
    ("op", "dims"),
    [
        ("concat", {"a": 64, "b": 192}),
        ("weighted_rows", {"tokens": 8, "N": 9, "K": 32, "taps": 1}),
        ("pad_columns", {"tokens": 8, "width": 20, "to": 32}),
    ],
)
def test_a_thread_moves_four_values_where_rows_are_whole_quads(op: str, dims: dict[str, int]) -> None:
    (dispatch,) = choose(op, dims, WEBGPU_DEFAULT, None).launch_list(dims, WEBGPU_DEFAULT).dispatches
    assert dispatch.params["count"] == 256 // 4
    assert dispatch.constants["value"] == "vec4<f32>"


@pytest.fixture(scope="module")
def folding_device(device: Device) -> Device:
    """At most 13 workgroups a side: nearly every grid folds. (A device that really allows no more: test_gpu_device.)"""
    return taken_for(device, kind="discrete", max_workgroups=13)


def _folding_cases() -> list[Case]:
    """For every kernel of every route, the smallest case whose grid does not fit 13 workgroups in a row."""
    caps = replace(WEBGPU_DEFAULT, max_workgroups=13, subgroups=True)
    chosen: dict[tuple[str, str], Case] = {}
    for case in sorted(CASES, key=lambda c: c.flops):
        for route in routes_of(case.op):
            if case.flops <= 30_000_000 and route.reason(case.dims, caps) is None:
                for dispatch in route.launch_list(case.dims, caps).dispatches:
                    if dispatch.workgroups > 13:
                        chosen.setdefault((route.name, dispatch.kernel.name), case)
    return list(dict.fromkeys(chosen.values()))


# To find them takes seconds of every worker, also where none is run.
@pytest.mark.parametrize("case", [_param(case) for case in (_folding_cases() if runs_all() else CASES[:1])])
def test_grids_fold(case: Case, folding_device: Device) -> None:
    operands, expected = make(case)
    caps = folding_device.caps
    count = 0
    for route in routes_of(case.op):
        if route.reason(case.dims, caps) is None:
            launch_list = unspecialised(route, case.dims, caps)
            program = lower(route, case.dims, caps, operands, launch_list=launch_list)
            assert max(side for step in program.steps for side in step.grid) <= 13
            raw = folding_device.run(program)
            for name, wanted in expected.items():
                assert wanted is not None
                label = f"{case.op}/{route.name} {name} (folded)"
                assert_close(result(case, name, raw[name], wanted), wanted, tolerance(case, route, name), label)
            count += 1
    assert count, "no route ran"


def test_tall_tiles(device: Device) -> None:
    """Tiles that only shapes of many GFLOP get by default, on a small one."""
    caps = replace(device.caps, kind="discrete", processors=4)
    (route,) = (each for each in routes_of("linear") if each.name == "tile_shared")
    (case,) = (case for case in CASES if case.op == "linear" and case.dims["tokens"] > 1024)
    small = Case("linear", tuple({**dict(case.given), "tokens": 131, "N": 70}.items()))
    (tall,), (short,) = (route.launch_list(each.dims, caps).dispatches for each in (case, small))
    assert (tall.constants["TM"], short.constants["TM"]) == (8, 4)
    launch_list = unspecialised(route, small.dims, caps)
    (dispatch,) = launch_list.dispatches
    dispatch = replace(dispatch, constants=tall.constants, workgroups=2 * 2)  # of 128 × 64
    operands, expected = make(small)
    run = Run(small, route, "tall tiles", device, caps, replace(launch_list, dispatches=(dispatch,)), taken=True)
    check(run, device.run(run.program(operands)), expected)


_OF_A_SHAPE = ("HAS_BIAS", "GROUP_BLOCKS")


def _variants(op: str, dims: dict[str, Any], caps: DeviceCaps) -> set[tuple[Kernel, frozenset[tuple[str, Any]]]]:
    """The specialised kernels that the default route launches; sizes that only a shape has are left out."""
    route = choose(op, dims, caps, None)
    return {
        (d.kernel, frozenset((k, v) for k, v in d.constants.items() if k not in _OF_A_SHAPE))
        for d in route.launch_list(dims, caps).dispatches
    }


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_what_a_model_launches_is_tested(model: ModelShape) -> None:
    """Every specialised kernel that a large GPU takes for this model is one that some case above reaches."""
    caps = replace(WEBGPU_DEFAULT, kind="discrete", subgroups=True, max_workgroup_memory=32 << 10)
    caps = replace(caps, max_binding=2**31 - 4, max_buffer=2**32 - 4)
    wanted: set[tuple[Kernel, frozenset[tuple[str, Any]]]] = set()
    for K, N in model.matrices.values():
        for tokens in (1, 128, 512):
            for epilogue in ("none", "add", "silu_mul"):
                dims = {"tokens": tokens, "K": K, "N": N, "format": "q4_0", "epilogue": epilogue}
                wanted |= _variants("linear", resolve("linear", dims), caps)
    heads = {"Hq": model.Hq, "Hkv": model.Hkv, "D": model.D}
    for tokens, context in itertools.product((1, 512), CONTEXTS):
        step = {"tokens": tokens, "context": context, "paged": tokens > 1}
        wanted |= _variants("attention", resolve("attention", {**heads, **step}), caps)
    for tokens in (1, 512):
        dims = resolve("add_rms_norm", {"tokens": tokens, "width": model.hidden})
        wanted |= _variants("add_rms_norm", dims, caps)
    reached: set[tuple[Kernel, frozenset[tuple[str, Any]]]] = set()
    # Small shapes have the tiles of large ones where there are few processors: `kernel_runs` imagines such devices.
    for case, processors in itertools.product(CASES, (0, 4, 1)):
        if case.op in ("linear", "attention", "add_rms_norm"):
            with suppress(RouteError):  # a prologue that only rounding routes have
                reached |= _variants(case.op, case.dims, replace(caps, processors=processors))
    assert wanted - reached == set()
