"""Results on their way back while the GPU goes on: a ring of buffers that are copied into, mapped, read and used again.

A pending read-back waits for its own submission and for nothing after it. It is waited for or discarded; one that is
forgotten is discarded. Its buffer is free again once it has been read, or, if it was discarded, once the GPU has passed
it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError
from .webgpu_h import Buffer, Encoder, NativeDevice, NativeError

KEPT_BYTES = 1 << 20  # larger staging buffers are given back instead of being kept


class Staged(NamedTuple):
    """A copy that was recorded: where it goes, how many bytes are wanted, and of which buffer."""

    buffer: Buffer
    nbytes: int
    source: Buffer


class PendingReadBack:
    """Bytes that will arrive."""

    __slots__ = ("_number", "_ring", "_staged", "_submission")

    def __init__(self, ring: ReadBackRing, staged: Staged, submission: Any, number: int) -> None:
        self._staged: Staged | None = staged
        self._ring, self._submission, self._number = ring, submission, number

    def wait(self) -> NDArray[np.uint8]:
        """The bytes. Waits until the GPU has come that far. Once."""
        staged = self._staged
        if staged is None:
            raise DeviceError("this result was read back before, or discarded; a pending read-back can be read once")
        contents = self._ring.read(staged, self._submission, self._number)
        self._staged = None
        return contents

    def discard(self) -> None:
        """Nobody wants the bytes."""
        staged, self._staged = self._staged, None
        if staged is not None:
            self._ring.discard(staged, self._number)

    def __del__(self) -> None:
        if hasattr(self, "_number"):  # Ctrl-C may come before it is
            self.discard()


class ReadBackRing:
    """Makes pending read-backs of one device. Any thread may stage, wait and discard; one at a time submits."""

    def __init__(self, native: NativeDevice) -> None:
        self._native = native
        self._free: dict[int, list[Buffer]] = {}  # by size, which is a power of two
        self._discarded: deque[tuple[Buffer, int]] = deque()  # and the numbers of their mappings

    def stage(self, encoder: Encoder, buffer: Buffer, nbytes: int, offset: int = 0) -> Staged:
        """Record the copy of some bytes; to be followed by `submitted` or `give_back`."""
        buffer.check()
        size = _copied(nbytes)
        staging = self._take(max(16, 1 << (size - 1).bit_length()))
        encoder.copy(buffer, offset, staging, 0, size)
        return Staged(staging, nbytes, buffer)

    def _take(self, size: int) -> Buffer:
        if self._discarded:
            self._sweep()
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):
            return self._native.create_buffer(size, "read_back")

    def _sweep(self) -> None:
        """Take back the buffers of discarded read-backs that the GPU has passed."""
        for _ in range(len(self._discarded)):
            try:
                buffer, number = self._discarded.popleft()
            except IndexError:  # another thread sweeps too
                return
            if self._native.unmap_if_ready(buffer, number):
                self._keep(buffer)
            else:
                self._discarded.append((buffer, number))

    def _keep(self, buffer: Buffer) -> None:
        if buffer.size > KEPT_BYTES:
            buffer.destroy()
        else:
            self._free.setdefault(buffer.size, []).append(buffer)

    def give_back(self, staged: Staged) -> None:
        """The buffer of a copy that will never be submitted."""
        self._keep(staged.buffer)

    def submitted(self, staged: Staged, submission: Any) -> PendingReadBack:
        """The pending read-back of a copy that was just submitted."""
        return PendingReadBack(self, staged, submission, self._native.map(staged.buffer, _copied(staged.nbytes)))

    def read(self, staged: Staged, submission: Any, number: int) -> NDArray[np.uint8]:
        """Wait for a copy and take its bytes."""
        try:
            data = self._native.read_mapped(staged.buffer, _copied(staged.nbytes), submission, number)
        except NativeError as problem:
            why = f"the GPU was lost: {self._native.lost}; load the model again" if self._native.lost else problem
            raise DeviceError(f"a result did not come back from the GPU: {why}") from problem
        self._keep(staged.buffer)
        return np.frombuffer(data, np.uint8)[: staged.nbytes]

    def discard(self, staged: Staged, number: int) -> None:
        """Nobody will read a copy."""
        self._discarded.append((staged.buffer, number))


def _copied(nbytes: int) -> int:
    """WebGPU copies whole words; buffers are padded."""
    return -(-nbytes // 4) * 4
