"""The weights of an export: all buffers as one stream of bytes, in files of 64 MiB."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..compile.plan import BufferSpec
from ..runtime.weights import Progress, Source, pieces

SHARD_BYTES = 64 << 20
ALIGNMENT = 256  # of a buffer in the stream


def layout(buffers: Mapping[str, BufferSpec]) -> tuple[dict[str, tuple[int, int]], int]:
    """(offset, bytes) of every buffer in the stream, and the bytes of the stream."""
    places, end = {}, 0
    for name, spec in buffers.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        places[name] = (offset, spec.nbytes)
        end = offset + spec.nbytes
    return places, end


def write_weights(
    folder: Path, buffers: Mapping[str, BufferSpec], source: Source, progress: Progress | None = None
) -> list[Path]:
    """Write the stream; its files in order.

    Words and scales of the same rows are made together, so that pieces do not come in the order of the stream. What is
    between buffers is 0.
    """
    places, total = layout(buffers)
    files = [folder / f"weights-{i:03}.bin" for i in range(-(-total // SHARD_BYTES))]
    for i, path in enumerate(files):
        with path.open("wb") as file:
            file.truncate(min(SHARD_BYTES, total - i * SHARD_BYTES))
    done, weight_bytes = 0, sum(spec.nbytes for spec in buffers.values())
    for piece in pieces(buffers, source):
        data = np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8).data
        _write(files, places[piece.buffer][0] + piece.offset, data)
        done += len(data)
        if progress:
            progress(done, weight_bytes)
    return files


def _write(files: list[Path], offset: int, data: memoryview) -> None:
    """Bytes of the stream. They may cross files."""
    while len(data):
        number, at = divmod(offset, SHARD_BYTES)
        part = data[: SHARD_BYTES - at]
        with files[number].open("r+b", buffering=0) as file:
            file.seek(at, os.SEEK_SET)
            written = file.write(part)
        data, offset = data[written:], offset + written
