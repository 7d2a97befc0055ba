"""An open device of Dawn: what is its own of shaders, submission and mapping."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from ..webgpu_h import Buffer, NativeDevice, NativeError, NativeHandle, Pipeline, State
from .library import Library

if TYPE_CHECKING:
    from ..program import Access

_requests = itertools.count(1 << 32)  # numbers of pipelines; those of devices are smaller


class DawnDevice(NativeDevice):
    """A submission has no number of its own: mapping its buffer is what is waited for."""

    tick_ns = 1.0  # Dawn converts

    def __init__(self, native: Library, handle: Any, state: State) -> None:
        super().__init__(handle, state, native.ffi, native.lib)
        ffi, lib = native.ffi, native.lib
        self._native = native
        # Kept and filled in anew for each submission: `Device` lets one thread at a time submit and map.
        self._commands = ffi.new("WGPUCommandBuffer[1]")
        self._request = ffi.new("WGPUBufferMapCallbackInfo *")
        self._request.mode, self._request.callback = lib.WGPUCallbackMode_WaitAnyOnly, native.callbacks.on_mapped
        self._submit, self._map, self._read = lib.wgpuQueueSubmit, lib.wgpuBufferMapAsync, lib.WGPUMapMode_Read

    def create_pipeline(self, label: str, source: str, accesses: tuple[Access, ...]) -> Pipeline:
        """Compile a WGSL source. Dawn does most of it in a thread of its own, so that several compile at once."""
        lib, native = self.lib, self._native
        layout, pipeline_layout = self.layout(accesses)
        shader, shader_owners = self.shader_descriptor(label, source)
        handle = lib.wgpuDeviceCreateShaderModule(self.handle, shader)
        try:
            module = self.checked(handle, lib.wgpuShaderModuleRelease)
        except NativeError as problem:
            raise NativeError(_with_places(str(problem))) from problem
        descriptor, owners = self.pipeline_descriptor(label, pipeline_layout, module)
        number = next(_requests)
        request = self.ffi.new("WGPUCreateComputePipelineAsyncCallbackInfo *")
        request.mode, request.callback = lib.WGPUCallbackMode_WaitAnyOnly, native.callbacks.on_pipeline
        request.userdata1 = self.ffi.cast("void *", number)
        native.wait(lib.wgpuDeviceCreateComputePipelineAsync(self.handle, descriptor, request[0]))
        del shader_owners, owners
        status, handle, message = native.callbacks.answers.pop(number, (0, None, "the compiler does not answer"))
        if status != lib.WGPUCreatePipelineAsyncStatus_Success:
            raise NativeError(_with_places(message.strip()))
        return Pipeline(handle, lib.wgpuComputePipelineRelease, layout)

    # submission and mapping ------------------------------------------------------------------------------

    def submit(self, commands: NativeHandle) -> None:
        """Hand a command buffer over. It is translated for the driver here, without Python's lock."""
        self._commands[0] = commands.handle
        self._submit(self.queue, 1, self._commands)
        self.check()

    def wait(self, submission: None) -> None:
        """Until everything is done that was submitted so far."""
        request = self.ffi.new("WGPUQueueWorkDoneCallbackInfo *")
        request.mode = self.lib.WGPUCallbackMode_WaitAnyOnly
        request.callback = self._native.callbacks.on_done
        self._native.wait(self.lib.wgpuQueueOnSubmittedWorkDone(self.queue, request[0]))

    def map(self, staging: Buffer, nbytes: int) -> int:
        """Ask for a buffer to be mapped; the number of the future."""
        future = self._map(staging.handle, self._read, 0, nbytes, self._request[0])
        return int(future.id)

    def _future(self, number: int) -> Any:
        future = self.ffi.new("WGPUFuture *")
        future.id = number
        return future[0]

    def read_mapped(self, staging: Buffer, nbytes: int, submission: None, number: int) -> bytes:
        """Wait for a mapping; then the bytes."""
        self._native.wait(self._future(number))
        pointer = self.lib.wgpuBufferGetConstMappedRange(staging.handle, 0, nbytes)
        if pointer == self.ffi.NULL or self.state.lost is not None:
            self.state.forget()
            raise NativeError("its buffer could not be mapped")
        data: bytes = self.ffi.buffer(pointer, nbytes)[:]
        self.lib.wgpuBufferUnmap(staging.handle)
        return data

    def unmap_if_ready(self, staging: Buffer, number: int) -> bool:
        """Give up a mapping that nobody wants. One that is under way ends here: who uses the buffer next comes after
        it in the queue."""
        self.lib.wgpuBufferUnmap(staging.handle)
        self._native.wait(self._future(number), 0)
        return True


def _with_places(message: str) -> str:
    """Tint's message, with places in the source as other compilers write them: wgsl:LINE:COLUMN."""
    return re.sub(r"(?m)(^|\s):(\d+:\d+)\b", r"\1wgsl:\2", message)
