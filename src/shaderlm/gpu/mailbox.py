"""Small results on their way back while the GPU goes on: a ring of mapped buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError


class Letter:
    """Some bytes that will arrive. `open()` waits for them, once."""

    def __init__(self, staging: Any, promise: Any, free: list[Any]) -> None:
        self._staging, self._promise, self._free = staging, promise, free

    def open(self) -> NDArray[np.uint8]:
        """The bytes. Waits until the GPU has come that far, and no further."""
        import wgpu

        try:
            self._promise.sync_wait()
            data = np.frombuffer(self._staging.read_mapped(), np.uint8)
            self._staging.unmap()
        except (wgpu.GPUError, RuntimeError) as problem:  # mapping fails with a plain RuntimeError
            raise DeviceError(f"a result did not come back from the GPU: {problem}") from problem
        self._free.append(self._staging)
        return data


class Mailbox:
    """Makes letters of `nbytes`. A letter that is never opened costs one buffer."""

    def __init__(self, native_device: Any, nbytes: int) -> None:
        self._device, self._nbytes = native_device, nbytes
        self._free: list[Any] = []

    def stage(self, encoder: Any, source: Any) -> Any:
        """Record the copy of a buffer's first bytes; to be followed by a submission, then `post`."""
        if not self._free:
            import wgpu

            usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
            self._free.append(self._device.create_buffer(size=self._nbytes, usage=usage))
        staging = self._free.pop(0)
        encoder.copy_buffer_to_buffer(source, 0, staging, 0, self._nbytes)
        return staging

    def post(self, staging: Any) -> Letter:
        """The letter of a copy that has been submitted."""
        # "NOSYNC": without it wgpu would submit an empty command buffer of its own each time.
        return Letter(staging, staging.map_async("READ_NOSYNC"), self._free)
