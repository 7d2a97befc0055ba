"""Products by matrix units: staging, edges, formats, prologues and epilogues. Where a device has none, they are emulated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.formats.weight_formats import DEVICE_FORMATS
from shaderlm.gpu import Device, DeviceCaps, MatrixShape
from shaderlm.graph import resolve
from shaderlm.kernels import LaunchList, Route, choose, routes_of, shader_of
from shaderlm.kernels.linear import matrix
from shaderlm.kernels.linear.matrix import LaunchConfig

from .cases import Case, make
from .compare import assert_close
from .conftest import taken_for
from .tint import refused
from .weights import whole_k

SHAPE = MatrixShape("f16", "f32", 16, 16, 16)
SMALL = MatrixShape("f16", "f32", 8, 8, 8)
ROUTE: Route = next(route for route in routes_of("linear") if route.name == "matrix")


def with_units(caps: DeviceCaps, shape: MatrixShape = SHAPE, lanes: int = 32) -> DeviceCaps:
    """The capabilities of a GPU with matrix units."""
    more = {"kind": "discrete", "f16": True, "subgroups": True, "matrix_shapes": (shape,)}
    return replace(caps, **more, subgroup_min=lanes, subgroup_max=lanes)


def launches(config: LaunchConfig, dims: dict[str, Any], device: Device, shape: MatrixShape = SHAPE) -> LaunchList:
    """What is run: the device's own units, or their emulation, which needs no feature of the device."""
    if device.caps.subgroup_matrix:
        return matrix.launch_list_with(config, dims, device.caps)
    caps = with_units(device.caps, shape)
    found = matrix.launch_list_with(config, dims, caps, "shared/matrix_emulated")
    return found if device.caps.subgroups else replace(found)


def run(case: Case, config: LaunchConfig, device: Device, shape: MatrixShape = SHAPE) -> None:
    operands, expected = make(case)
    program = lower(ROUTE, case.dims, device.caps, operands, launch_list=launches(config, case.dims, device, shape))
    actual = device.run(program)["out"].view(np.float32)
    wanted = expected["out"]
    assert wanted is not None
    assert_close(actual[: wanted.size].reshape(wanted.shape), wanted, "linear f16, formats", f"{case.name} {config}")


def case_of(**given: Any) -> Case:
    return Case("linear", tuple(given.items()))


_SMALL = LaunchConfig(16, 32, 64, (1, 1, 2))


@pytest.mark.parametrize("kind", DEVICE_FORMATS)
def test_every_format(kind: str, device: Device) -> None:
    run(case_of(tokens=5, K=whole_k(96, kind), N=35, format=kind, bias=True), _SMALL, device)


def test_tint_compiles_every_kernel(device: Device) -> None:
    """Every format with every prologue and epilogue, and every tile, as devices with matrix units get them."""
    pytest.importorskip("wgpudawn", reason="Dawn's compiler is in the package wgpudawn")
    caps = replace(with_units(device.caps), implementation="dawn", max_workgroup_memory=48 << 10, max_invocations=1024)
    sources = {}
    for kind in DEVICE_FORMATS:
        for prologue, epilogue, batched, split in itertools.product(
            ("none", "rms_norm"), ("none", "add", "silu_mul"), (False, True), (1, 2)
        ):
            how = {"prologue": prologue, "epilogue": epilogue, "batched": batched, "bias": True}
            dims = resolve("linear", {"tokens": 16, "K": 512, "N": 64, "format": kind, **how})
            for dispatch in matrix.launch_list_with(replace(_SMALL, split=split), dims, caps).dispatches:
                shader = shader_of(dispatch, "dawn")
                sources[f"{kind} {dispatch.kernel.name} {how} {split}"] = shader.source
    for tiles in matrix.TILES.values():
        for config in tiles:
            dims = resolve("linear", {"tokens": 16, "K": 512, "N": 64, "format": "q4_0"})
            for dispatch in matrix.launch_list_with(config, dims, caps).dispatches:
                sources[f"{config} {dispatch.kernel.name}"] = shader_of(dispatch, "dawn").source
    once = {source: name for name, source in sources.items()}
    assert refused({name: source for source, name in once.items()}) == {}
