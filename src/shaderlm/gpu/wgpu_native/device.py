"""An open device of wgpu-native: buffers, pipelines, encoders, submission and mapping, by native handles.

Every call that may be refused is followed by `_check`. Recording is not: what is wrong with it comes out in `finish`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..native import Buffer, Dispatch, NativeError, Recorder, Use
from ..program import Access, Array
from . import library as native
from .bindings import ffi

LATE_SECONDS = 1.0  # after which a mapping has failed whose submission is done
_ACCESS = {
    "read-only-storage": "WGPUBufferBindingType_ReadOnlyStorage",
    "storage": "WGPUBufferBindingType_Storage",
    "uniform": "WGPUBufferBindingType_Uniform",
}
_thread = threading.get_ident


class Handle:
    """An object of the library, released when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_release", "handle")

    def __init__(self, handle: Any, release: Callable[[Any], None]) -> None:
        self.handle, self._release = handle, release

    def __del__(self) -> None:
        self._release(self.handle)


class WgpuBuffer(Buffer):
    """Released when nothing refers to it any more; destroyed or not."""

    __slots__ = ("_release",)

    def __init__(self, device: WgpuDevice, handle: Any, size: int, release: Callable[[Any], None]) -> None:
        super().__init__(device, handle, size)
        self._release = release

    def __del__(self) -> None:
        self._release(self.handle)


class WgpuPipeline(Handle):
    """A compiled kernel, with the layout of its bindings."""

    __slots__ = ("layout",)

    def __init__(self, handle: Any, release: Callable[[Any], None], layout: Handle) -> None:
        super().__init__(handle, release)
        self.layout = layout


class WgpuPass(Handle):
    """A compute pass that is open."""

    __slots__ = ("_lib",)

    def __init__(self, handle: Any, lib: Any) -> None:
        super().__init__(handle, lib.wgpuComputePassEncoderRelease)
        self._lib = lib

    def timestamp(self, queries: Handle, index: int) -> None:
        """The GPU's clock here into a query."""
        self._lib.wgpuComputePassEncoderWriteTimestamp(self.handle, queries.handle, index)

    def end(self) -> None:
        """Nothing more in this pass."""
        self._lib.wgpuComputePassEncoderEnd(self.handle)


class WgpuEncoder(Handle):
    """Records a command buffer."""

    __slots__ = ("_device", "_lib")

    def __init__(self, handle: Any, device: WgpuDevice, lib: Any) -> None:
        super().__init__(handle, lib.wgpuCommandEncoderRelease)
        self._device, self._lib = device, lib

    def begin_pass(self, timestamps: tuple[Any, int, int] | None = None) -> WgpuPass:
        """Open a compute pass."""
        described = ffi.NULL
        if timestamps is not None:
            queries, begin, end = timestamps
            writes = ffi.new("WGPUPassTimestampWrites *")
            writes.querySet = queries.handle
            writes.beginningOfPassWriteIndex, writes.endOfPassWriteIndex = begin, end
            described = ffi.new("WGPUComputePassDescriptor *")
            described.timestampWrites = writes
        return WgpuPass(self._lib.wgpuCommandEncoderBeginComputePass(self.handle, described), self._lib)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Bytes of a buffer into another one."""
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(
            self.handle, source.handle, source_offset, target.handle, target_offset, nbytes
        )

    def resolve(self, queries: Handle, first: int, count: int, target: Buffer) -> None:
        """Ticks of queries into a buffer."""
        self._lib.wgpuCommandEncoderResolveQuerySet(self.handle, queries.handle, first, count, target.handle, 0)

    def finish(self) -> Handle:
        """The command buffer."""
        made = Handle(self._lib.wgpuCommandEncoderFinish(self.handle, ffi.NULL), self._lib.wgpuCommandBufferRelease)
        self._device._check()
        return made


class WgpuDevice:
    """A `NativeDevice`."""

    dialect: Literal["wgpu", "dawn"] = "wgpu"

    def __init__(self, handle: Any, state: native.State) -> None:
        self._lib = lib = native.library()
        self._state, self._errors = state, state.errors
        self._owner = Handle(handle, lib.wgpuDeviceRelease)
        self._handle = handle
        self._queue_owner = Handle(lib.wgpuDeviceGetQueue(handle), lib.wgpuQueueRelease)
        self._queue = self._queue_owner.handle
        self.tick_ns = float(lib.wgpuQueueGetTimestampPeriod(self._queue))
        self.buffers_destroyed = 0
        self._layouts: dict[tuple[Access, ...], tuple[Handle, Handle]] = {}
        copied = lib.WGPUBufferUsage_CopySrc | lib.WGPUBufferUsage_CopyDst
        self._usage: dict[Use, int] = {
            "storage": lib.WGPUBufferUsage_Storage | lib.WGPUBufferUsage_Uniform | copied,
            "read_back": lib.WGPUBufferUsage_MapRead | lib.WGPUBufferUsage_CopyDst,
            "timestamps": lib.WGPUBufferUsage_QueryResolve | lib.WGPUBufferUsage_CopySrc,
        }
        # Kept and filled in anew for each submission: `Device` lets one thread at a time submit and map.
        self._commands = ffi.new("WGPUCommandBuffer[1]")
        self._request = ffi.new("WGPUBufferMapCallbackInfo *")
        self._request.mode, self._request.callback = lib.WGPUCallbackMode_AllowProcessEvents, native.on_mapped
        self._pointer, self._index = ffi.typeof("void *"), ffi.typeof("uint64_t *")
        self._submit, self._poll = lib.wgpuQueueSubmitForIndex, lib.wgpuDevicePoll
        self._map, self._read, self._mapped_ok = lib.wgpuBufferMapAsync, lib.WGPUMapMode_Read, 1
        assert lib.WGPUMapAsyncStatus_Success == self._mapped_ok

    @property
    def lost(self) -> str | None:
        """Why the device was lost."""
        return self._state.lost

    def _check(self) -> None:
        """Raise what the library said to this thread."""
        if self._errors:
            problem = self._errors.pop(_thread(), None)
            if problem is not None:
                raise problem

    # buffers ---------------------------------------------------------------------------------------------

    def create_buffer(self, nbytes: int, use: Use) -> Buffer:
        """Zeros."""
        described = ffi.new("WGPUBufferDescriptor *")
        described.size, described.usage = nbytes, self._usage[use]
        handle = self._lib.wgpuDeviceCreateBuffer(self._handle, described)
        made = WgpuBuffer(self, handle, nbytes, self._lib.wgpuBufferRelease)
        self._check()
        return made

    def destroy_buffer(self, handle: Any) -> None:
        """For `Buffer.destroy`."""
        self.buffers_destroyed += 1
        self._lib.wgpuBufferDestroy(handle)

    def write(self, buffer: Buffer, offset: int, data: Array) -> None:
        """A contiguous array into a buffer."""
        self._lib.wgpuQueueWriteBuffer(self._queue, buffer.handle, offset, ffi.from_buffer(data), data.nbytes)
        self._check()

    # pipelines -------------------------------------------------------------------------------------------

    def create_pipeline(self, label: str, source: str, accesses: tuple[Access, ...], check_bounds: bool) -> Any:
        """Compile a WGSL source.

        naga adds checks of array bounds and of endless loops, which is right for shaders from anywhere. Ours are known,
        and tested with checks on; without them loops unroll, and a decode step is a sixth shorter on an H200.
        """
        lib = self._lib
        layout, pipeline_layout = self._layout(accesses)
        wgsl = ffi.new("WGPUShaderSourceWGSL *")
        wgsl.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        described = ffi.new("WGPUShaderModuleDescriptor *")
        described.nextInChain = ffi.cast("WGPUChainedStruct *", wgsl)
        kept = [native.put(wgsl.code, source), native.put(described.label, label)]
        if check_bounds:
            handle = lib.wgpuDeviceCreateShaderModule(self._handle, described)
        else:
            unchecked = lib.WGPUShaderRuntimeChecks_None
            handle = lib.wgpuDeviceCreateShaderModuleTrusted(self._handle, described, unchecked)
        module = Handle(handle, lib.wgpuShaderModuleRelease)
        self._check()
        wanted = ffi.new("WGPUComputePipelineDescriptor *")
        wanted.layout, wanted.compute.module = pipeline_layout.handle, module.handle
        kept += [native.put(wanted.label, label), native.put(wanted.compute.entryPoint, "main")]
        handle = lib.wgpuDeviceCreateComputePipeline(self._handle, wanted)
        made = WgpuPipeline(handle, lib.wgpuComputePipelineRelease, layout)
        self._check()
        del kept
        return made

    def _layout(self, accesses: tuple[Access, ...]) -> tuple[Handle, Handle]:
        """Bind group layout and pipeline layout; shared by all pipelines with these bindings."""
        if accesses not in self._layouts:
            lib = self._lib
            entries = ffi.new("WGPUBindGroupLayoutEntry[]", len(accesses))
            for i, access in enumerate(accesses):
                entries[i].binding, entries[i].visibility = i, lib.WGPUShaderStage_Compute
                entries[i].buffer.type = getattr(lib, _ACCESS[access])
            described = ffi.new("WGPUBindGroupLayoutDescriptor *")
            described.entryCount, described.entries = len(accesses), entries
            layout = Handle(
                lib.wgpuDeviceCreateBindGroupLayout(self._handle, described), lib.wgpuBindGroupLayoutRelease
            )
            self._check()
            wanted = ffi.new("WGPUPipelineLayoutDescriptor *")
            one = ffi.new("WGPUBindGroupLayout[1]", [layout.handle])
            wanted.bindGroupLayoutCount, wanted.bindGroupLayouts = 1, one
            whole = Handle(lib.wgpuDeviceCreatePipelineLayout(self._handle, wanted), lib.wgpuPipelineLayoutRelease)
            self._check()
            self._layouts[accesses] = (layout, whole)
        return self._layouts[accesses]

    def create_bind_group(self, pipeline: Any, ranges: Sequence[tuple[Buffer, int, int]]) -> Any:
        """Buffers for the bindings of a pipeline."""
        entries = ffi.new("WGPUBindGroupEntry[]", len(ranges))
        for i, (buffer, offset, size) in enumerate(ranges):
            entry = entries[i]
            entry.binding, entry.buffer, entry.offset, entry.size = i, buffer.handle, offset, size
        described = ffi.new("WGPUBindGroupDescriptor *")
        described.layout, described.entryCount, described.entries = pipeline.layout.handle, len(ranges), entries
        made = Handle(self._lib.wgpuDeviceCreateBindGroup(self._handle, described), self._lib.wgpuBindGroupRelease)
        self._check()
        return made

    # recording -------------------------------------------------------------------------------------------

    def recorder(self, dispatches: Sequence[Dispatch]) -> Recorder:
        """Records these dispatches, with handles looked up once: 2 µs each."""
        set_pipeline = self._lib.wgpuComputePassEncoderSetPipeline
        set_group = self._lib.wgpuComputePassEncoderSetBindGroup
        dispatch = self._lib.wgpuComputePassEncoderDispatchWorkgroups
        kept = tuple(dispatches)  # handles live as long as their owners
        handles = [(pipeline.handle, group.handle, *grid) for pipeline, group, grid in kept]
        nothing = ffi.NULL

        def record(compute_pass: WgpuPass, _: Any = kept) -> None:
            encoder, last = compute_pass.handle, None
            for pipeline, group, x, y, z in handles:
                if pipeline is not last:
                    set_pipeline(encoder, pipeline)
                    last = pipeline
                set_group(encoder, 0, group, 0, nothing)
                dispatch(encoder, x, y, z)

        return record

    def create_encoder(self) -> WgpuEncoder:
        """Begin a command buffer."""
        return WgpuEncoder(self._lib.wgpuDeviceCreateCommandEncoder(self._handle, ffi.NULL), self, self._lib)

    def create_query_set(self, count: int) -> Handle:
        """Timestamps."""
        described = ffi.new("WGPUQuerySetDescriptor *")
        described.type, described.count = self._lib.WGPUQueryType_Timestamp, count
        made = Handle(self._lib.wgpuDeviceCreateQuerySet(self._handle, described), self._lib.wgpuQuerySetRelease)
        self._check()
        return made

    # submission and mapping ------------------------------------------------------------------------------

    def submit(self, commands: Handle) -> int:
        """Hand a command buffer over; its number in the queue."""
        self._commands[0] = commands.handle
        submission: int = self._submit(self._queue, 1, self._commands)
        return submission

    def wait(self, submission: int) -> None:
        """Until a submission is done. Unlike wgpu-py's polling it does not wait for what was submitted after it."""
        self._poll(self._handle, True, ffi.new(self._index, submission))

    def map(self, staging: Buffer, nbytes: int) -> int:
        """Ask for a buffer to be mapped."""
        number = next(native.mapping_numbers)
        self._request.userdata1 = ffi.cast(self._pointer, number)
        self._map(staging.handle, self._read, 0, nbytes, self._request[0])
        return number

    def read_mapped(self, staging: Buffer, nbytes: int, submission: int, number: int) -> bytes:
        """Wait for a submission; then the bytes of a buffer that it filled."""
        index = ffi.new(self._index, submission)
        self._poll(self._handle, True, index)
        if number not in native.mapped:
            # Another thread polled at the same time, and is about to say that this buffer is mapped too.
            deadline = time.monotonic() + LATE_SECONDS
            while number not in native.mapped and time.monotonic() < deadline:
                time.sleep(0)
                self._poll(self._handle, True, index)
        # The library ends the process where a range is read that is not mapped, or of a device that was lost.
        if native.mapped.pop(number, None) != self._mapped_ok or self._state.lost is not None:
            raise NativeError("its buffer could not be mapped")
        data: bytes = ffi.buffer(self._lib.wgpuBufferGetConstMappedRange(staging.handle, 0, nbytes), nbytes)[:]
        self._lib.wgpuBufferUnmap(staging.handle)
        return data

    def unmap_if_ready(self, staging: Buffer, number: int) -> bool:
        """Give up a mapping that nobody wants. One that is under way is left alone: the library would map the buffer
        for who uses it next as soon as the old submission is done."""
        status = native.mapped.pop(number, None)
        if status is None:
            return False
        if status == self._mapped_ok and self._state.lost is None:
            self._lib.wgpuBufferUnmap(staging.handle)
        return True

    def close(self) -> None:
        """Wait for the GPU, then give everything back."""
        if self._state.lost is None:
            self._poll(self._handle, True, ffi.NULL)
            self._state.lost = "it was closed"
        self._lib.wgpuDeviceDestroy(self._handle)
        self._errors.clear()
