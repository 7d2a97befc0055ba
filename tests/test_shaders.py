"""Every shader under the front ends of both implementations, naga and Tint, without the back end of a driver.

A front end takes milliseconds where a software driver takes seconds. naga reads what the adapter of the tests can be
given. Tint is asked through Dawn's null adapter, which has every feature and runs nothing: so it also reads shaders
that need f16 or products of matrices, which software adapters do not have.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shaderlm.engine.planning import LARGE_GPU
from shaderlm.gpu import WEBGPU_DEFAULT, Device, DeviceCaps, MatrixShape
from shaderlm.gpu.webgpu_h import NativeError
from shaderlm.kernels import Kernel, LaunchList, Route, compose
from shaderlm.kernels.route import shader_of

from .cases import CASES, LONG_FLOPS
from .front_ends import read_shader
from .kernel_runs import every_run, unspecialised
from .test_kernels import ROUTES, is_left_out

_BROWSER = replace(WEBGPU_DEFAULT, implementation="dawn")
_SHAPES = tuple(
    MatrixShape(component, result, 16, n, k)
    for component, result, k in (("f16", "f32", 16), ("f16", "f16", 16), ("i8", "i32", 32), ("u8", "u32", 32))
    for n in (16, 8)
)
_LARGE = replace(LARGE_GPU, implementation="dawn", f16=True, subgroups=True)
_UNITS = replace(_LARGE, subgroup_min=32, subgroup_max=32)
CAPS = {
    "browsers": [replace(_BROWSER, subgroups=True)],
    "browsers without subgroups": [
        _BROWSER,
        replace(_BROWSER, kind="software"),
        replace(_BROWSER, dot4=False),
        replace(_BROWSER, f16=True),
    ],
    "large GPUs": [_LARGE],
    "matrix units": [
        replace(_UNITS, matrix_shapes=_SHAPES),
        replace(_UNITS, matrix_shapes=(MatrixShape("f16", "f32", 8, 8, 8),)),
    ],
}


def _for_dawn(route: Route, devices: Sequence[DeviceCaps]) -> dict[str, str]:
    """Every shader that these capabilities give to a route, and a case that has it.

    With specialised parameters every shape has shaders of its own: one of each kind will do.
    """
    found: dict[str, str] = {}
    cases = [case for case in CASES if case.op == route.op and case.flops <= LONG_FLOPS]
    for case, caps in itertools.product(cases, devices):
        if route.reason(case.dims, caps) is None:
            plain = _sources(unspecialised(route, case.dims, caps))
            if not plain <= found.keys():
                found |= dict.fromkeys(plain | _sources(route.launch_list(case.dims, caps)), case.name)
    return found


def _sources(launch_list: LaunchList) -> set[str]:
    return {shader_of(each, "dawn").source for each in launch_list.dispatches}


_were_read = set[tuple[Any, str]]()  # several devices and ops have the same


def _check(native: Any, shaders: Mapping[str, str]) -> None:
    """Read shaders, each with the name of a case that has it, once."""
    problems = []
    for source, label in shaders.items():
        if (native, source) in _were_read:
            continue
        try:
            read_shader(native, label, source)
            _were_read.add((native, source))
        except NativeError as problem:
            problems.append(f"{label}: {problem}")
    assert not problems, f"{len(problems)} of {len(shaders)} shaders:\n" + "\n".join(problems[:20])


@pytest.mark.smoke
@pytest.mark.parametrize(("op", "route"), ROUTES)
def test_naga_reads_every_shader(op: str, route: Route, device: Device, plain_device: Device) -> None:
    """On Dawn this is Tint. The device without subgroups refuses shaders that use them."""
    runs = every_run(op, route.name, device, plain_device)
    for each in (device, plain_device):
        _check(each._native, {source: run.label for run in runs if run.device is each for _, source in run.shaders()})
    assert runs or is_left_out(route, device.caps), "no case has it"


@pytest.mark.smoke
def test_naga_refuses_a_shader_that_is_wrong(device: Device) -> None:
    with pytest.raises(NativeError, match="b"):
        read_shader(device._native, "wrong", "@compute @workgroup_size(1) fn main() { let a = b; }")


@pytest.mark.smoke
@pytest.mark.dawn
@pytest.mark.parametrize("devices", [name for name in CAPS if name != "matrix units"])
@pytest.mark.parametrize(("op", "route"), [each for each in ROUTES if "/matrix" not in str(each.id)])
def test_tint_reads_every_shader(op: str, route: Route, devices: str, null: Any) -> None:
    shaders = _for_dawn(route, CAPS[devices])
    if not shaders and devices == "large GPUs":
        shaders = _for_dawn(route, [_UNITS])  # it wants to know how many lanes a subgroup has
    _check(null, shaders)
    assert shaders or devices != "large GPUs", "no case has it"


@pytest.mark.smoke
@pytest.mark.dawn
@pytest.mark.parametrize(("op", "route"), [each for each in ROUTES if "/matrix" in str(each.id)])
def test_tint_reads_every_shader_of_matrix_units(op: str, route: Route, null: Any) -> None:
    shaders = _for_dawn(route, CAPS["matrix units"])
    _check(null, shaders)
    assert shaders, "no case has it"


@pytest.mark.dawn
def test_tint_refuses_a_shader_that_is_wrong(null: Any) -> None:
    with pytest.raises(NativeError, match="unresolved"):
        read_shader(null, "wrong", "@compute @workgroup_size(1) fn main() { let a = b; }")


MATRICES = """
const WG: u32 = 32u;
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
@group(0) @binding(0) var<storage, read> a: array<f16>;
@group(0) @binding(1) var<storage, read> b: array<f16>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(WG)
fn main() {
    let left = subgroupMatrixLoad<Left, row_major>(&a, 0u, 16u);
    let right = subgroupMatrixLoad<Right, row_major>(&b, 0u, 16u);
    subgroupMatrixStore<row_major>(&out, 0u, subgroupMatrixMultiplyAccumulate(left, right, Result()), 16u);
}
"""


@pytest.mark.dawn
def test_products_of_matrices_are_enabled(null: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `needs` says puts the lines before a kernel that Dawn wants; without them it is refused."""
    monkeypatch.setattr("shaderlm.kernels.wgsl.read", lambda path: MATRICES)
    with_it, without = (
        compose(Kernel(name, needs=needs), target="dawn").source
        for name, needs in (("with", frozenset({"subgroup_matrix"})), ("without", frozenset({"f16"})))
    )
    read_shader(null, "matrices", with_it)
    with pytest.raises(NativeError, match="subgroup_matrix"):
        read_shader(null, "matrices", without)
