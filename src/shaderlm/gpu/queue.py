"""The way to the GPU: everything that is submitted goes through a `Queue`, and everything that is read comes back.

One lock covers handing a command buffer over and asking for its read-back: these two must follow each other, and an
implementation keeps structures for them. It is held for microseconds, never while anybody waits for the GPU.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError
from .read_back import PendingReadBack, ReadBackRing
from .recording import CommandBuffer, ReadBack
from .webgpu_h import Encoder, NativeDevice


class Queue:
    """The queue of one device."""

    def __init__(self, native: NativeDevice) -> None:
        self.native, self.ring = native, ReadBackRing(native)
        self.closed = False
        self._submitting = threading.Lock()

    def check(self) -> None:
        """Is there still a GPU to submit to? wgpu-native ends the process where that is not asked before."""
        if self.closed:
            raise DeviceError("this device is closed; open it again")
        if self.native.lost is not None:
            raise DeviceError(f"the GPU was lost: {self.native.lost}; load the model again")

    def submit(self, made: CommandBuffer) -> PendingReadBack | None:
        """Hand a command buffer over; the pending read-back of the copy that it holds, if any."""
        self.check()
        for bound in made.programs:
            bound.check()
        if made.staged is not None:
            made.staged.source.check()
        with self._submitting:
            submission = self.native.submit(made.commands)
            return self.ring.submitted(made.staged, submission) if made.staged is not None else None

    def run(self, commands: Any) -> None:
        """Hand over what an encoder has finished, and wait until it is done."""
        self.check()
        with self._submitting:
            submission = self.native.submit(commands)
        self.native.wait(submission)

    def read(self, encoder: Encoder, region: ReadBack) -> NDArray[np.uint8]:
        """Submit what was recorded, and wait for what a region holds then."""
        staged = self.ring.stage(encoder, region)
        pending = self.submit(CommandBuffer(encoder.finish(), (), staged))
        assert pending is not None
        return pending.wait()
