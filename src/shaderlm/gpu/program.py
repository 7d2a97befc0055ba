"""A list of dispatches over named buffers: what a device runs. Plain data, no wgpu.

The same program runs on a `Device`, and tests write it out for a browser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .caps import DeviceCaps

Access = Literal["read-only-storage", "storage", "uniform"]
Array = NDArray[Any]


@dataclass(frozen=True)
class Slot:
    """One binding of a step: which buffer, how the shader declares it, and which bytes of it (default: all)."""

    buffer: str
    access: Access
    offset: int = 0  # a multiple of `DeviceCaps.offset_alignment`
    size: int | None = None  # None: up to the end of the buffer


@dataclass(frozen=True)
class Step:
    """One dispatch: composed WGSL, its buffers in binding order, its grid in workgroups."""

    label: str
    source: str
    slots: tuple[Slot, ...]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Program:
    """Buffers (contents, or a size in bytes for those that start empty), steps, and what to read back."""

    buffers: Mapping[str, Array | int]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]


class RunsPrograms(Protocol):
    """A device, for those who need no more of it."""

    caps: DeviceCaps

    def run(self, program: Program) -> dict[str, NDArray[np.uint8]]:
        """The outputs of a program, as bytes."""


def bytes_of(contents: Array | int) -> int:
    """Of what `Program.buffers` says of a buffer."""
    return contents if isinstance(contents, int) else contents.nbytes


def padded(nbytes: int) -> int:
    """Size of the buffer for `nbytes` of data: WebGPU wants multiples of 4, vec4 bindings of 16."""
    return max(16, (nbytes + 15) & ~15)


def as_bytes(data: Array) -> NDArray[np.uint8]:
    """The raw bytes of an array, zero-padded to its buffer's size."""
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    size = padded(raw.nbytes)
    return raw if raw.nbytes == size else np.concatenate([raw, np.zeros(size - raw.nbytes, np.uint8)])
