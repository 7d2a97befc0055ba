"""Kernels with their parameters written into the source, without bindings for what is unbound, and without checks."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from wgpu.backends.wgpu_native import _api

from shaderlm.compile import lower
from shaderlm.errors import KernelError
from shaderlm.gpu import Device
from shaderlm.gpu.adapters import choose as choose_adapter
from shaderlm.graph import reference, resolve
from shaderlm.kernels import Kernel, choose, compose, shader_of

from .compare import assert_close
from .weights import make_weight

NEXT = Kernel("pointwise/next_position")


def test_numbers_take_the_place_of_parameters() -> None:
    shader = compose(NEXT, params={"by": 3})
    assert [name for name, _ in shader.bindings] == ["positions"]
    assert "positions[0] + 3u" in shader.source
    assert "params" not in shader.source.split("@compute")[1]


@pytest.mark.parametrize(
    ("params", "said"),
    [({}, "has the fields"), ({"by": 1, "to": 2}, "has the fields"), ({"by": 1.5, "x": 1}, "fields")],
)
def test_parameters_that_do_not_fit(params: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        compose(NEXT, params=params)


def test_numbers_that_wgsl_cannot_say() -> None:
    gpu = {"heads": 1, "kv_heads": 1, "rows": 1, "scale": float("inf")}
    with pytest.raises(KernelError, match="scale is inf"):
        compose(Kernel("attention/attention_decode_alone", ("shared/cache_f32",)), params=gpu)


def test_bindings_are_numbered_anew_without_what_is_absent() -> None:
    with pytest.raises(KernelError, match="no array 'bias' to leave out"):
        compose(NEXT, params={"by": 1}, unbound=["bias"])
    shader = compose(NEXT, unbound=["positions"])
    assert [name for name, _ in shader.bindings] == ["params"]
    assert "@binding(0) var<uniform> params" in shader.source


def product(device: Device, bias: bool, residual: bool) -> tuple[Any, Any]:
    """What a GPU would run for a small matrix, and the same in float64."""
    rng = np.random.default_rng(3)
    op = "linear_add" if residual else "linear"
    dims = resolve(op, {"M": 1, "K": 96, "N": 70, "format": "q4_0", "bias": bias})
    caps = replace(device.caps, kind="discrete")
    weight, dense = make_weight(rng, "q4_0", 70, 96)
    x = rng.standard_normal((1, 96)).astype(np.float32)
    added = rng.standard_normal((1, 70)).astype(np.float32) if residual else None
    more = rng.standard_normal(70).astype(np.float32) if bias else None
    route = choose(op, dims, caps, "gemv")
    for dispatch in route.launch_list(dims, caps).dispatches:
        bound = [name for name, _ in shader_of(dispatch).bindings]
        assert bound == ["x", "weight", "scales", *["bias"] * bias, *["residual"] * residual, "out"]
    operands = {"x": x, "weight": weight, "residual": added, "bias": more}
    program = lower(route, dims, caps, {name: array for name, array in operands.items() if array is not None})
    expected = reference.linear(x, dense)[0] + (0 if added is None else added[0]) + (0 if more is None else more)
    return device.run(program)["out"].view(np.float32), expected


@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, False), (False, True)])
def test_products_are_the_same(bias: bool, residual: bool, device: Device) -> None:
    actual, expected = product(device, bias, residual)
    assert_close(actual, expected, "linear", "written")


def test_without_checks(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native function is what makes the modules; where a wgpu does not have it, they are checked."""
    made: list[str] = []
    real = _api.libf.wgpuDeviceCreateShaderModuleTrusted

    def spy(*given: Any) -> Any:
        made.append("unchecked")
        return real(*given)

    monkeypatch.setattr(_api.libf, "wgpuDeviceCreateShaderModuleTrusted", spy)
    adapter = choose_adapter(pytestconfig.getoption("--device"))
    actual, expected = product(Device(adapter, checked=False), False, False)
    assert_close(actual, expected, "linear", "unchecked")
    assert made == ["unchecked"]
    monkeypatch.delattr(_api.libf, "wgpuDeviceCreateShaderModuleTrusted")
    again, _ = product(Device(adapter, checked=False), False, False)
    assert np.array_equal(again, actual)
    assert made == ["unchecked"]


def test_what_is_wrong_with_a_source_is_said_without_checks_too(pytestconfig: pytest.Config) -> None:
    device = Device(choose_adapter(pytestconfig.getoption("--device")), checked=False)
    program = lower(choose("add", dims := resolve("add", {"count": 4}), device.caps, None), dims, device.caps, {})
    step = replace(program.steps[0], source=program.steps[0].source.replace("fn main", "fn mian", 1))
    with pytest.raises(KernelError, match="does not compile"):
        device.compile([step])


def test_software_adapters_check_and_gpus_do_not(pytestconfig: pytest.Config) -> None:
    adapter = choose_adapter(pytestconfig.getoption("--device"))
    assert Device(adapter).checks == adapter.caps.software
    assert Device(adapter, checked=True).checks


# Objects that are not whole ----------------------------------------------------------------------------------


def test_an_object_that_ctrl_c_caught_half_made_is_forgotten_in_silence(device: Device) -> None:
    """wgpu's objects ask for what they have not got yet; Python would print that, and pytest makes it an error."""
    for kind in (_api.GPUBindGroup, _api.GPUBuffer, _api.GPUCommandEncoder, _api.GPUComputePipeline):
        half = kind.__new__(kind)
        del half
    gc.collect()
