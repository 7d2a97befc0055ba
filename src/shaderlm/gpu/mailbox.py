"""Small results on their way back while the GPU goes on: a ring of mapped buffers.

Through wgpu's native functions a letter waits for its own submission and for nothing after it. wgpu's classes are the
tested fallback: their polling thread waits for everything that was submitted, and while it waits, no submission gets
through, so that the GPU runs dry between steps (300 µs of each on an H200).
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError

NBYTES = 16  # of a letter
LOST_SECONDS = 1.0  # after which a letter is lost whose submission is done


class Letter(Protocol):
    """Some bytes that will arrive."""

    def open(self) -> NDArray[np.uint8]:
        """The bytes. Waits until the GPU has come that far. Once."""
        ...


class Post(Protocol):
    """Submits command buffers, and maps what they copied into staging buffers."""

    def submit(self, queue: Any, commands: Any) -> Any:
        """Hand a command buffer over; what is needed to wait for it."""
        ...

    def letter(self, staging: Any, submitted: Any, free: list[Any]) -> Letter:
        """The letter of a copy into `staging`, which is `free` again once it has been opened."""
        ...

    def write(self, queue: Any, native: Any, words: NDArray[np.uint32]) -> None:
        """A few words to the beginning of a buffer that has room for them."""
        ...


class _ClassLetter:
    def __init__(self, staging: Any, free: list[Any]) -> None:
        # "NOSYNC": without it wgpu would submit an empty command buffer of its own each time.
        self._staging, self._promise, self._free = staging, staging.map_async("READ_NOSYNC"), free

    def open(self) -> NDArray[np.uint8]:
        import wgpu

        try:
            self._promise.sync_wait()
            data = np.frombuffer(self._staging.read_mapped(), np.uint8)
            self._staging.unmap()
        except (wgpu.GPUError, RuntimeError) as problem:  # mapping fails with a plain RuntimeError
            raise DeviceError(f"a result did not come back from the GPU: {problem}") from problem
        self._free.append(self._staging)
        return data


class ThroughClasses:
    """Public functions of wgpu."""

    def submit(self, queue: Any, commands: Any) -> Any:
        """Hand a command buffer over."""
        queue.submit([commands])

    def letter(self, staging: Any, submitted: Any, free: list[Any]) -> Letter:
        """The letter of a copy."""
        return _ClassLetter(staging, free)

    def write(self, queue: Any, native: Any, words: NDArray[np.uint32]) -> None:
        """A few words to the beginning of a buffer."""
        queue.write_buffer(native, 0, words)


class _NativeLetter:
    __slots__ = ("_free", "_number", "_post", "_staging", "_submitted")

    def __init__(self, post: ThroughHandles, staging: Any, submitted: Any, free: list[Any]) -> None:
        self._post, self._staging, self._submitted, self._free = post, staging, submitted, free
        self._number = post.map(staging)

    def open(self) -> NDArray[np.uint8]:
        data = self._post.wait(self._staging, self._submitted, self._number)
        self._free.append(self._staging)
        return data


class ThroughHandles:
    """Native functions. Raises AttributeError where this wgpu does not have them.

    What they are given is kept and filled in anew: one thread at a time may submit. Any may wait.
    """

    def __init__(self, native_device: Any) -> None:
        from wgpu.backends.wgpu_native import ffi, lib

        self._ffi, self._device = ffi, native_device._internal
        self._submit, self._write = lib.wgpuQueueSubmitForIndex, lib.wgpuQueueWriteBuffer
        self._poll, self._map = lib.wgpuDevicePoll, lib.wgpuBufferMapAsync
        self._range, self._unmap = lib.wgpuBufferGetConstMappedRange, lib.wgpuBufferUnmap
        self._read, self._success = lib.WGPUMapMode_Read, lib.WGPUMapAsyncStatus_Success
        self._numbers = itertools.count(1)
        self._arrived: dict[
            int, int
        ] = {}  # status by number; the library aborts the process if an unmapped range is read

        @ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
        def arrived(status: int, message: Any, number: Any, _: Any) -> None:
            self._arrived[int(ffi.cast("uintptr_t", number))] = status

        self._callback = arrived
        self._commands = ffi.new("WGPUCommandBuffer[1]")
        self._request = ffi.new("WGPUBufferMapCallbackInfo *")
        self._request.mode, self._request.callback = lib.WGPUCallbackMode_AllowProcessEvents, arrived
        self._pointer, self._index = ffi.typeof("void *"), ffi.typeof("uint64_t *")

    def submit(self, queue: Any, commands: Any) -> Any:
        """Hand a command buffer over; its number in the queue."""
        self._commands[0] = commands._internal
        return self._submit(queue._internal, 1, self._commands)

    def letter(self, staging: Any, submitted: Any, free: list[Any]) -> Letter:
        """The letter of a copy."""
        return _NativeLetter(self, staging, submitted, free)

    def map(self, staging: Any) -> int:
        """Ask for a staging buffer to be mapped; the number under which it will arrive."""
        number = next(self._numbers)
        self._request.userdata1 = self._ffi.cast(self._pointer, number)
        self._map(staging._internal, self._read, 0, NBYTES, self._request[0])
        return number

    def write(self, queue: Any, native: Any, words: NDArray[np.uint32]) -> None:
        """A few words to the beginning of a buffer."""
        self._write(queue._internal, native._internal, 0, self._ffi.from_buffer(words), words.nbytes)

    def wait(self, staging: Any, submitted: Any, number: int) -> NDArray[np.uint8]:
        """Bytes of a staging buffer, after its submission."""
        index = self._ffi.new(self._index, submitted)
        self._poll(self._device, True, index)
        if number not in self._arrived:
            # Another thread polled at the same time, and is about to say that this letter is here too.
            deadline = time.monotonic() + LOST_SECONDS
            while number not in self._arrived and time.monotonic() < deadline:
                time.sleep(0)
                self._poll(self._device, True, index)
        if self._arrived.pop(number, None) != self._success:
            raise DeviceError("a result did not come back from the GPU: its buffer could not be mapped")
        data = np.frombuffer(self._ffi.buffer(self._range(staging._internal, 0, NBYTES), NBYTES)[:], np.uint8)
        self._unmap(staging._internal)
        return data


class Mailbox:
    """Makes letters. One that is never opened costs a buffer."""

    def __init__(self, native_device: Any, post: Post | None = None) -> None:
        self._device = native_device
        self._free: list[Any] = []
        try:
            self._post: Post = post or ThroughHandles(native_device)
        except (ImportError, AttributeError):
            self._post = ThroughClasses()

    def stage(self, encoder: Any, source: Any) -> Any:
        """Record the copy of a buffer's first bytes; to be followed by `submit` or `give_back`. Any thread may."""
        try:
            staging = self._free.pop(0)
        except IndexError:
            import wgpu

            usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
            staging = self._device.create_buffer(size=NBYTES, usage=usage)
        encoder.copy_buffer_to_buffer(source, 0, staging, 0, NBYTES)
        return staging

    def give_back(self, staging: Any) -> None:
        """A staging buffer whose commands will never be submitted."""
        if staging is not None:
            self._free.append(staging)

    def submit(self, commands: Any, staging: Any = None) -> Letter | None:
        """Hand a command buffer over; the letter of the copy that it holds, if any."""
        submitted = self._post.submit(self._device.queue, commands)
        return self._post.letter(staging, submitted, self._free) if staging is not None else None

    def write(self, native: Any, words: NDArray[np.uint32]) -> None:
        """A few words to the beginning of a buffer, in the order of submissions."""
        self._post.write(self._device.queue, native, words)
