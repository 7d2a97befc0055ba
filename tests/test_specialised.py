"""Kernels whose parameters are constants of the source, without bindings for what is unbound, and without checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.errors import KernelError
from shaderlm.gpu import Device
from shaderlm.gpu.adapters import choose as choose_adapter
from shaderlm.graph import reference, resolve
from shaderlm.kernels import Kernel, Shader, choose, compose, shader_of
from shaderlm.kernels.wgsl import bound_once

from .compare import assert_close
from .policies import with_policy
from .weights import make_weight

COPY = Kernel("pointwise/copy_vec4")


def test_numbers_take_the_place_of_parameters() -> None:
    shader = compose(COPY, params={"count": 3})
    assert [name for name, _ in shader.bindings] == ["x", "out"]
    assert "if (index < 3u)" in shader.source
    assert "params" not in shader.source.split("@compute")[1]


@pytest.mark.parametrize(
    ("params", "said"),
    [({}, "has the fields"), ({"count": 1, "to": 2}, "has the fields"), ({"by": 1}, "fields")],
)
def test_parameters_that_do_not_fit(params: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        compose(COPY, params=params)


def test_numbers_that_wgsl_cannot_say() -> None:
    params = {"heads": 1, "kv_heads": 1, "scale": float("inf")}
    with pytest.raises(KernelError, match="scale is inf"):
        compose(Kernel("attention/attention_tile", ("shared/cache_f32",)), params=params)


def test_bindings_are_numbered_anew_without_what_is_unbound() -> None:
    with pytest.raises(KernelError, match="no array 'bias' to leave out"):
        compose(COPY, params={"count": 1}, unbound=["bias"])
    shader = compose(COPY, unbound=["x"])
    assert [name for name, _ in shader.bindings] == ["out", "params"]
    assert "@binding(0) var<storage, read_write> out" in shader.source
    assert "@binding(1) var<uniform> params" in shader.source


def bindings_of(path: str, buffers: dict[str, str]) -> tuple[list[str], str]:
    """Names of the bindings of a kernel, and its source, where some of its operands are the same buffers."""
    shader = compose(Kernel(path))
    found = bound_once(shader, tuple(buffers.get(name, name) for name, _ in shader.bindings))
    assert found.source.count("@binding") == len(found.bindings)
    return [name for name, _ in found.bindings], found.source


def test_inputs_that_are_one_buffer_have_one_binding() -> None:
    apart, before = bindings_of("attention/rope_kv_write", {})
    assert apart[:3] == ["q", "k", "v"]
    assert before == compose(Kernel("attention/rope_kv_write")).source
    names, source = bindings_of("attention/rope_kv_write", {"k": "q", "v": "q"})
    assert names == [name for name in apart if name not in "kv"]
    assert "k[" not in source.replace("_k[", "")
    names, source = bindings_of("attention/rope_kv_write", {"v": "k"})
    assert names == [name for name in apart if name != "v"]
    # One buffer under two types, or one that is written, stays apart.
    assert bindings_of("attention/rope_kv_write", {"batch": "q"})[0] == apart
    assert bindings_of("attention/rope_kv_write", {"v_cache": "k_cache"})[0] == apart


def test_a_name_that_means_something_else_keeps_its_binding() -> None:
    text = """@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
const WG: u32 = 1u;
@compute @workgroup_size(WG)
fn main() {
    THERE
    out[0] = a[0] + b[0] + f32(arrayLength(&b));
}
"""
    bindings = (("a", "read-only-storage"), ("b", "read-only-storage"), ("out", "storage"))
    for there, kept in (("", ["a", "out"]), ("var b = array<f32, 1>(2.0);", ["a", "b", "out"])):
        shader = Shader(text.replace("THERE", there), False, cast(Any, bindings), (), 1, 0)
        found = bound_once(shader, ("x", "x", "y"))
        assert [name for name, _ in found.bindings] == kept
        assert ("a[0] + a[0] + f32(arrayLength(&a))" in found.source) == (not there)


def product(device: Device, bias: bool, residual: bool) -> tuple[Any, Any]:
    """What a GPU would run for a small matrix, and the same in float64."""
    rng = np.random.default_rng(3)
    epilogue = "add" if residual else "none"
    dims = resolve("linear", {"tokens": 1, "K": 96, "N": 70, "format": "q4_0", "bias": bias, "epilogue": epilogue})
    caps = replace(device.caps, kind="discrete")
    weight, dense = make_weight(rng, "q4_0", 70, 96)
    x = rng.standard_normal((1, 96)).astype(np.float32)
    added = rng.standard_normal((1, 70)).astype(np.float32) if residual else None
    more = rng.standard_normal(70).astype(np.float32) if bias else None
    route = choose("linear", dims, caps, "gemv")
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
    assert_close(actual, expected, "linear", "specialised")


def _checks_bounds(device: Device) -> bool:
    """Whether the implementation was told to keep its checks."""
    native = cast("Any", device._native)
    if device.caps.implementation == "wgpu":
        return bool(native._check_bounds)
    names = native.ffi.new("const char *[1000]")
    count = native.lib.wgpu_dawn_device_toggles(native.handle, names, len(names))
    return "disable_robustness" not in [native.ffi.string(names[i]).decode() for i in range(count)]


def test_without_checks(pytestconfig: pytest.Config) -> None:
    """The policy reaches the compiler, and the numbers are the same."""
    adapter = choose_adapter(pytestconfig.getoption("--device"))
    for checked in (False, True):
        device = Device(replace(adapter, caps=with_policy(adapter.caps, check_bounds=checked)))
        actual, expected = product(device, False, False)
        assert_close(actual, expected, "linear", f"checked: {checked}")
        assert _checks_bounds(device) == checked
        device.close()


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("fn main", "fn mian", "does not compile: there is no entry point main"),
        ("@compute", "", "does not compile: there is no entry point main"),
        ("-> u32", "-> u33", "does not compile"),
        ("}", "}}", "does not compile"),
    ],
)
def test_what_is_wrong_with_a_source_is_said_without_checks_too(
    written: str, instead: str, said: str, pytestconfig: pytest.Config
) -> None:
    adapter = choose_adapter(pytestconfig.getoption("--device"))
    device = Device(replace(adapter, caps=with_policy(adapter.caps, check_bounds=False)))
    program = lower(choose("add", dims := resolve("add", {"count": 4}), device.caps, None), dims, device.caps, {})
    assert written in program.steps[0].source
    step = replace(program.steps[0], source=program.steps[0].source.replace(written, instead, 1))
    with pytest.raises(KernelError, match=said):
        device.compile([step])
    device.close()


def test_software_adapters_check_and_gpus_do_not(pytestconfig: pytest.Config) -> None:
    adapter = choose_adapter(pytestconfig.getoption("--device"))
    assert Device(adapter).caps.policy.check_bounds == adapter.caps.software
