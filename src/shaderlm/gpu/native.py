"""The interface between this package and an implementation of WebGPU. Everything that an implementation knows of
itself (handles, C types, enumerations) stays in its own sub-package: `wgpu_native` and `dawn`.

An implementation has a function `adapters(backends)` and gives devices that are `NativeDevice`. Objects that it hands
out and takes back (pipelines, bind groups, query sets, command buffers, submissions) are opaque: typed `Any` here.
Errors are `NativeError`; `Device` puts them into words for people.

A `NativeDevice` may be used by several threads. Its `submit` and `map` share structures that are kept between calls:
`Device` calls these two under one lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..errors import DeviceError
from .caps import DeviceCaps

if TYPE_CHECKING:
    from .program import Access, Array

Use = Literal["storage", "read_back", "timestamps"]
Grid = tuple[int, int, int]
Dispatch = tuple[Any, Any, Grid]  # pipeline, bind group, workgroups
Recorder = Callable[[Any], None]  # records dispatches into an open compute pass


class NativeError(Exception):
    """What an implementation says when it refuses something."""


class OutOfMemoryError(NativeError):
    """There is no room for a buffer."""


class Buffer:
    """Memory of a device. It is given back by `destroy`, or when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_native", "destroyed", "handle", "size")

    def __init__(self, native: NativeDevice, handle: Any, size: int) -> None:
        self._native, self.handle, self.size, self.destroyed = native, handle, size, False

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
            self._native.destroy_buffer(self.handle)


class Pass(Protocol):
    """A compute pass that is open. Recorders are called with it."""

    def timestamp(self, queries: Any, index: int) -> None:
        """The GPU's clock here, between two dispatches, into a query."""
        ...

    def end(self) -> None:
        """Nothing more in this pass."""
        ...


class Encoder(Protocol):
    """Records a command buffer. Used by one thread at a time."""

    def begin_pass(self, timestamps: tuple[Any, int, int] | None = None) -> Pass:
        """Open a compute pass; `timestamps`: a query set, and its queries for the beginning and the end."""
        ...

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Bytes of a buffer into another one. Offsets and size are multiples of 4."""
        ...

    def resolve(self, queries: Any, first: int, count: int, target: Buffer) -> None:
        """Ticks of queries (uint64) to the beginning of a buffer whose use is "timestamps"."""
        ...

    def finish(self) -> Any:
        """The command buffer; it can be submitted once. What is wrong with what was recorded is raised here."""
        ...


class NativeDevice(Protocol):
    """One open device of an implementation."""

    tick_ns: float  # of a timestamp
    buffers_destroyed: int  # a count that changes whenever a buffer is destroyed

    @property
    def lost(self) -> str | None:
        """Why the device was lost; None as long as it is not known to be."""
        ...

    def create_buffer(self, nbytes: int, use: Use) -> Buffer:
        """Zeros."""
        ...

    def destroy_buffer(self, handle: Any) -> None:
        """For `Buffer.destroy`."""
        ...

    def write(self, buffer: Buffer, offset: int, data: Array) -> None:
        """A contiguous array into a buffer, before everything that is submitted later."""
        ...

    def create_pipeline(self, label: str, source: str, accesses: tuple[Access, ...]) -> Any:
        """Compile the function `main` of a WGSL source, with one binding per access."""
        ...

    def create_bind_group(self, pipeline: Any, ranges: Sequence[tuple[Buffer, int, int]]) -> Any:
        """Buffers, offsets and sizes for the bindings of a pipeline."""
        ...

    def recorder(self, dispatches: Sequence[Dispatch]) -> Recorder:
        """Records these dispatches, as often as it is called."""
        ...

    def create_encoder(self) -> Encoder:
        """Begin a command buffer."""
        ...

    def create_query_set(self, count: int) -> Any:
        """Timestamps."""
        ...

    def submit(self, commands: Any) -> Any:
        """Hand a command buffer over; the submission, for `wait` and `read_mapped`."""
        ...

    def wait(self, submission: Any) -> None:
        """Until a submission, and everything before it, is done."""
        ...

    def map(self, staging: Buffer, nbytes: int) -> int:
        """Ask for a buffer to be mapped after what was submitted before; a number for the next two."""
        ...

    def read_mapped(self, staging: Buffer, nbytes: int, submission: Any, number: int) -> bytes:
        """Wait for a submission; then the bytes of a buffer that it filled, which is unmapped again."""
        ...

    def unmap_if_ready(self, staging: Buffer, number: int) -> bool:
        """Give up a mapping that nobody wants any more, without waiting; False if the GPU has not come that far."""
        ...

    def close(self) -> None:
        """Give everything back. Nothing may be submitted any more."""
        ...


class NativeAdapter(Protocol):
    """An adapter that an implementation found."""

    caps: DeviceCaps
    key: tuple[str, int]  # the same for the same adapter, in this process

    def open(self, features: Sequence[str], limits: Mapping[str, int], check_bounds: bool) -> NativeDevice:
        """A device with these features, and all limits of the adapter but those given here; names of `DeviceCaps`.

        `check_bounds`: compilers keep their checks of array bounds.
        """
        ...
