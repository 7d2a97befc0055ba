"""The way to the GPU: everything that is submitted goes through a `Queue`, and everything that is read comes back.

One lock covers handing a command buffer over and asking for its read-back: these two must follow each other, and an
implementation keeps structures for them. It is held for microseconds, never while anybody waits for the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError
from .drivers import DRIVERS
from .read_back import PendingReadBack, ReadBackRing
from .recording import BoundProgram, CommandBuffer, ReadBack, encode
from .webgpu_h import Encoder, NativeDevice

NO_TURNS = nullcontext()


class Queue:
    """The queue of one device."""

    def __init__(self, native: NativeDevice) -> None:
        self.native, self.ring = native, ReadBackRing(native)
        self.closed = False
        self._submitting = threading.Lock()

    def check(self) -> None:
        """Is there still a GPU to submit to? wgpu-native ends the process where that is not asked before."""
        DRIVERS.check()
        if self.closed:
            raise DeviceError("this device is closed; open it again")
        if self.native.lost is not None:
            raise DeviceError(f"the GPU was lost: {self.native.lost}; load the model again")

    def record(
        self,
        programs: Sequence[BoundProgram],
        read_back: ReadBack | None,
        turn: AbstractContextManager[Any] = NO_TURNS,
    ) -> CommandBuffer:
        """Programs recorded and finished, on any thread; recorded while it is its turn."""
        with turn:
            for bound in programs:
                bound.check()
            encoder = self.native.create_encoder()
            encode(encoder, programs)
            staged = self.ring.stage(encoder, *read_back) if read_back is not None else None
        return CommandBuffer(encoder.finish(), programs, staged)

    def discard(self, commands: CommandBuffer) -> None:
        """It will never be submitted."""
        if commands.staged is not None:
            self.ring.give_back(commands.staged)

    def submit(self, commands: CommandBuffer) -> PendingReadBack | None:
        """Hand a command buffer over; the pending read-back of the copy that it holds, if any."""
        self.check()
        staged = commands.staged
        for bound in commands.programs:
            bound.check()
        if staged is not None:
            staged.source.check()
        with self._submitting:
            submission = self.native.submit(commands.native)
            return self.ring.submitted(staged, submission) if staged is not None else None

    def run(self, commands: Any) -> None:
        """Hand over what an encoder has finished, and wait until it is done."""
        self.check()
        with self._submitting:
            submission = self.native.submit(commands)
        self.native.wait(submission)

    def read(self, encoder: Encoder, region: ReadBack) -> NDArray[np.uint8]:
        """Submit what was recorded, and wait for what a region holds then."""
        staged = self.ring.stage(encoder, *region)
        pending = self.submit(CommandBuffer(encoder.finish(), (), staged))
        assert pending is not None
        return pending.wait()
