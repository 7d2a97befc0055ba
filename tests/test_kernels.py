"""Kernel = float64 reference: every route of every op, on every case, planned for every kind of device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shaderlm.compile import lower
from shaderlm.errors import RouteError
from shaderlm.gpu import WEBGPU_DEFAULT, Device, DeviceCaps
from shaderlm.graph import resolve
from shaderlm.graph.batch import CONTEXTS
from shaderlm.kernels import Kernel, LaunchList, Route, all_routes, choose, routes_of, verdicts
from shaderlm.models.shapes import MODELS, ModelShape

from .cases import CASES, Case, make, result, tolerance
from .compare import assert_close
from .conftest import taken_for


def _plans(device: Device, plain_device: Device) -> dict[str, tuple[Device, DeviceCaps]]:
    """Ways to plan for this adapter: as if it were a GPU, as it is, and as the least that WebGPU grants."""
    least = {
        name: min(getattr(plain_device.caps, name), getattr(WEBGPU_DEFAULT, name))
        for name in ("max_binding", "max_buffer", "max_workgroups", "max_invocations", "max_workgroup_memory")
    }
    return {
        "as a GPU": (device, replace(device.caps, kind="discrete")),
        "as it is": (device, device.caps),
        "as the least GPU": (plain_device, replace(plain_device.caps, kind="discrete", **least)),
        "without dot4": (device, replace(device.caps, kind="integrated", dot4=False)),
    }


def _by_default(case: Case, caps: DeviceCaps) -> set[str]:
    """The routes that a device with these caps takes for this shape, in either precision."""
    found = set()
    for precision in ("exact", "fast"):
        with suppress(RouteError):
            found.add(choose(case.op, case.dims, caps, None, precision).name)
    return found


def unspecialised(route: Route, dims: dict[str, Any], caps: DeviceCaps) -> LaunchList:
    """With parameters and operands bound as software adapters have them: one kernel for all shapes."""
    found = route.launch_list(dims, caps)
    in_software = route.launch_list(dims, replace(caps, kind="software")).dispatches
    unbinds = any(each.unbound for each in in_software)
    shared = (replace(each, specialised=False, unbound=each.unbound if unbinds else ()) for each in found.dispatches)
    return replace(found, dispatches=tuple(shared))


_TAKEN_FLOPS = 2_000_000


@cache
def _small(op: str) -> Case | None:
    """A case of several workgroups that is quick: the ops with routes that are specialised have one."""

    def quick(case: Case) -> bool:
        d = case.dims
        return d.get("tokens") == 1 and d.get("N", 0) >= 64 and case.flops < 1e6

    return next((case for case in CASES if case.op == op and quick(case)), None)


def _runs(
    case: Case, device: Device, plain_device: Device, everything: bool = False
) -> Iterator[tuple[Route, str, Device, DeviceCaps]]:
    """Every route that applies, once per plan that makes a difference.

    Compiling takes a software adapter a second, so that `everything` is for --all. Otherwise kernels are specialised
    only where a GPU would take the route, and by all routes and plans for one case of each op; and the least GPU gets
    two formats and groups of one block: what it lacks matters to the kernels, not to the functions of a format. It and
    the one without dot4 get those shapes with one row that are below 1 MFLOP, which take several workgroups, stages
    and splits already. Shapes from 2 MFLOP on are there for the routes that some device takes for them: those alone
    run them.
    """
    everything = everything or case == _small(case.op)
    plans = _plans(device, plain_device)
    dims = case.dims
    large = dims.get("tokens") == 1 and case.flops > 1e6
    formats = {dims.get(name, "f32") for name in ("format", "cache")}
    if not everything and (large or not formats <= {"f32", "q4_0"} or dims.get("group_size", 32) > 32):
        del plans["as the least GPU"]
    if not everything and large:
        del plans["without dot4"]
    for route in routes_of(case.op):
        seen: list[LaunchList] = []
        for plan, (chosen, caps) in plans.items():
            if route.reason(case.dims, caps) is None:
                launch_list = route.launch_list(case.dims, caps)
                plain = launch_list if everything else unspecialised(route, case.dims, caps)
                if plain not in seen:
                    seen.append(plain)
                    taken = plan != "as the least GPU" and route.name in _by_default(case, caps)
                    if not everything and not taken and case.flops > _TAKEN_FLOPS:
                        continue
                    run = launch_list if taken else plain
                    yield replace(route, launch_list=lambda *_, run=run: run), plan, chosen, caps


def _param(case: Case, *, smoke: bool = False) -> Any:
    marks = [pytest.mark.xdist_group(case.group)]
    marks += [pytest.mark.long] * case.long + [pytest.mark.smoke] * smoke
    return pytest.param(case, id=case.name, marks=marks)


# Of each family the first case of an op.
_SMOKE_OPS = ("rms_norm_mul", "linear", "attention", "rope_kv_write", "silu_mul", "argmax", "sample")
_SMOKE = {op: next(case for case in CASES if case.op == op and not case.long) for op in _SMOKE_OPS}


@pytest.mark.parametrize("case", [_param(case, smoke=case == _SMOKE.get(case.op)) for case in CASES])
def test_routes_match_the_reference(
    case: Case, device: Device, plain_device: Device, pytestconfig: pytest.Config
) -> None:
    operands, expected = make(case)
    count = 0
    for route, plan, chosen, caps in _runs(case, device, plain_device, pytestconfig.getoption("--all")):
        raw = chosen.run(lower(route, case.dims, caps, operands))
        for name, wanted in expected.items():
            assert wanted is not None
            label = f"{case.op}/{route.name} {name} ({plan})"
            assert_close(result(case, name, raw[name], wanted), wanted, tolerance(case, route, name), label)
        count += 1
    assert count or (case.op == "matrix_chain" and not device.caps.subgroup_matrix), "no route ran"


def test_every_route_runs_somewhere(device: Device, plain_device: Device) -> None:
    """A route that no case reaches would be untested. f16 routes need an f16 device; Dawn compiles them.

    Those that need matrix units have tests of their own, which emulate them (test_matrix, test_attention_matrix).
    """
    short = [case for case in CASES if not case.long]
    reached = {(case.op, run[0].name) for case in short for run in _runs(case, device, plain_device)}
    declared = {
        (op, route.name)
        for op, routes in all_routes().items()
        for route in routes
        if route.exact or route.fast or device.caps.f16
    }
    if not device.caps.subgroup_matrix:
        declared -= {(op, "matrix") for op in ("linear", "linear_experts", "attention", "matrix_chain")}
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


@pytest.mark.parametrize("case", [_param(case) for case in _folding_cases()])
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
    for case in CASES:
        if case.op in ("linear", "attention", "add_rms_norm"):
            with suppress(RouteError):  # a prologue that only rounding routes have
                reached |= _variants(case.op, case.dims, caps)
    assert wanted - reached == set()
