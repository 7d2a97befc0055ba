"""Kernel = float64 reference: every route of every op, on every case, planned for every kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shaderlm.gpu import WEBGPU_DEFAULT, Device, Facts
from shaderlm.kernels import Recipe, Route, all_routes, routes_of
from shaderlm.runtime import lower

from .cases import CASES, LONG_FLOPS, Case, make, result, tolerance
from .compare import assert_close


def _plans(device: Device, plain_device: Device) -> dict[str, tuple[Device, Facts]]:
    """Ways to plan for this adapter: as it is, as if it were a GPU, and as the least that WebGPU grants."""
    least = {
        name: min(getattr(plain_device.facts, name), getattr(WEBGPU_DEFAULT, name))
        for name in ("max_binding", "max_buffer", "max_workgroups", "max_invocations", "max_workgroup_memory")
    }
    return {
        "as it is": (device, device.facts),
        "as a GPU": (device, replace(device.facts, kind="discrete")),
        "as the least GPU": (plain_device, replace(plain_device.facts, kind="discrete", **least)),
        "as Metal": (device, replace(device.facts, kind="integrated", backend="Metal")),
    }


def _runs(case: Case, device: Device, plain_device: Device) -> Iterator[tuple[Route, str, Device, Facts]]:
    """Every route that applies, once per plan that makes a difference."""
    for route in routes_of(case.op):
        seen: list[Recipe] = []
        for plan, (chosen, facts) in _plans(device, plain_device).items():
            if route.reason(case.dims, facts) is None:
                recipe = route.recipe(case.dims, facts)
                if recipe not in seen:
                    seen.append(recipe)
                    yield route, plan, chosen, facts


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.long] if c.flops > LONG_FLOPS else []) for c in CASES],
)
def test_routes_match_the_reference(case: Case, device: Device, plain_device: Device) -> None:
    operands, expected = make(case)
    count = 0
    for route, plan, chosen, facts in _runs(case, device, plain_device):
        raw = chosen.run(lower(route, case.dims, facts, operands))
        for name, wanted in expected.items():
            assert wanted is not None
            label = f"{case.op}/{route.name} {name} ({plan})"
            assert_close(result(case, name, raw[name], wanted), wanted, tolerance(case, route, name), label)
        count += 1
    assert count, "no route ran"


def test_every_route_runs_somewhere(device: Device, plain_device: Device) -> None:
    """A route that no case reaches would be untested. f16 routes need an f16 device; Dawn compiles them."""
    short = [case for case in CASES if case.flops <= LONG_FLOPS]
    reached = {(case.op, run[0].name) for case in short for run in _runs(case, device, plain_device)}
    declared = {
        (op, route.name) for op, routes in all_routes().items() for route in routes if route.exact or device.facts.f16
    }
    assert declared - reached == set()
