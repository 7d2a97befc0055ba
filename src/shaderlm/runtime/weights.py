"""Weights from a checkpoint to where they are used: packed into GPU buffers piece by piece, or dense in memory.

The plan says for each buffer which rows of which tensors it holds and in which layout. A weight may consist of several
tensors, stacked, or with rows in turns. Never more than a few pieces of weights are held beside the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from ..compile.plan import BufferSpec, WeightSource
from ..formats.row_order import paired_rows
from ..gpu import Array, Device
from ..graph.graph import Tensor, TensorSlice

PIECE_BYTES = 16 << 20
FLUSH_BYTES = 64 << 20
DENSE_PIECE_BYTES = 4 << 20
THREADS = 4  # that repack ahead: more do not copy faster, and each holds a piece

T = TypeVar("T")
Progress = Callable[[int, int], None]  # done, total, in bytes


class Source(Protocol):
    """Where weights come from. It `repeats` if rows depend on their number, format and width alone."""

    repeats: bool

    def rows(self, name: str, kind: str, first: int, end: int) -> Array:
        """Rows of one tensor in a device's format: blocks as GGUF has them, or dense f32 or f16."""
        ...

    def vector(self, name: str) -> Array:
        """A one-dimensional tensor in f32."""
        ...


@dataclass(frozen=True)
class UploadChunk:
    """Some bytes of a buffer."""

    buffer: str
    offset: int
    data: Array


Job = Callable[[], list[UploadChunk]]


def jobs(buffers: Mapping[str, BufferSpec], source: Source) -> Iterator[Job]:
    """What makes the contents of weight buffers, piece by piece. Each job can be done by any thread, in any order."""
    packed: Packed = _packed_once() if source.repeats else _packed
    for name, spec in buffers.items():
        weight = spec.weight
        assert weight is not None
        if weight.part == "vector":
            yield partial(_vector_piece, name, weight, source)
        elif weight.part == "words":
            scales = name.replace("/weight.", "/scales.")
            yield from _matrix(name, weight, spec.nbytes, scales, buffers.get(scales), source, packed)


def _vector_piece(name: str, weight: WeightSource, source: Source) -> list[UploadChunk]:
    whole = _vector(weight, source)
    first, end = weight.rows or (0, len(whole))
    return [UploadChunk(name, 0, whole[first:end])]


def _vector(weight: WeightSource, source: Source) -> Array:
    # Biases of experts are a matrix in the file.
    parts = [_ordered(part, source.vector(part.name).reshape(-1)[part.first :][: part.rows]) for part in weight.tensors]
    if weight.interleaved:
        vector = np.stack([np.concatenate(half) for half in _halves(parts)], axis=1)
    else:
        vector = np.concatenate(parts)
    return np.ascontiguousarray(vector.reshape(-1), np.float32)


def _halves(parts: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The parts whose rows take turns."""
    middle = len(parts) // 2
    return parts[:middle], parts[middle:]


Packed = Callable[[WeightSource, int, int, Source, int], tuple[Array, Array]]


def _packed(weight: WeightSource, first: int, end: int, source: Source, row_bytes: int) -> tuple[Array, Array]:
    """The words and scales of some rows. `row_bytes`: of a row's words."""
    from ..kernels.linear.formats import repack

    return repack(weight.layout, rows_of(weight, first, end, source))


def _packed_once() -> Packed:
    """The same for a source that repeats: rows of the same kind are packed once."""
    packed_rows: dict[tuple[Any, ...], tuple[Array, Array]] = {}

    def packed(weight: WeightSource, first: int, end: int, source: Source, row_bytes: int) -> tuple[Array, Array]:
        key = (str(weight.layout), row_bytes, end - first)
        if key not in packed_rows:
            packed_rows[key] = _packed(weight, first, end, source, row_bytes)
        return packed_rows[key]

    return packed


def _matrix(
    name: str,
    weight: WeightSource,
    nbytes: int,
    scales: str,
    beside: BufferSpec | None,
    source: Source,
    pack: Packed,
) -> Iterator[Job]:
    """The words of some rows, and the scales that lie beside them."""
    assert weight.rows is not None
    start, stop = weight.rows
    row_bytes = nbytes // (stop - start)
    scale_bytes = beside.nbytes // (stop - start) if beside else 0
    # Pairs of rows stay together, and a piece starts at a multiple of four bytes even if a row has an odd number.
    step = max(4, PIECE_BYTES // (row_bytes + scale_bytes) // 4 * 4)

    def packed(first: int, end: int) -> list[UploadChunk]:
        words, beside_words = pack(weight, first, end, source, row_bytes)
        chunks = [UploadChunk(name, (first - start) * row_bytes, words)]
        if beside is not None:
            chunks.append(UploadChunk(scales, (first - start) * scale_bytes, beside_words))
        return chunks

    for first in range(start, stop, step):
        yield partial(packed, first, min(first + step, stop))


def _ordered(part: TensorSlice, heads: Array) -> Array:
    """Rows of whole heads in the order of the weight."""
    if not part.width:
        return heads
    return heads[paired_rows(np.arange(len(heads)), part.width, part.rotary)]


def _part_rows(part: TensorSlice, kind: str, first: int, end: int, source: Source) -> Array:
    """Some rows of a part. Those of whole heads are read where the order differs."""
    if part.group:
        return np.concatenate([source.rows(part.name, kind, a, b) for a, b in _grouped(part, first, end)])
    width = part.width or 1
    a, b = first // width * width, -(-end // width) * width
    return _ordered(part, source.rows(part.name, kind, part.first + a, part.first + b))[first - a : end - a]


def _grouped(part: TensorSlice, first: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of rows of the tensor that these rows of a part are."""
    while first < end:
        number, at = divmod(first, part.group)
        stop, start = min(end, (number + 1) * part.group), part.first + number * part.stride + at
        yield start, start + stop - first
        first = stop


def rows_of(weight: WeightSource, first: int, end: int, source: Source) -> Array:
    """Rows of a weight that may be stacked of several tensors, or have their rows in turns."""
    parts, kind = weight.tensors, weight.format
    if len(parts) == 1:
        return _part_rows(parts[0], kind, first, end, source)
    if weight.interleaved:
        each = [_stacked_rows(half, kind, first // 2, end // 2, source) for half in _halves(parts)]
        return np.stack(each, axis=1).reshape(end - first, -1)
    return _stacked_rows(parts, kind, first, end, source)


def _stacked_rows(parts: Sequence[TensorSlice], kind: str, first: int, end: int, source: Source) -> Array:
    rows, at = [], 0
    for part in parts:
        a, b = max(first, at), min(end, at + part.rows)
        if a < b:
            rows.append(_part_rows(part, kind, a - at, b - at, source))
        at += part.rows
    return np.concatenate(rows)


def upload(
    device: Device, buffers: Mapping[str, BufferSpec], source: Source, progress: Progress | None = None
) -> dict[str, Any]:
    """Weights into buffers on the device. What was already made is given back if anything fails."""
    total, done, waiting = sum(spec.nbytes for spec in buffers.values()), 0, 0
    buffers_by_name: dict[str, Any] = {}
    try:
        for name, spec in buffers.items():
            buffers_by_name[name] = device.buffer(spec.nbytes)
        for piece in pieces(buffers, source):
            device.write(buffers_by_name[piece.buffer], piece.data, piece.offset)
            done, waiting = done + piece.data.nbytes, waiting + piece.data.nbytes
            if waiting >= FLUSH_BYTES:  # what is written lies in host memory until the queue has run
                device.flush()
                waiting = 0
            if progress:
                progress(done, total)
        device.flush()
    except BaseException:
        for buffer in buffers_by_name.values():
            buffer.destroy()
        raise
    return buffers_by_name


def pieces(buffers: Mapping[str, BufferSpec], source: Source) -> Iterator[UploadChunk]:
    """The contents of weight buffers, in the order of `jobs`; a few jobs are done ahead by other threads."""
    todo = jobs(buffers, source)
    with ThreadPoolExecutor(THREADS, "weights") as pool:
        running = deque(pool.submit(job) for job in islice(todo, THREADS))
        try:
            while running:
                chunks = running.popleft().result()
                running.extend(pool.submit(job) for job in islice(todo, 1))
                yield from chunks
        finally:
            for future in running:
                future.cancel()


def dense(weights: Iterable[Tensor], source: Source, progress: Progress | None = None) -> dict[str, Array]:
    """Weights as f32 arrays in memory, for the interpreter. They must all be of the format f32."""
    known = {tensor.name: tensor for tensor in weights}
    arrays: dict[str, Array] = {name: np.empty(tensor.shape, np.float32) for name, tensor in known.items()}
    total, done = sum(4 * tensor.size for tensor in known.values()), 0

    def fill(piece: tuple[Tensor, int, int]) -> int:
        tensor, first, end = piece
        weight = WeightSource(tensor.parts, tensor.interleaved, "f32")
        if len(tensor.shape) == 1:
            arrays[tensor.name][:] = _vector(weight, source)
        else:
            arrays[tensor.name][first:end] = rows_of(weight, first, end, source)
        return arrays[tensor.name][first:end].nbytes

    # Pieces that stay in a core's cache, on all cores: NumPy lets go of Python's lock while it computes.
    with ThreadPoolExecutor() as pool:
        for nbytes in pool.map(fill, [piece for tensor in known.values() for piece in _small_pieces(tensor)]):
            done += nbytes
            if progress:
                progress(done, total)
    return arrays


def _small_pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    if len(tensor.shape) == 1:
        yield tensor, 0, tensor.shape[0]
        return
    step = max(2, DENSE_PIECE_BYTES // (4 * tensor.shape[1]) // 2 * 2)
    for first in range(0, tensor.shape[0], step):
        yield tensor, first, min(first + step, tensor.shape[0])
