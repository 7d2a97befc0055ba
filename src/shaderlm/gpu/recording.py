"""Programs bound to buffers, and command buffers recorded from them, to be submitted at once or later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import DeviceError
from .program import Program
from .read_back import Staged
from .webgpu_h import Buffer, Dispatch, Encoder, NativeDevice, Recorder

ReadBack = tuple[Buffer, int] | tuple[Buffer, int, int]  # and the offset, if it is not 0


class BoundProgram:
    """A program on a device: its buffers, and per step its pipeline and bind group."""

    def __init__(
        self, native: NativeDevice, program: Program, buffers: Mapping[str, Buffer], dispatches: Sequence[Dispatch]
    ) -> None:
        self.program, self.buffers, self.dispatches = program, buffers, tuple(dispatches)
        self.record: Recorder = native.recorder(self.dispatches)
        self._native = native
        self._checked = native.buffers_destroyed

    @cached_property
    def single(self) -> tuple[Recorder, ...]:
        """Records one step each."""
        return tuple(self._native.recorder([dispatch]) for dispatch in self.dispatches)

    def check(self) -> None:
        """Every buffer is still there. An implementation may end the process where one is not."""
        count = self._native.buffers_destroyed
        if count != self._checked:
            gone = [name for name, buffer in self.buffers.items() if buffer.destroyed]
            if gone:
                raise DeviceError(f"a program cannot run: its buffers {', '.join(gone)} were given back")
            self._checked = count

    def release(self) -> None:
        """Give the memory of all its buffers back now rather than when Python gets to it."""
        for buffer in self.buffers.values():
            buffer.destroy()


def encode(encoder: Encoder, programs: Sequence[BoundProgram]) -> None:
    """Programs one after the other, in one compute pass."""
    compute_pass = encoder.begin_pass()
    for bound in programs:
        bound.record(compute_pass)
    compute_pass.end()


@dataclass(slots=True)
class CommandBuffer:
    """Recorded and finished, good for one submission."""

    native: Any
    programs: Sequence[BoundProgram] = ()
    staged: Staged | None = None  # its last copy, which a read-back waits for
    traced: Any = None  # what a tracer wants to know of it once it is submitted
