"""What the libraries that implement webgpu.h have in common: tables, callbacks, and objects by native handles.

`NativeAdapter`, `NativeDevice` and what they hand out are all that the rest of this package knows of a library. A
library's own sub-package (`wgpu_native`, `dawn`) has the rest: finding adapters, shaders, submission and mapping. Both
are given as cffi gives them, `ffi` for types and `lib` for functions. Pipelines, bind groups, query sets, command
buffers and submissions are opaque elsewhere: typed `Any` there. What a library refuses is a `NativeError`; `Device`
puts it into words for people.

Every call that may be refused is followed by `check`. Recording is not: what is wrong with it comes out in `finish`.
"""

from __future__ import annotations

import _thread
import itertools
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakValueDictionary

from ..errors import DeviceError
from .caps import DeviceCaps
from .drivers import DRIVERS, Drivers
from .processor_table import processors_of

if TYPE_CHECKING:
    from .program import Access, Array

Use = Literal["storage", "read_back", "timestamps"]
Dispatch = tuple[Any, Any, tuple[int, int, int]]  # pipeline, bind group, workgroups
Recorder = Callable[["Pass"], None]  # records dispatches into an open compute pass

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


class NativeError(Exception):
    """What an implementation says when it refuses something."""


class NativeMemoryError(NativeError):
    """There is no memory for it."""


_OUT_OF_MEMORY = 3  # WGPUErrorType_OutOfMemory of webgpu.h


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
            problem = self.errors.pop(threading.get_ident(), None)
            if problem is not None:
                raise problem

    def forget(self) -> None:
        """What the library said to this thread is known already."""
        self.errors.pop(threading.get_ident(), None)


_numbers = itertools.count(1)
_states: WeakValueDictionary[int, State] = WeakValueDictionary()


class Callbacks:
    """C functions that a library calls. They are made once for the process, and none is ever freed."""

    def __init__(self, ffi: Any) -> None:
        self.ffi = ffi
        self.answers: dict[int, tuple[int, Any, str]] = {}  # status, handle and message, by the number of a request
        self.on_device = self.answering("WGPURequestDeviceCallback")

        @self.declared("WGPUUncapturedErrorCallback")
        def on_error(_: Any, kind: int, message: Any, device: Any, __: Any) -> None:
            state = _states.get(number(ffi, device))
            if state is not None:
                words = "\n".join(line.rstrip() for line in text(ffi, message).strip().splitlines())
                if "device is lost" in words and state.lost is None:  # `on_lost` may come later, or not at all
                    state.lost = words.splitlines()[-1].strip()
                refusal = NativeMemoryError if kind == _OUT_OF_MEMORY else NativeError
                state.errors.setdefault(threading.get_ident(), refusal(words))

        @self.declared("WGPUDeviceLostCallback")
        def on_lost(_: Any, reason: int, message: Any, device: Any, __: Any) -> None:
            state = _states.get(number(ffi, device))
            if state is not None and state.lost is None:
                state.lost = text(ffi, message).strip() or "no reason was given"

        self.on_error, self.on_lost = on_error, on_lost

    def declared(self, kind: str) -> Callable[[Callable[..., None]], Any]:
        """A decorator: the C function of this type that calls a Python function."""
        wrap: Callable[[Callable[..., None]], Any] = self.ffi.callback(kind, onerror=put_off)
        return wrap

    def answering(self, kind: str) -> Any:
        """A callback for requests, which puts down what was answered."""

        @self.declared(kind)
        def on_answer(status: int, handle: Any, message: Any, request: Any, _: Any) -> None:
            self.answers[number(self.ffi, request)] = (status, handle, text(self.ffi, message))

        return on_answer


def put_off(kind: Any, value: Any, trace: Any) -> None:
    """A callback must not raise. Ctrl-C, which Python may deliver in any line, is delivered again outside of it."""
    if issubclass(kind, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        traceback.print_exception(kind, value, trace)


class NativeHandle:
    """An object of a library, released when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_release", "handle")

    def __init__(self, handle: Any, release: Callable[[Any], None]) -> None:
        self.handle, self._release = handle, release

    def __del__(self, drivers: Drivers = DRIVERS) -> None:  # an argument: this module may be gone by then
        release = getattr(self, "_release", None)  # Ctrl-C may come before it is there
        if release is not None and not drivers.forked:
            release(self.handle)


class Buffer(NativeHandle):
    """Memory of a device. It is given back by `destroy`, or when nothing refers to it any more."""

    __slots__ = ("_device", "destroyed", "size")

    def __init__(self, device: NativeDevice, handle: Any, size: int) -> None:
        super().__init__(handle, device.lib.wgpuBufferRelease)
        self._device, self.size, self.destroyed = device, size, False

    def __repr__(self) -> str:
        return f"<Buffer of {self.size:,} bytes{', destroyed' if self.destroyed else ''}>"

    def check(self) -> None:
        """It was not given back. An implementation may end the process where it is used then."""
        if self.destroyed:
            raise DeviceError(f"a buffer of {self.size:,} bytes was given back; it cannot be used any more")

    def destroy(self) -> None:
        """Give the memory back now. What was submitted before still finds it."""
        if not self.destroyed:
            self.destroyed = True
            self._device.destroy_buffer(self.handle)


class Pipeline(NativeHandle):
    """A compiled kernel, with the layout of its bindings."""

    __slots__ = ("layout",)

    def __init__(self, handle: Any, release: Callable[[Any], None], layout: NativeHandle) -> None:
        super().__init__(handle, release)
        self.layout = layout


class Pass(NativeHandle):
    """A compute pass that is open. Recorders are called with it."""

    __slots__ = ("_lib",)

    def __init__(self, handle: Any, lib: Any) -> None:
        super().__init__(handle, lib.wgpuComputePassEncoderRelease)
        self._lib = lib

    def timestamp(self, queries: NativeHandle, index: int) -> None:
        """The GPU's clock here, between two dispatches, into a query."""
        self._lib.wgpuComputePassEncoderWriteTimestamp(self.handle, queries.handle, index)

    def end(self) -> None:
        """Nothing more in this pass."""
        self._lib.wgpuComputePassEncoderEnd(self.handle)


class Encoder(NativeHandle):
    """Records a command buffer. Used by one thread at a time."""

    __slots__ = ("_device", "_ffi", "_lib")

    def __init__(self, handle: Any, device: NativeDevice) -> None:
        super().__init__(handle, device.lib.wgpuCommandEncoderRelease)
        self._device, self._ffi, self._lib = device, device.ffi, device.lib

    def begin_pass(self, timestamps: tuple[Any, int, int] | None = None) -> Pass:
        """Open a compute pass; `timestamps`: a query set, and its queries for the beginning and the end."""
        descriptor = self._ffi.NULL
        if timestamps is not None:
            queries, begin, end = timestamps
            writes = self._ffi.new("WGPUPassTimestampWrites *")
            writes.querySet = queries.handle
            writes.beginningOfPassWriteIndex, writes.endOfPassWriteIndex = begin, end
            descriptor = self._ffi.new("WGPUComputePassDescriptor *")
            descriptor.timestampWrites = writes
        return Pass(self._lib.wgpuCommandEncoderBeginComputePass(self.handle, descriptor), self._lib)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Bytes of a buffer into another one. Offsets and size are multiples of 4."""
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(
            self.handle, source.handle, source_offset, target.handle, target_offset, nbytes
        )

    def resolve(self, queries: NativeHandle, first: int, count: int, target: Buffer) -> None:
        """Ticks of queries (uint64) to the beginning of a buffer whose use is "timestamps"."""
        self._lib.wgpuCommandEncoderResolveQuerySet(self.handle, queries.handle, first, count, target.handle, 0)

    def finish(self) -> NativeHandle:
        """The command buffer; it can be submitted once. What is wrong with what was recorded is raised here."""
        commands = self._lib.wgpuCommandEncoderFinish(self.handle, self._ffi.NULL)
        return self._device.checked(commands, self._lib.wgpuCommandBufferRelease)


class NativeDevice(ABC):
    """One open device of an implementation. Several threads may use it.

    `submit` and `map` share structures that are kept between calls: `Device` calls these two under one lock.
    """

    tick_ns: float  # of a timestamp

    def __init__(self, handle: Any, state: State, ffi: Any, lib: Any) -> None:
        self.ffi, self.lib, self.state = ffi, lib, state
        self.check = state.check
        self._owner = NativeHandle(handle, lib.wgpuDeviceRelease)
        self.handle = handle
        self._queue_owner = NativeHandle(lib.wgpuDeviceGetQueue(handle), lib.wgpuQueueRelease)
        self.queue = self._queue_owner.handle
        self.buffers_destroyed = 0  # changes whenever a buffer is destroyed
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
        """Why the device was lost; None as long as it is not known to be."""
        return self.state.lost

    def checked(self, handle: Any, release: Callable[[Any], None]) -> NativeHandle:
        """What a call made, unless the library refused the call."""
        owner = NativeHandle(handle, release)
        self.check()
        return owner

    # buffers ---------------------------------------------------------------------------------------------

    def create_buffer(self, nbytes: int, use: Use) -> Buffer:
        """Zeros."""
        descriptor = self.ffi.new("WGPUBufferDescriptor *")
        descriptor.size, descriptor.usage = nbytes, self._usage[use]
        handle = self.lib.wgpuDeviceCreateBuffer(self.handle, descriptor)
        buffer = Buffer(self, handle, nbytes)
        self.check()
        return buffer

    def destroy_buffer(self, handle: Any) -> None:
        """For `Buffer.destroy`."""
        self.buffers_destroyed += 1
        self.lib.wgpuBufferDestroy(handle)

    def write(self, buffer: Buffer, offset: int, data: Array) -> None:
        """A contiguous array into a buffer, before everything that is submitted later."""
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
        handle = lib.wgpuDeviceCreateBindGroupLayout(self.handle, descriptor)
        layout = self.checked(handle, lib.wgpuBindGroupLayoutRelease)
        descriptor = ffi.new("WGPUPipelineLayoutDescriptor *")
        groups = ffi.new("WGPUBindGroupLayout[1]", [layout.handle])
        descriptor.bindGroupLayoutCount, descriptor.bindGroupLayouts = 1, groups
        handle = lib.wgpuDeviceCreatePipelineLayout(self.handle, descriptor)
        return layout, self.checked(handle, lib.wgpuPipelineLayoutRelease)

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
        """Buffers, offsets and sizes for the bindings of a pipeline."""
        entries = self.ffi.new("WGPUBindGroupEntry[]", len(ranges))
        for i, (buffer, offset, size) in enumerate(ranges):
            entry = entries[i]
            entry.binding, entry.buffer, entry.offset, entry.size = i, buffer.handle, offset, size
        descriptor = self.ffi.new("WGPUBindGroupDescriptor *")
        descriptor.layout, descriptor.entryCount, descriptor.entries = pipeline.layout.handle, len(ranges), entries
        group = self.lib.wgpuDeviceCreateBindGroup(self.handle, descriptor)
        return self.checked(group, self.lib.wgpuBindGroupRelease)

    # recording -------------------------------------------------------------------------------------------

    def recorder(self, dispatches: Sequence[Dispatch]) -> Recorder:
        """Records these dispatches as often as it is called, with handles looked up once: 2 to 3 µs each."""
        set_pipeline = self.lib.wgpuComputePassEncoderSetPipeline
        set_group = self.lib.wgpuComputePassEncoderSetBindGroup
        dispatch = self.lib.wgpuComputePassEncoderDispatchWorkgroups
        owners = tuple(dispatches)  # handles live as long as their owners
        handles = [(pipeline.handle, group.handle, *grid) for pipeline, group, grid in owners]
        nothing = self.ffi.NULL

        def record(compute_pass: Pass, _: Any = owners) -> None:
            encoder, last = compute_pass.handle, None
            for pipeline, group, x, y, z in handles:
                if pipeline is not last:
                    set_pipeline(encoder, pipeline)
                    last = pipeline
                set_group(encoder, 0, group, 0, nothing)
                dispatch(encoder, x, y, z)

        return record

    def create_encoder(self) -> Encoder:
        """Begin a command buffer."""
        return Encoder(self.lib.wgpuDeviceCreateCommandEncoder(self.handle, self.ffi.NULL), self)

    def create_query_set(self, count: int) -> NativeHandle:
        """Timestamps."""
        descriptor = self.ffi.new("WGPUQuerySetDescriptor *")
        descriptor.type, descriptor.count = self.lib.WGPUQueryType_Timestamp, count
        queries = self.lib.wgpuDeviceCreateQuerySet(self.handle, descriptor)
        return self.checked(queries, self.lib.wgpuQuerySetRelease)

    # what is each library's own --------------------------------------------------------------------------

    @abstractmethod
    def create_pipeline(self, label: str, source: str, accesses: tuple[Access, ...]) -> Pipeline:
        """Compile the function `main` of a WGSL source, with one binding per access."""

    @abstractmethod
    def submit(self, commands: NativeHandle) -> Any:
        """Hand a command buffer over; the submission, for `wait` and `read_mapped`."""

    @abstractmethod
    def wait(self, submission: Any) -> None:
        """Until a submission, and everything before it, is done. None: everything that was submitted."""

    @abstractmethod
    def map(self, staging: Buffer, nbytes: int) -> int:
        """Ask for a buffer to be mapped after what was submitted before; a number for the next two."""

    @abstractmethod
    def read_mapped(self, staging: Buffer, nbytes: int, submission: Any, number: int) -> bytes:
        """Wait for a submission; then the bytes of a buffer that it filled, which is unmapped again."""

    @abstractmethod
    def unmap_if_ready(self, staging: Buffer, number: int) -> bool:
        """Give up a mapping that nobody wants any more, without waiting; False if the GPU has not come that far."""

    def close(self) -> None:
        """Wait for the GPU, then give everything back. Nothing may be submitted any more."""
        if self.state.lost is None:
            self.wait(None)
            self.state.lost = "it was closed"
        self.lib.wgpuDeviceDestroy(self.handle)
        self.state.errors.clear()


class NativeAdapter(ABC):
    """One adapter that an implementation found, with what it can do."""

    FEATURES: ClassVar[Mapping[str, str]]  # the names of DeviceCaps for what may be switched off, and the library's

    def __init__(self, callbacks: Callbacks, lib: Any, handle: Any, key: tuple[str, int]) -> None:
        self.ffi, self.lib, self._callbacks = callbacks.ffi, lib, callbacks
        self._owner, self.handle = NativeHandle(handle, lib.wgpuAdapterRelease), handle
        self.key = key  # the same for the same adapter, in this process
        self._limits = self.ffi.new("WGPULimits *")
        self._limits.nextInChain = self._chained_limits()
        if lib.wgpuAdapterGetLimits(handle, self._limits) != lib.WGPUStatus_Success:
            raise DeviceError("an adapter does not tell its limits")
        self.caps = self._get_caps()

    @abstractmethod
    def open(self, features: Sequence[str], limits: Mapping[str, int], check_bounds: bool) -> NativeDevice:
        """A device with these features, and all limits of the adapter but those given here; names of `DeviceCaps`.

        `check_bounds`: compilers keep their checks of array bounds.
        """

    def _chained_limits(self) -> Any:
        """Limits that webgpu.h does not have."""
        return self.ffi.NULL

    def _own_caps(self) -> dict[str, Any]:
        """What only this implementation tells."""
        return {}

    def _has(self, feature: str) -> bool:
        return bool(self.lib.wgpuAdapterHasFeature(self.handle, getattr(self.lib, feature)))

    def _info(self, chained: Any = None) -> Any:
        """What the adapter says of itself. Its members are the caller's to free."""
        info = self.ffi.new("WGPUAdapterInfo *")
        if chained is not None:
            info.nextInChain = self.ffi.cast("WGPUChainedStruct *", chained)
        if self.lib.wgpuAdapterGetInfo(self.handle, info) != self.lib.WGPUStatus_Success:
            raise DeviceError("an adapter does not tell what it is")
        return info

    def _get_caps(self) -> DeviceCaps:
        info = self._info()
        vendor, name, description = (text(self.ffi, view) for view in (info.vendor, info.device, info.description))
        self.lib.wgpuAdapterInfoFreeMembers(info[0])
        name = name or description or "unnamed adapter"
        backend = BACKENDS.get(info.backendType, "unknown")
        software = "llvmpipe" in name or "swiftshader" in name.lower()
        features: dict[str, Any] = {
            cap: self._has(feature) for cap, feature in self.FEATURES.items() if cap != "subgroup_matrix"
        }
        limits: dict[str, Any] = {cap: int(getattr(self._limits, limit)) for cap, limit in LIMITS.items()}
        return DeviceCaps(
            name=name,
            kind="software" if software else KIND_OF_TYPE.get(info.adapterType, "other"),
            backend=backend,
            driver=" ".join(word for word in (vendor, description) if word),
            vendor=VENDORS.get(info.vendorID, ""),
            processors=processors_of(name),
            subgroup_min=info.subgroupMinSize,
            subgroup_max=info.subgroupMaxSize,
            dot4=backend not in WITHOUT_DOT4,
            offset_alignment=max(16, self._limits.minStorageBufferOffsetAlignment),
            **features,
            **limits,
            **self._own_caps(),
        )

    def _request_device(
        self, features: Sequence[str], limits: Mapping[str, int], chained: Any, mode: int, wait: Callable[[Any], object]
    ) -> tuple[Any, State]:
        """A new device and its state. `features` are the library's names; `wait` waits for the answer."""
        ffi, lib, callbacks, state = self.ffi, self.lib, self._callbacks, State()
        required = ffi.new("WGPULimits *", self._limits[0])
        for cap, limit in limits.items():
            setattr(required, LIMITS[cap], limit)
        for axis in "XYZ":
            field = f"maxComputeWorkgroupSize{axis}"
            setattr(required, field, min(getattr(required, field), required.maxComputeInvocationsPerWorkgroup))
        names = ffi.new("WGPUFeatureName[]", [getattr(lib, name) for name in features])
        userdata = ffi.cast("void *", state.number)
        descriptor = ffi.new("WGPUDeviceDescriptor *")
        descriptor.nextInChain = chained
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = len(names), names
        descriptor.requiredLimits = required
        descriptor.deviceLostCallbackInfo.mode = lib.WGPUCallbackMode_AllowSpontaneous
        descriptor.deviceLostCallbackInfo.callback = callbacks.on_lost
        descriptor.deviceLostCallbackInfo.userdata1 = userdata
        descriptor.uncapturedErrorCallbackInfo.callback = callbacks.on_error
        descriptor.uncapturedErrorCallbackInfo.userdata1 = userdata
        request = ffi.new("WGPURequestDeviceCallbackInfo *")
        request.mode, request.callback, request.userdata1 = mode, callbacks.on_device, userdata
        wait(lib.wgpuAdapterRequestDevice(self.handle, descriptor, request[0]))
        status, handle, message = callbacks.answers.pop(state.number, (0, None, "it does not answer"))
        if status != lib.WGPURequestDeviceStatus_Success:
            raise DeviceError(f"{self.caps.name} could not be opened: {message}")
        return handle, state
