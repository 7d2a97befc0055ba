"""Adapters, devices, limits, pipelines, time, threads and folded grids."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any, cast

import numpy as np
import pytest

from shaderlm import ops
from shaderlm.errors import DeviceError, InputError, KernelError, RouteError
from shaderlm.gpu import Adapter, Device, adapters, open_device, opening, preferred_adapter
from shaderlm.gpu.adapters import choose
from shaderlm.gpu.dawn.adapter import DawnAdapter
from shaderlm.gpu.device import FEATURES
from shaderlm.gpu.webgpu_h import LIMITS
from shaderlm.gpu.wgpu_native.adapter import WgpuAdapter
from shaderlm.graph import reference
from shaderlm.kernels import fold

from .compare import assert_close
from .gpu_programs import adding, program
from .weights import unpack_q4gsw

F32, F16 = np.float32, np.float16


def floats(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def native_features(device: Device) -> set[str]:
    """What the library says of a device."""
    native = cast("Any", device._native)
    features = (DawnAdapter if device.caps.implementation == "dawn" else WgpuAdapter).FEATURES
    has = native.lib.wgpuDeviceHasFeature
    return {name for name, feature in features.items() if has(native.handle, getattr(native.lib, feature))}


@pytest.fixture
def opened(pytestconfig: pytest.Config) -> Callable[..., Device]:
    """Opens the adapter that the tests run on, less something."""
    return lambda **less: open_device(pytestconfig.getoption("--device"), **less)


def forget_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no device had been opened yet."""
    for name in ("_open", "_chosen"):
        monkeypatch.setattr(opening, name, {})


# Choice --------------------------------------------------------------------------------------------------


def test_adapters_come_best_first() -> None:
    found = [adapter.caps for adapter in adapters()]
    software = [caps.software for caps in found]
    assert software == sorted(software)
    for kind in (True, False):
        opengl = [caps.backend == "OpenGL" for caps in found if caps.software is kind]
        assert opengl == sorted(opengl), "the last resort of its kind"
    best = preferred_adapter()
    assert best is not None
    assert choose(None).caps == choose("auto").caps == best.caps == found[0]


def test_choice_by_number_kind_and_name() -> None:
    found = [adapter.caps for adapter in adapters()]
    for i, caps in enumerate(found):
        assert choose(str(i)).caps == caps
        assert choose(f" {i} ").caps == caps
        assert choose(caps.kind).caps == next(other for other in found if other.kind == caps.kind)
        for spec in (caps.name, caps.name.upper(), caps.name[1:-1], f"{caps.name} {caps.backend}"):
            assert spec.lower() in f"{choose(spec).caps.name} {choose(spec).caps.backend}".lower()


@pytest.mark.parametrize("spec", ["unobtainium 9000", "99", "-1", "1.0", " ", "²"])
def test_an_unknown_name_lists_what_was_found(spec: str) -> None:
    with pytest.raises(DeviceError) as caught:
        open_device(spec)
    for adapter in adapters():
        assert adapter.caps.name in str(caught.value)
    assert repr(spec) in str(caught.value)


def test_no_name_means_the_same_before_and_after_a_device_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> str:
        try:
            return open_device("").caps.name
        except DeviceError:
            return "refused"

    forget_devices(monkeypatch)
    before = answer()
    forget_devices(monkeypatch)
    open_device()
    assert answer() == before


def test_names_of_one_adapter_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_devices(monkeypatch)
    first = open_device()
    assert open_device("auto") is first
    assert open_device("0") is first
    assert open_device(first.caps.name) is first


def test_two_adapters_of_one_model_are_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal cards have equal caps; the second number must not give the first card."""
    one, other = (copy(adapters()[0].native) for _ in range(2))
    other.key = ("modern", 99)
    twins = [Adapter(native.caps, native) for native in (one, other)]
    monkeypatch.setattr(sys.modules[choose.__module__], "_modern", lambda *_: twins)
    monkeypatch.setattr(sys.modules[choose.__module__], "adapters", lambda *_: twins)
    forget_devices(monkeypatch)
    assert open_device("1") is not open_device("0")


# Features and limits -------------------------------------------------------------------------------------


def test_without_switches_features_off(opened: Callable[..., Device], device: Device) -> None:
    bare = opened(without=("subgroups", "f16", "timestamps"))
    assert (bare.caps.subgroups, bare.caps.f16, bare.caps.timestamps) == (False, False, False)
    assert not native_features(bare) & {"subgroups", "f16", "timestamps"}
    assert native_features(device) == {name for name in FEATURES if getattr(device.caps, name)}
    bound = bare.bind(program(adding("no timestamps")))
    with pytest.raises(DeviceError, match="no timestamp queries"):
        bare.time([bound])
    bound.release()
    one = opened(without=("timestamps",))
    assert (one.caps.subgroups, one.caps.f16) == (device.caps.subgroups, device.caps.f16)
    assert ops.rms_norm(floats(0, 2, 8), None, device=bare).shape == (2, 8)


@pytest.mark.parametrize(
    "less",
    [
        {"without": ("f17",)},
        {"without": ("max_binding",)},
        {"without": "f16"},
        {"limits": {"max_bindings": 1}},
        {"limits": {"f16": 1}},
        {"limits": {"max_binding": -1}},
    ],
    ids=str,
)
def test_an_unknown_feature_or_limit_is_refused(less: dict[str, Any], opened: Callable[..., Device]) -> None:
    with pytest.raises(DeviceError):
        opened(**less)


def test_limits_are_those_of_the_native_device(opened: Callable[..., Device], device: Device) -> None:
    limits = {"max_binding": 1 << 18, "max_buffer": 1 << 20, "max_workgroups": 9, "max_invocations": 64}
    limits |= {"max_workgroup_memory": 4096, "max_storage_buffers": 5}
    small = opened(limits=limits)
    native = cast("Any", small._native)
    found = native.ffi.new("WGPULimits *")
    native.lib.wgpuDeviceGetLimits(native.handle, found)
    for name, value in limits.items():
        assert getattr(small.caps, name) == value
        if device.caps.implementation == "wgpu":  # Dawn grants WebGPU's default limits where lower ones are asked for
            assert getattr(found, LIMITS[name]) == value
    assert opened(limits={"max_binding": 1 << 62}).caps.max_binding == device.caps.max_binding


def test_lowered_limits_are_enforced(opened: Callable[..., Device]) -> None:
    limits = {"max_binding": 1 << 16, "max_buffer": 1 << 17, "max_workgroups": 7, "max_invocations": 32}
    small = opened(limits=limits)
    source = adding("limits")
    assert small.buffer(1 << 17).size == 1 << 17
    for nbytes in ((1 << 17) + 1, np.zeros((1 << 17) + 1, np.uint8)):
        with pytest.raises(DeviceError, match=r"131,073 bytes.*allows 131,072"):
            small.buffer(nbytes)
    assert small.run(program(source, nbytes=1 << 16))["out"].nbytes == 1 << 16
    small.run(program(source, (7, 7, 7)))
    with pytest.raises(DeviceError, match="adding"):
        small.run(program(source, (8, 1, 1)))
    small.run(program(adding("threads", threads="32u")))
    with pytest.raises(KernelError, match="adding"):
        small.run(program(adding("threads", threads="33u")))
    shape = {"tokens": 5, "K": 64, "N": 8, "device": small}
    reasons = {verdict.route: verdict.reason for verdict in ops.explain("linear", **shape)}
    assert "threads per workgroup, the limit is 32" in reasons["tile_shared"]


def test_workgroup_memory_is_a_reason_not_to_take_a_route(opened: Callable[..., Device]) -> None:
    """wgpu itself does not check this limit."""
    small = opened(limits={"max_workgroup_memory": 2048})
    verdicts = ops.explain("linear", tokens=5, K=64, N=8, device=small)
    reason = next(verdict.reason for verdict in verdicts if verdict.route == "tile_shared")
    assert "bytes of workgroup memory, the limit is 2,048" in reason
    with pytest.raises(RouteError, match="workgroup memory"):
        ops.linear(floats(0, 5, 64), floats(1, 8, 64), route="tile_shared", device=small)


def test_a_binding_above_the_limit_is_a_device_error(opened: Callable[..., Device]) -> None:
    small = opened(limits={"max_binding": 1 << 16})
    with pytest.raises(DeviceError, match="adding"):
        small.run(program(adding("binding"), nbytes=(1 << 16) + 4))


def test_too_few_storage_buffers_are_a_reason_not_to_take_a_route(opened: Callable[..., Device]) -> None:
    few = opened(limits={"max_storage_buffers": 4})
    assert ops.rms_norm(floats(0, 1, 4), floats(1, 4), device=few).shape == (1, 4)  # three of them
    with pytest.raises(RouteError, match="storage"):
        ops.add_rms_norm(floats(0, 1, 4), floats(1, 1, 4), floats(2, 4), device=few)  # five


@pytest.mark.parametrize("route", ["naive", "tile"])
def test_a_limit_that_is_no_multiple_of_16(route: str, opened: Callable[..., Device]) -> None:
    """Drivers report 2^31 − 4 and the like; buffers are padded to 16 bytes."""
    odd = opened(limits={"max_binding": 4092})
    weight, scales = ops.pack_q4gsw(floats(1, 342, 24) * 0.05, 8)  # 12 bytes a row: 341 rows are 4092 bytes
    x = floats(0, 1, 24)
    for n in (340, 341, 342):
        part, part_scales = weight[:n], np.ascontiguousarray(scales[:, :n])
        actual = ops.linear_q4gsw(x, part, part_scales, 8, route=route, device=odd)
        expected = reference.linear(x, unpack_q4gsw(part, part_scales, 8, 24))
        assert_close(actual, expected, "linear", f"linear_q4gsw/{route} N {n}")


def test_activations_up_to_a_limit_that_is_no_multiple_of_16(opened: Callable[..., Device]) -> None:
    """1023 values are exactly 4092 bytes: run, or refused as every shape that does not fit."""
    x = floats(0, 1, 1023)
    try:
        actual = ops.rms_norm(x, None, device=opened(limits={"max_binding": 4092}))
    except InputError as problem:
        assert "one binding holds" in str(problem)  # noqa: PT017  (one of two right answers)
    else:
        assert_close(actual, reference.rms_norm(x), "norm", "rms_norm at the limit")


# Pipelines, time, threads --------------------------------------------------------------------------------


def test_a_source_is_compiled_once(opened: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = opened(without=("f16",))
    compiled: list[str] = []
    inner = fresh._native.create_pipeline

    def counting(label: str, source: str, *given: Any) -> Any:
        compiled.append(source)
        return inner(label, source, *given)

    monkeypatch.setattr(fresh._native, "create_pipeline", counting)
    one, two = adding("one"), adding("two")
    assert fresh.run(program(one, steps=3))["out"].view(F32)[0] == 3.0
    assert fresh.run(program(one))["out"].view(F32)[0] == 1.0
    assert compiled == [one]
    fresh.run(program(two))
    assert compiled == [one, two]
    for rows in (1, 2, 3):
        ops.rms_norm(floats(0, rows, 12), None, device=fresh)
    assert len(compiled) == 3
    with pytest.raises(KernelError):
        fresh.run(program(adding("broken", "nothing")))
    assert fresh.run(program(one))["out"].view(F32)[0] == 1.0, "a broken kernel leaves the device usable"


@pytest.mark.parametrize(
    ("declared", "bound"),
    [
        ("@group(0) @binding(1) var<storage, read_write> out: array<f32>;", "1 storage"),
        ("@group(0) @binding(0) var<storage> out: array<f32>;", "0 read-only-storage"),
        ("var<private> out: array<f32, 1>;", "none"),
    ],
)
def test_bindings_that_do_not_match_the_source_are_refused(declared: str, bound: str, device: Device) -> None:
    """Dawn without validation would bind nothing, and read zeros."""
    source = f"{declared} @compute @workgroup_size(1) fn main() {{ _ = out[0]; }}"
    with pytest.raises(KernelError, match=f"kernel adding declares the bindings {bound}; bound are 0 storage"):
        device.run(program(source))


@pytest.mark.parametrize("clock", ["time", "time_wall"])
def test_time_is_positive_and_below_the_wall_clock(clock: str, device: Device) -> None:
    source = """
    @group(0) @binding(0) var<storage, read_write> out: array<f32>;
    @compute @workgroup_size(64)
    fn main(@builtin(global_invocation_id) id: vec3<u32>) {
        var sum = out[id.x];
        for (var i = 0u; i < 2000u; i = i + 1u) { sum = sum * 0.999 + 1.0; }
        out[id.x] = sum;
    }
    """
    bound = device.bind(program(source, (16, 1, 1), nbytes=4 * 16 * 64))
    measure = getattr(device, clock)
    measure([bound])  # compiles and warms up
    start = time.perf_counter()
    once = measure([bound])
    wall = time.perf_counter() - start
    one, sixteen = (min(measure([bound] * count) for _ in range(3)) for count in (1, 16))
    bound.release()
    assert 0 < once <= wall
    # The host's clock also counts the submission, which on a fast GPU is most of it.
    assert sixteen > (2 * one if clock == "time" else 0), f"one program {one:.6f} s, sixteen {sixteen:.6f} s"


def test_threads_share_a_device(device: Device) -> None:
    """Different ops and shapes from four threads at once; every result is checked."""

    def work(i: int) -> None:
        x, w = floats(i, 3, 32 + i), floats(100 + i, 5, 32 + i) * 0.1
        assert_close(ops.linear(x, w, device=device), reference.linear(x, w), "linear", f"thread {i}")
        assert_close(ops.rms_norm(x, None, device=device), reference.rms_norm(x), "norm", f"thread {i}")
        assert_close(ops.add(x, x, device=device), x + x, "pointwise", f"thread {i}")
        np.testing.assert_array_equal(ops.argmax(x, device=device), np.argmax(x, axis=-1))
        q, kv = floats(i, 1, 2, 3), floats(i + 1, 1, 2, 3)
        caches = np.zeros((2, 2 + i, 2, 3), F32)
        attended = ops.sdpa_kv(q, kv, kv, caches[0], caches[1], 0, device=device)
        assert_close(attended, kv, "attention", f"thread {i}")

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, i) for i in range(16)]:
            done.result()


def test_threads_open_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_devices(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: open_device(), range(8)))
    assert all(found is opened[0] for found in opened)


# Folded grids --------------------------------------------------------------------------------------------


def test_more_workgroups_than_a_side_holds(device: Device) -> None:
    """With the limits as they are; every kernel in a grid that folds early: test_kernels."""
    grid = fold(70_001, 65_535)
    assert grid == (35_001, 2, 1)
    x = floats(0, 70_001, 4)
    actual = ops.rms_norm(x, None, route="vec4", device=device)
    assert_close(actual, reference.rms_norm(x), "norm", "rms_norm/vec4 of 70,001 rows")


def test_grids_fold_on_a_small_device(small_device: Device) -> None:
    """At most 7 workgroups a side: 49 rows run, 50 are refused; 43 make a grid of 7 × 7, six too many."""
    for rows in (7, 8, 43, 49):
        x = floats(rows, rows, 20)
        assert_close(ops.rms_norm(x, None, device=small_device), reference.rms_norm(x), "norm", f"{rows} rows")
        np.testing.assert_array_equal(ops.argmax(x, device=small_device), np.argmax(x, axis=-1))
    with pytest.raises(RouteError, match=r"50 workgroups, the limit is 7"):
        ops.rms_norm(floats(0, 50, 20), None, device=small_device)


# Early -----------------------------------------------------------------------------------------------------------


def test_a_device_is_opened_early_once(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, device: Device
) -> None:
    """Whoever opens it afterwards gets the same; what does not exist is an error there."""
    spec = pytestconfig.getoption("--device") or device.caps.name
    forget_devices(monkeypatch)
    monkeypatch.setattr(opening, "_begun", set())
    made: list[Device] = []

    def counted(*given: Any, **named: Any) -> Device:
        made.append(Device(*given, **named))
        return made[-1]

    monkeypatch.setattr("shaderlm.gpu.device.Device", counted)
    for name in (spec, spec, "no such adapter", "cpu"):
        opening.begin_opening(name)
    assert open_device(spec) is open_device(spec)
    assert len(made) == 1
    with pytest.raises(DeviceError, match="no adapter matches"):
        open_device("no such adapter")
