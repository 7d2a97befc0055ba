"""What the libraries that implement webgpu.h have in common: its tables, and devices by native handles.

`CDevice` has everything of a `NativeDevice` that is the same C call in each library. A library's own module has the
rest: shaders, submission and mapping. Both are given as cffi gives them, `ffi` for types and `lib` for functions.

Every call that may be refused is followed by `check`. Recording is not: what is wrong with it comes out in `finish`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .native import Buffer, Dispatch, NativeError, Recorder, Use

if TYPE_CHECKING:
    from .program import Access, Array

KIND_OF_TYPE = {1: "discrete", 2: "integrated", 3: "software"}
BACKENDS = {1: "Null", 2: "WebGPU", 3: "D3D11", 4: "D3D12", 5: "Metal", 6: "Vulkan", 7: "OpenGL", 8: "OpenGLES"}
# By the number that PCI or Khronos gave.
VENDORS = {
    0x1002: "amd",
    0x106B: "apple",
    0x10DE: "nvidia",
    0x13B5: "arm",
    0x1414: "microsoft",
    0x14E4: "broadcom",
    0x1AE0: "google",
    0x5143: "qualcomm",
    0x8086: "intel",
    0x10005: "mesa",
}
# Metal and OpenGL have no instruction for dot products of bytes: compilers write four multiplications.
WITHOUT_DOT4 = ("Metal", "OpenGL", "OpenGLES")
# DeviceCaps' names for limits that may be lowered, and those of webgpu.h.
LIMITS = {
    "max_binding": "maxStorageBufferBindingSize",
    "max_buffer": "maxBufferSize",
    "max_workgroups": "maxComputeWorkgroupsPerDimension",
    "max_invocations": "maxComputeInvocationsPerWorkgroup",
    "max_workgroup_memory": "maxComputeWorkgroupStorageSize",
    "max_storage_buffers": "maxStorageBuffersPerShaderStage",
}
_ACCESS = {
    "read-only-storage": "WGPUBufferBindingType_ReadOnlyStorage",
    "storage": "WGPUBufferBindingType_Storage",
    "uniform": "WGPUBufferBindingType_Uniform",
}
_thread = threading.get_ident


def text(ffi: Any, view: Any) -> str:
    """A string of a library."""
    if view.data == ffi.NULL or view.length == 0:
        return ""
    return str(ffi.unpack(view.data, view.length).decode("utf-8", "replace"))


def put(ffi: Any, view: Any, string: str) -> Any:
    """A string for a library; what is returned must be kept until the call is over."""
    data = ffi.new("char[]", string.encode())
    view.data, view.length = data, len(data) - 1
    return data


def number(ffi: Any, pointer: Any) -> int:
    """The number that a callback was given as its user data."""
    return int(ffi.cast("uintptr_t", pointer))


def kind_of(adapter_type: int, name: str) -> str:
    """The kind of an adapter, as `DeviceCaps` has it."""
    if "llvmpipe" in name or "swiftshader" in name.lower():
        return "software"
    return KIND_OF_TYPE.get(adapter_type, "other")


def lower_limits(wanted: Any, limits: Any) -> None:
    """Limits of `DeviceCaps` into a WGPULimits that has all of an adapter's."""
    for cap, value in limits.items():
        setattr(wanted, LIMITS[cap], value)
    for axis in "XYZ":
        field = f"maxComputeWorkgroupSize{axis}"
        setattr(wanted, field, min(getattr(wanted, field), wanted.maxComputeInvocationsPerWorkgroup))


class State:
    """What callbacks tell about a device. A library calls them in the thread whose call is to blame.

    Callbacks are made once for the process and find their state by its number: a library may call one long after the
    Python object that asked for it has gone.
    """

    def __init__(self) -> None:
        self.errors: dict[int, NativeError] = {}  # the first of each thread
        self.lost: str | None = None
        self.number = next(_numbers)
        _states[self.number] = self

    def check(self) -> None:
        """Raise what the library said to this thread."""
        if self.errors:
            problem = self.errors.pop(_thread(), None)
            if problem is not None:
                raise problem

    def forget(self) -> None:
        """What the library said to this thread is known already."""
        self.errors.pop(_thread(), None)


_numbers = itertools.count(1)
_states: WeakValueDictionary[int, State] = WeakValueDictionary()


def state_of(number: int) -> State | None:
    """The state with this number, as long as its device is there."""
    return _states.get(number)


class NativeHandle:
    """An object of a library, released when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_release", "handle")

    def __init__(self, handle: Any, release: Callable[[Any], None]) -> None:
        self.handle, self._release = handle, release

    def __del__(self) -> None:
        release = getattr(self, "_release", None)  # Ctrl-C may come before it is there
        if release is not None:
            release(self.handle)


class CBuffer(Buffer):
    """Released when nothing refers to it any more; destroyed or not."""

    __slots__ = ("_release",)

    def __init__(self, device: Any, handle: Any, size: int, release: Callable[[Any], None]) -> None:
        super().__init__(device, handle, size)
        self._release = release

    def __del__(self) -> None:
        release = getattr(self, "_release", None)  # Ctrl-C may come before it is there
        if release is not None:
            release(self.handle)


class CPipeline(NativeHandle):
    """A compiled kernel, with the layout of its bindings."""

    __slots__ = ("layout",)

    def __init__(self, handle: Any, release: Callable[[Any], None], layout: NativeHandle) -> None:
        super().__init__(handle, release)
        self.layout = layout


class CPass(NativeHandle):
    """A compute pass that is open."""

    __slots__ = ("_lib",)

    def __init__(self, handle: Any, lib: Any) -> None:
        super().__init__(handle, lib.wgpuComputePassEncoderRelease)
        self._lib = lib

    def timestamp(self, queries: NativeHandle, index: int) -> None:
        """The GPU's clock here into a query."""
        self._lib.wgpuComputePassEncoderWriteTimestamp(self.handle, queries.handle, index)

    def end(self) -> None:
        """Nothing more in this pass."""
        self._lib.wgpuComputePassEncoderEnd(self.handle)


class CEncoder(NativeHandle):
    """Records a command buffer."""

    __slots__ = ("_device", "_ffi", "_lib")

    def __init__(self, handle: Any, device: CDevice) -> None:
        super().__init__(handle, device.lib.wgpuCommandEncoderRelease)
        self._device, self._ffi, self._lib = device, device.ffi, device.lib

    def begin_pass(self, timestamps: tuple[Any, int, int] | None = None) -> CPass:
        """Open a compute pass."""
        descriptor = self._ffi.NULL
        if timestamps is not None:
            queries, begin, end = timestamps
            writes = self._ffi.new("WGPUPassTimestampWrites *")
            writes.querySet = queries.handle
            writes.beginningOfPassWriteIndex, writes.endOfPassWriteIndex = begin, end
            descriptor = self._ffi.new("WGPUComputePassDescriptor *")
            descriptor.timestampWrites = writes
        return CPass(self._lib.wgpuCommandEncoderBeginComputePass(self.handle, descriptor), self._lib)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Bytes of a buffer into another one."""
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(
            self.handle, source.handle, source_offset, target.handle, target_offset, nbytes
        )

    def resolve(self, queries: NativeHandle, first: int, count: int, target: Buffer) -> None:
        """Ticks of queries into a buffer."""
        self._lib.wgpuCommandEncoderResolveQuerySet(self.handle, queries.handle, first, count, target.handle, 0)

    def finish(self) -> NativeHandle:
        """The command buffer."""
        finished = self._lib.wgpuCommandEncoderFinish(self.handle, self._ffi.NULL)
        made = NativeHandle(finished, self._lib.wgpuCommandBufferRelease)
        self._device.check()
        return made


class CDevice:
    """The part of a `NativeDevice` that is the same in each library."""

    def __init__(self, handle: Any, state: State, ffi: Any, lib: Any) -> None:
        self.ffi, self.lib, self.state = ffi, lib, state
        self.check = state.check
        self._owner = NativeHandle(handle, lib.wgpuDeviceRelease)
        self.handle = handle
        self._queue_owner = NativeHandle(lib.wgpuDeviceGetQueue(handle), lib.wgpuQueueRelease)
        self.queue = self._queue_owner.handle
        self.buffers_destroyed = 0
        self._layouts: dict[tuple[Access, ...], tuple[NativeHandle, NativeHandle]] = {}
        self._laying_out = threading.Lock()
        copied = lib.WGPUBufferUsage_CopySrc | lib.WGPUBufferUsage_CopyDst
        self._usage: dict[Use, int] = {
            "storage": lib.WGPUBufferUsage_Storage | lib.WGPUBufferUsage_Uniform | copied,
            "read_back": lib.WGPUBufferUsage_MapRead | lib.WGPUBufferUsage_CopyDst,
            "timestamps": lib.WGPUBufferUsage_QueryResolve | lib.WGPUBufferUsage_CopySrc,
        }

    @property
    def lost(self) -> str | None:
        """Why the device was lost."""
        return self.state.lost

    # buffers ---------------------------------------------------------------------------------------------

    def create_buffer(self, nbytes: int, use: Use) -> Buffer:
        """Zeros."""
        descriptor = self.ffi.new("WGPUBufferDescriptor *")
        descriptor.size, descriptor.usage = nbytes, self._usage[use]
        handle = self.lib.wgpuDeviceCreateBuffer(self.handle, descriptor)
        made = CBuffer(self, handle, nbytes, self.lib.wgpuBufferRelease)
        self.check()
        return made

    def destroy_buffer(self, handle: Any) -> None:
        """For `Buffer.destroy`."""
        self.buffers_destroyed += 1
        self.lib.wgpuBufferDestroy(handle)

    def write(self, buffer: Buffer, offset: int, data: Array) -> None:
        """A contiguous array into a buffer."""
        self.lib.wgpuQueueWriteBuffer(self.queue, buffer.handle, offset, self.ffi.from_buffer(data), data.nbytes)
        self.check()

    # pipelines -------------------------------------------------------------------------------------------

    def layout(self, accesses: tuple[Access, ...]) -> tuple[NativeHandle, NativeHandle]:
        """Bind group layout and pipeline layout; shared by all pipelines with these bindings."""
        with self._laying_out:
            if accesses not in self._layouts:
                self._layouts[accesses] = self._new_layout(accesses)
            return self._layouts[accesses]

    def _new_layout(self, accesses: tuple[Access, ...]) -> tuple[NativeHandle, NativeHandle]:
        ffi, lib = self.ffi, self.lib
        entries = ffi.new("WGPUBindGroupLayoutEntry[]", len(accesses))
        for i, access in enumerate(accesses):
            entries[i].binding, entries[i].visibility = i, lib.WGPUShaderStage_Compute
            entries[i].buffer.type = getattr(lib, _ACCESS[access])
        descriptor = ffi.new("WGPUBindGroupLayoutDescriptor *")
        descriptor.entryCount, descriptor.entries = len(accesses), entries
        layout = NativeHandle(
            lib.wgpuDeviceCreateBindGroupLayout(self.handle, descriptor), lib.wgpuBindGroupLayoutRelease
        )
        self.check()
        wanted = ffi.new("WGPUPipelineLayoutDescriptor *")
        one = ffi.new("WGPUBindGroupLayout[1]", [layout.handle])
        wanted.bindGroupLayoutCount, wanted.bindGroupLayouts = 1, one
        whole = NativeHandle(lib.wgpuDeviceCreatePipelineLayout(self.handle, wanted), lib.wgpuPipelineLayoutRelease)
        self.check()
        return layout, whole

    def shader_descriptor(self, label: str, source: str) -> tuple[Any, Any]:
        """A WGPUShaderModuleDescriptor, and what must be kept as long as it is used."""
        wgsl = self.ffi.new("WGPUShaderSourceWGSL *")
        wgsl.chain.sType = self.lib.WGPUSType_ShaderSourceWGSL
        descriptor = self.ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = self.ffi.cast("WGPUChainedStruct *", wgsl)
        return descriptor, (wgsl, put(self.ffi, wgsl.code, source), put(self.ffi, descriptor.label, label))

    def pipeline_descriptor(self, label: str, layout: NativeHandle, module: NativeHandle) -> tuple[Any, Any]:
        """A WGPUComputePipelineDescriptor, and what must be kept as long as it is used."""
        descriptor = self.ffi.new("WGPUComputePipelineDescriptor *")
        descriptor.layout, descriptor.compute.module = layout.handle, module.handle
        return descriptor, (
            put(self.ffi, descriptor.label, label),
            put(self.ffi, descriptor.compute.entryPoint, "main"),
        )

    def create_bind_group(self, pipeline: Any, ranges: Sequence[tuple[Buffer, int, int]]) -> Any:
        """Buffers for the bindings of a pipeline."""
        entries = self.ffi.new("WGPUBindGroupEntry[]", len(ranges))
        for i, (buffer, offset, size) in enumerate(ranges):
            entry = entries[i]
            entry.binding, entry.buffer, entry.offset, entry.size = i, buffer.handle, offset, size
        descriptor = self.ffi.new("WGPUBindGroupDescriptor *")
        descriptor.layout, descriptor.entryCount, descriptor.entries = pipeline.layout.handle, len(ranges), entries
        made = NativeHandle(self.lib.wgpuDeviceCreateBindGroup(self.handle, descriptor), self.lib.wgpuBindGroupRelease)
        self.check()
        return made

    # recording -------------------------------------------------------------------------------------------

    def recorder(self, dispatches: Sequence[Dispatch]) -> Recorder:
        """Records these dispatches, with handles looked up once: 2 to 3 µs each."""
        set_pipeline = self.lib.wgpuComputePassEncoderSetPipeline
        set_group = self.lib.wgpuComputePassEncoderSetBindGroup
        dispatch = self.lib.wgpuComputePassEncoderDispatchWorkgroups
        kept = tuple(dispatches)  # handles live as long as their owners
        handles = [(pipeline.handle, group.handle, *grid) for pipeline, group, grid in kept]
        nothing = self.ffi.NULL

        def record(compute_pass: CPass, _: Any = kept) -> None:
            encoder, last = compute_pass.handle, None
            for pipeline, group, x, y, z in handles:
                if pipeline is not last:
                    set_pipeline(encoder, pipeline)
                    last = pipeline
                set_group(encoder, 0, group, 0, nothing)
                dispatch(encoder, x, y, z)

        return record

    def create_encoder(self) -> CEncoder:
        """Begin a command buffer."""
        return CEncoder(self.lib.wgpuDeviceCreateCommandEncoder(self.handle, self.ffi.NULL), self)

    def create_query_set(self, count: int) -> NativeHandle:
        """Timestamps."""
        descriptor = self.ffi.new("WGPUQuerySetDescriptor *")
        descriptor.type, descriptor.count = self.lib.WGPUQueryType_Timestamp, count
        made = NativeHandle(self.lib.wgpuDeviceCreateQuerySet(self.handle, descriptor), self.lib.wgpuQuerySetRelease)
        self.check()
        return made
