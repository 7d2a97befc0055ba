"""An open device of wgpu-native: what is its own of shaders, submission and mapping."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..webgpu_h import Buffer, NativeDevice, NativeError, NativeHandle, Pipeline, State
from . import library as native
from .bindings import ffi

if TYPE_CHECKING:
    from ..program import Access

LATE_SECONDS = 1.0  # after which a mapping has failed whose submission is done


class WgpuDevice(NativeDevice):
    """A submission is a number in the queue."""

    def __init__(self, handle: Any, state: State, check_bounds: bool) -> None:
        lib = native.library()
        super().__init__(handle, state, ffi, lib)
        self._check_bounds = check_bounds
        self.tick_ns = float(lib.wgpuQueueGetTimestampPeriod(self.queue))
        # Kept and filled in anew for each submission: `Device` lets one thread at a time submit and map.
        self._commands = ffi.new("WGPUCommandBuffer[1]")
        self._request = ffi.new("WGPUBufferMapCallbackInfo *")
        self._request.mode, self._request.callback = lib.WGPUCallbackMode_AllowProcessEvents, native.on_mapped
        self._pointer, self._index = ffi.typeof("void *"), ffi.typeof("uint64_t *")
        self._submit, self._poll = lib.wgpuQueueSubmitForIndex, lib.wgpuDevicePoll
        self._map, self._read, self._mapped_ok = lib.wgpuBufferMapAsync, lib.WGPUMapMode_Read, 1
        assert lib.WGPUMapAsyncStatus_Success == self._mapped_ok

    def create_pipeline(self, label: str, source: str, accesses: tuple[Access, ...]) -> Pipeline:
        """Compile a WGSL source.

        naga adds checks of array bounds and of endless loops, which is right for shaders from anywhere. Ours are known,
        and tested with checks on; without them loops unroll, and a decode step is a sixth shorter on an H200.
        """
        lib = self.lib
        layout, pipeline_layout = self.layout(accesses)
        shader, shader_owners = self.shader_descriptor(label, source)
        if self._check_bounds:
            handle = lib.wgpuDeviceCreateShaderModule(self.handle, shader)
        else:
            handle = lib.wgpuDeviceCreateShaderModuleTrusted(self.handle, shader, lib.WGPUShaderRuntimeChecks_None)
        module = self.checked(handle, lib.wgpuShaderModuleRelease)
        descriptor, owners = self.pipeline_descriptor(label, pipeline_layout, module)
        handle = lib.wgpuDeviceCreateComputePipeline(self.handle, descriptor)
        pipeline = Pipeline(handle, lib.wgpuComputePipelineRelease, layout)
        self.check()
        del shader_owners, owners
        return pipeline

    # submission and mapping ------------------------------------------------------------------------------

    def submit(self, commands: NativeHandle) -> int:
        """Hand a command buffer over; its number in the queue."""
        self._commands[0] = commands.handle
        submission: int = self._submit(self.queue, 1, self._commands)
        return submission

    def wait(self, submission: int | None) -> None:
        """Unlike wgpu-py's polling it does not wait for what was submitted after it."""
        self._poll(self.handle, True, ffi.NULL if submission is None else ffi.new(self._index, submission))

    def map(self, staging: Buffer, nbytes: int) -> int:
        """Ask for a buffer to be mapped."""
        number = next(native.mapping_numbers)
        self._request.userdata1 = ffi.cast(self._pointer, number)
        self._map(staging.handle, self._read, 0, nbytes, self._request[0])
        return number

    def read_mapped(self, staging: Buffer, nbytes: int, submission: int, number: int) -> bytes:
        """Wait for a submission; then the bytes of a buffer that it filled."""
        index = ffi.new(self._index, submission)
        self._poll(self.handle, True, index)
        if number not in native.mapped:
            # Another thread polled at the same time, and is about to say that this buffer is mapped too.
            deadline = time.monotonic() + LATE_SECONDS
            while number not in native.mapped and time.monotonic() < deadline:
                time.sleep(0)
                self._poll(self.handle, True, index)
        # The library ends the process where a range is read that is not mapped, or of a device that was lost.
        if native.mapped.pop(number, None) != self._mapped_ok or self.state.lost is not None:
            raise NativeError("its buffer could not be mapped")
        data: bytes = ffi.buffer(self.lib.wgpuBufferGetConstMappedRange(staging.handle, 0, nbytes), nbytes)[:]
        self.lib.wgpuBufferUnmap(staging.handle)
        return data

    def unmap_if_ready(self, staging: Buffer, number: int) -> bool:
        """Give up a mapping that nobody wants. One that is under way is left alone: the library would map the buffer
        for who uses it next as soon as the old submission is done."""
        status = native.mapped.pop(number, None)
        if status is None:
            return False
        if status == self._mapped_ok and self.state.lost is None:
            self.lib.wgpuBufferUnmap(staging.handle)
        return True
