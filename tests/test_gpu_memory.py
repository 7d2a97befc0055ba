"""Read-backs, parts of buffers, kernels that do not compile, lanes, and threads that wait."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shaderlm.errors import DeviceError, KernelError, MemoryFullError
from shaderlm.gpu import Array, Buffer, Copy, Device, PendingReadBack, Program, Slot, Step, webgpu_h
from shaderlm.gpu.adapters import choose
from shaderlm.gpu.caps import WEBGPU_DEFAULT
from shaderlm.gpu.lanes import judge
from shaderlm.gpu.pipelines import workgroup_size
from shaderlm.gpu.webgpu_h import NativeError, NativeMemoryError, State, put
from shaderlm.gpu.wgpu_native import library
from shaderlm.gpu.wgpu_native.bindings import ffi

from .gpu_programs import adding, number, program, uses
from .policies import with_policy


@pytest.fixture
def own(pytestconfig: pytest.Config) -> Iterator[Device]:
    """A device of the test's own, to close or to lose."""
    with Device(choose(pytestconfig.getoption("--device"))) as device:
        yield device


# Read-backs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4, 16, 20, 4096, 500_004, (2 << 20) + 3])
def test_read_backs_have_any_size(nbytes: int, device: Device) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffer = device.buffer(data)
    for _ in range(3):
        pending = device.submit([], (buffer, nbytes))
        assert pending is not None
        np.testing.assert_array_equal(pending.wait(), data)
    buffer.destroy()


def test_a_region_is_read_back(device: Device) -> None:
    buffer = device.buffer(np.arange(1000, dtype=np.uint32))
    pending = device.submit([], (buffer, 12, 400))
    assert pending is not None
    assert pending.wait().view(np.uint32).tolist() == [100, 101, 102]
    assert device.read(buffer, 8, 40).view(np.uint32).tolist() == [10, 11]
    buffer.destroy()


def test_results_are_those_of_their_own_submission(own: Device) -> None:
    """Several under way, waited for out of order, of two sizes; their buffers are used again."""
    bound = own.bind(program(adding("several"), nbytes=64))
    out = bound.buffers["out"]
    for first in (1.0, 5.0):
        pending = [own.submit([bound], (out, 64 if i % 2 else 16)) for i in range(4)]
        assert {i: number(pending[i]) for i in (0, 2, 1, 3)} == {i: first + i for i in range(4)}
    free = own._queue.ring._free  # what opening a device asks has other sizes
    assert {size: len(free[size]) for size in (16, 64)} == {16: 2, 64: 2}


def test_what_nobody_waits_for_is_used_again(own: Device) -> None:
    """Discarded, or forgotten: a generation that ends by a stop token leaves one behind."""
    bound = own.bind(program(adding("discarded")))
    out, ring = bound.buffers["out"], own._queue.ring
    made = list[Buffer]()
    create = own._native.create_buffer

    def created(*given: Any) -> Buffer:
        made.append(create(*given))
        return made[-1]

    cast("Any", own._native).create_buffer = created
    for i in range(20):
        discarded = own.submit([bound], (out, 16))
        assert discarded is not None
        if i % 2:
            discarded.discard()
            discarded.discard()
        del discarded
        gc.collect()
        assert number(own.submit([bound], (out, 16))) == 2.0 * i + 2
    assert len(made) <= 3, "none is made for each that was discarded"
    assert set(library.mapped) <= {number for _, number in ring._discarded}
    assert sum(map(len, ring._free.values())) + len(ring._discarded) == len(made)


def test_a_pending_read_back_is_read_once(device: Device) -> None:
    bound = device.bind(program(adding("once")))
    for finish in (PendingReadBack.wait, PendingReadBack.discard):
        pending = device.submit([bound], (bound.buffers["out"], 16))
        assert pending is not None
        finish(pending)
        with pytest.raises(DeviceError, match="read back before, or discarded"):
            pending.wait()
    bound.release()


def test_a_mapping_that_fails_is_a_device_error(own: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = own.bind(program(adding("unmapped")))
    monkeypatch.setattr(own._native, "map", lambda staging, nbytes: 0)
    monkeypatch.setattr(sys.modules[type(own._native).__module__], "LATE_SECONDS", 0.01, raising=False)
    pending = own.submit([bound], (bound.buffers["out"], 16))
    assert pending is not None
    with pytest.raises(DeviceError, match="did not come back from the GPU: its buffer could not be mapped"):
        pending.wait()
    pending.discard()


def test_ctrl_c_in_a_callback_comes_later() -> None:
    """Python may deliver it there, where nothing can be raised: neither the mapping nor the signal is forgotten."""
    mapping, status = ffi.cast("void *", 987_654_321), 1

    def callback(mapping: Any, status: int) -> None:
        raise KeyboardInterrupt

    def delivered() -> None:
        try:
            callback(mapping, status)
        except KeyboardInterrupt as pressed:
            library._put_off(KeyboardInterrupt, pressed, cast("Any", pressed.__traceback__).tb_next)
        time.sleep(1)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell may have tests in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            delivered()
    finally:
        signal.signal(signal.SIGINT, before)
    assert library.mapped.pop(987_654_321) == 1


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (webgpu_h.NativeHandle, 2),
        (webgpu_h.Buffer, 3),
        (webgpu_h.Pipeline, 3),
        (webgpu_h.Pass, 2),
        (PendingReadBack, 4),
    ],
)
def test_ctrl_c_before_an_object_has_what_it_gives_back(
    kind: Callable[..., Any], arguments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may deliver it in the first line of `__init__`. What is deleted then prints nothing."""
    reports: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(repr(report.exc_value)))

    def interrupted(frame: Any, event: str, _: Any) -> None:
        if frame.f_code.co_name == "__init__" and event == "call":
            sys.setprofile(None)
            raise KeyboardInterrupt

    def make() -> None:
        sys.setprofile(interrupted)
        kind(*[None] * arguments)

    with pytest.raises(KeyboardInterrupt):
        make()
    gc.collect()
    assert reports == []


# Parts of buffers -------------------------------------------------------------------------------------------------

SUMS = """
@group(0) @binding(0) var<storage, read> a: array<u32>;
@group(0) @binding(1) var<storage, read> b: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(1) fn main() {
    out[0] = a[0] + b[0];
    out[1] = arrayLength(&a) * 1000u + arrayLength(&b);
}
"""


def test_a_binding_may_be_a_part_of_a_buffer(device: Device) -> None:
    step = device.caps.offset_alignment
    slots = (
        Slot("a", "read-only-storage", offset=step, size=64),
        Slot("a", "read-only-storage", offset=4 * step),
        Slot("out", "storage"),
    )
    contents: dict[str, Array | int] = {"a": np.arange(5 * step // 4, dtype=np.uint32), "out": 16}
    found = device.run(Program(contents, (Step("sums", SUMS, slots, (1, 1, 1)),), ("out",)))
    assert found["out"].view(np.uint32)[:2].tolist() == [step // 4 + step, 16_000 + step // 4]


def test_an_offset_that_a_device_does_not_allow_is_said_by_name(device: Device) -> None:
    slots = (Slot("a", "read-only-storage", offset=4), Slot("a", "read-only-storage"), Slot("out", "storage"))
    with pytest.raises(DeviceError, match=rf"sums binds a from byte 4; .* multiple of {device.caps.offset_alignment}"):
        device.bind(Program({"a": 1024, "out": 16}, (Step("sums", SUMS, slots, (1, 1, 1)),), ("out",)))


def test_copies_have_offsets_and_keep_their_order(device: Device) -> None:
    one, other = device.buffer(np.arange(8, dtype=np.uint32)), device.buffer(32)
    device.copy(Copy(one, other, 8, 4, 12), Copy(other, one, 4, 16, 0))
    assert device.read(other, 32).view(np.uint32).tolist() == [0, 0, 0, 1, 2, 0, 0, 0]
    assert device.read(one, 32).view(np.uint32).tolist() == [2, 1, 2, 3, 4, 5, 6, 7]
    # Within one buffer, which WebGPU does not allow: pages of a cache, and ranges that overlap.
    device.copy(Copy(one, one, 8, 0, 24), Copy(one, one, 16, 4, 8))
    assert device.read(one, 32).view(np.uint32).tolist() == [2, 1, 1, 2, 3, 4, 2, 1]
    for buffer in (one, other):
        buffer.destroy()


def test_a_copy_beyond_the_end_is_a_device_error(device: Device) -> None:
    one, other = device.buffer(16), device.buffer(16)
    with pytest.raises(DeviceError, match="a copy of 16 bytes from byte 4 on was asked for; the buffer has 16"):
        device.copy(Copy(one, other, 16, 0, 4))
    assert number(device.submit([], (one, 4))) == 0.0, "the device is as before"
    for buffer in (one, other):
        buffer.destroy()


def test_a_buffer_that_was_given_back_is_an_error(own: Device) -> None:
    """The library ends the process where it is submitted."""
    every = uses(own)
    own.caps = with_policy(own.caps, record_ahead=True)
    bound = own.bind(program(adding("given back")))
    pool = own.command_pool([bound], (bound.buffers["out"], 16))
    assert pool is not None
    assert number(own.submit_from(pool)) == 1.0
    bound.release()
    out = bound.buffers["out"]
    refused: list[Callable[[], object]] = [
        lambda: own.submit([bound]),
        lambda: own.submit_from(pool),
        lambda: own.bind(program(adding("given back")), {"out": out}),
        lambda: own.read(out, 4),
        lambda: own.write(out, np.zeros(1, np.uint32)),
        lambda: own.copy(Copy(out, out, 4, 0, 8)),
        lambda: own.submit([], (out, 4)),
    ]
    for use in refused:
        with pytest.raises(DeviceError, match="given back"):
            use()
    every["submit"]()


@pytest.mark.parametrize("refusal", [NativeMemoryError("Not enough memory left"), MemoryError()])
def test_a_full_memory_is_an_error_of_its_own(
    refusal: Exception, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are not: whoever closes something for a model closes nothing for those."""

    def refuse(*given: Any) -> None:
        raise refusal

    monkeypatch.setattr(device._native, "create_buffer", refuse)
    with pytest.raises(MemoryFullError, match="cannot allocate 16 bytes"):
        device.buffer(16)
    refusal = NativeError("the usage is wrong")
    with pytest.raises(DeviceError, match="the usage is wrong") as other:
        device.buffer(16)
    assert not isinstance(other.value, MemoryFullError)


@pytest.mark.parametrize(("kind", "expected"), [(2, NativeError), (3, NativeMemoryError)])
def test_a_library_says_that_memory_is_full(kind: int, expected: type[NativeError]) -> None:
    """By the type of the error, of webgpu.h."""
    state, words = State(), ffi.new("WGPUStringView *")
    owner = put(ffi, words, "it is refused")
    library.callbacks.on_error(ffi.NULL, kind, words[0], ffi.cast("void *", state.number), ffi.NULL)
    with pytest.raises(NativeError, match="it is refused") as found:
        state.check()
    assert type(found.value) is expected
    del owner


# Kernels ----------------------------------------------------------------------------------------------------------


def test_a_workgroup_that_is_too_large_is_said_by_name(device: Device) -> None:
    limit = device.caps.max_invocations
    source = f"const WG: u32 = {2 * limit}u;\n" + adding("large", threads="WG")
    said = rf"kernel adding has workgroups of {2 * limit} threads; .* allows {limit} threads"
    with pytest.raises(KernelError, match=said):
        device.run(program(source))


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ("@compute @workgroup_size(64u, 2)", "64 × 2"),
        ("const A : u32 = 8u;\nconst B = 4u;\n@compute @workgroup_size(A, B, 1u)", "8 × 4 × 1"),
        ("const A = B * 2u; @workgroup_size(A)", "A"),
        ("fn main() {}", "an unknown number of"),
    ],
)
def test_sizes_of_workgroups_are_read_from_the_source(source: str, size: str) -> None:
    assert workgroup_size(source) == size


def test_threads_that_want_one_kernel_compile_it_once(own: Device) -> None:
    compiled: list[str] = []
    inner = own._native.create_pipeline

    def slowly(label: str, source: str, *given: Any) -> Any:
        compiled.append(source)
        time.sleep(0.05)
        if "broken" in source and len(compiled) < 3:
            raise NativeError("no registers left")
        return inner(label, source, *given)

    cast("Any", own._native).create_pipeline = slowly
    said: list[str] = []

    def want(label: str) -> None:
        try:
            own.compile(program(adding(label)).steps)
        except KernelError as problem:
            said.append(str(problem))

    for label in ("shared", "broken"):
        threads = [threading.Thread(target=want, args=(label,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(compiled), len(said)) == (2, 4)
    want("broken")
    assert (len(compiled), len(said)) == (3, 4), "it may be tried again"


# Lanes ------------------------------------------------------------------------------------------------------------


def table(threads: int, size: int, lane: Callable[[int], int]) -> Any:
    return np.array([(lane(i), size) for i in range(threads)], np.uint32)


def test_lanes_are_judged_by_what_was_seen() -> None:
    neighbours = [table(64, 32, lambda i: i % 32), table(256, 16, lambda i: i % 16)]
    found = judge(neighbours)
    assert (found.smallest, found.largest, found.consecutive) == (16, 32, True)
    assert not judge([table(64, 32, lambda i: i // 2)]).consecutive
    assert not judge([neighbours[0], table(64, 32, lambda i: 31 - i % 32)]).consecutive
    mixed = table(64, 32, lambda i: i % 32)
    mixed[32:] = [(i % 16, 16) for i in range(32)]
    assert not judge([mixed]).consecutive


def test_kernels_use_subgroups_only_where_lanes_are_neighbours(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shaderlm.gpu import lanes

    adapter = choose(pytestconfig.getoption("--device"))
    probed = Device(adapter).caps
    if adapter.caps.subgroups:
        assert probed.subgroup_min == probed.subgroup_max > 1
    monkeypatch.setattr(lanes, "_known", {})
    monkeypatch.setattr(lanes, "probe", lambda device: lanes.Lanes(8, 16, False))
    scattered = Device(adapter).caps
    assert not scattered.subgroups
    if adapter.caps.subgroups:
        assert (scattered.subgroup_min, scattered.subgroup_max, scattered.subgroup_size) == (8, 16, 0)


@pytest.mark.parametrize(
    ("vendor", "reported", "found", "size", "least"),
    [
        ("", (32, 32), (32, 32), 32, 32), ("", (0, 0), (32, 32), 0, 4), ("intel", (8, 32), (16, 16), 0, 8),
        ("", (32, 32), (16, 16), 0, 16), ("", (4, 128), (8, 16), 0, 4), ("nvidia", (0, 0), (32, 32), 32, 32),
        ("apple", (4, 64), (32, 32), 32, 32), ("nvidia", (0, 0), (16, 32), 0, 4), ("amd", (32, 64), (64, 64), 0, 32),
    ],
)  # fmt: skip
def test_kernels_rely_on_a_subgroup_size_if_the_driver_has_no_other(
    vendor: str,
    reported: tuple[int, int],
    found: tuple[int, int],
    size: int,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shaderlm.gpu import lanes

    low, high = reported
    caps = replace(WEBGPU_DEFAULT, subgroups=True, vendor=vendor, subgroup_min=low, subgroup_max=high)
    monkeypatch.setattr(lanes, "_known", {("a", 0): lanes.Lanes(*found, True)})
    device = cast("Device", SimpleNamespace(caps=caps))
    probed = lanes.with_probed_lanes(device, ("a", 0))
    assert (probed.subgroup_size, probed.least_lanes) == (size, least)


# Threads ----------------------------------------------------------------------------------------------------------

SLOW = """
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    var sum = out[id.x % 4u];
    for (var i = 0u; i < 50000u; i = i + 1u) { sum = sum * 0.999 + 1.0; }
    out[id.x % 4u] = sum;
}
"""


def test_no_lock_is_held_while_a_thread_waits_for_the_gpu(device: Device) -> None:
    """Another thread writes, compiles and binds meanwhile. (wgpu-native itself lets nobody submit while one waits.)

    On a busy machine the thread that waits may be done first, so that one of several times will do.
    """
    assert any(_works_meanwhile(device, attempt) for attempt in range(4))


def _works_meanwhile(device: Device, attempt: int) -> bool:
    slow = device.bind(program(SLOW))
    started, ended = threading.Event(), threading.Event()

    def wait() -> None:
        pending = device.submit([slow] * 20, (slow.buffers["out"], 16))
        started.set()
        number(pending)
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    started.wait()
    quick = device.bind(program(adding(f"meanwhile {attempt}")))
    device.write(quick.buffers["out"], np.ones(4, np.float32))
    free, meanwhile = not device._queue._submitting.locked(), not ended.is_set()
    waiting.join()
    assert number(device.submit([quick], (quick.buffers["out"], 4))) == 2.0
    for bound in (slow, quick):
        bound.release()
    return free and meanwhile
