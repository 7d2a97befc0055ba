"""Weights from a checkpoint to where they are used: packed into GPU buffers piece by piece, or dense in memory.

The source gives rows of the checkpoint's tensors; a graph's weight may consist of several of them, stacked or row by
row in turns. Never more than one piece of a weight is held beside the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..compile.plan import weight_buffer
from ..gpu import Array, Device, DeviceCaps
from ..graph.graph import Graph, Tensor
from ..kernels.linear import packed
from ..kernels.linear.formats import FORMATS
from ..kernels.route import part

PIECE_BYTES = 16 << 20
FLUSH_BYTES = 64 << 20
DENSE_PIECE_BYTES = 4 << 20

Progress = Callable[[int, int], None]  # done, total, in bytes


class Source(Protocol):
    """Where weights come from."""

    def rows(self, name: str, kind: str, first: int, end: int) -> Array:
        """Rows of one tensor in a device's format: blocks as GGUF has them, or dense f32 or f16."""
        ...

    def vector(self, name: str) -> Array:
        """A one-dimensional tensor in f32."""
        ...


@dataclass(frozen=True)
class Piece:
    """Some bytes of a buffer."""

    buffer: str
    offset: int
    data: Array


def buffer_sizes(graph: Graph, caps: DeviceCaps) -> dict[str, int]:
    """Bytes of every buffer that the graph's weights need, by the names that plans use."""
    sizes: dict[str, int] = {}
    for tensor, key, dims in _operands(graph):
        if key == "plain":
            sizes[tensor.name] = 4 * tensor.size
            continue
        lay = packed.layout(dims)
        for i, (first, end) in enumerate(packed.ranges(dims, caps)):
            if key == "bias":
                sizes[weight_buffer(tensor, part("bias", i))] = 4 * (end - first)
            else:
                sizes[weight_buffer(tensor, part("weight", i))] = (end - first) * lay.row_bytes
                sizes[weight_buffer(tensor, part("scales", i))] = (end - first) * lay.groups * lay.group_bytes
    return {name: size for name, size in sizes.items() if size}


def pieces(graph: Graph, caps: DeviceCaps, source: Source) -> Iterator[Piece]:
    """The contents of those buffers, piece by piece."""
    for tensor, key, dims in _operands(graph):
        if key == "plain":
            yield Piece(tensor.name, 0, _vector(tensor, source))
        elif key == "bias":
            whole = _vector(tensor, source)
            for i, (first, end) in enumerate(packed.ranges(dims, caps)):
                yield Piece(weight_buffer(tensor, part("bias", i)), 0, whole[first:end])
        else:
            yield from _matrix(tensor, dims, caps, source)


def _operands(graph: Graph) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
    """Each weight once: the tensor, "plain", "bias" or "weight", and the dims of the matrix it belongs to."""
    seen: set[str] = set()
    for node in graph.nodes:
        for key, name in node.inputs.items():
            tensor = graph.tensors[name]
            if tensor.role != "weight" or name in seen:
                continue
            seen.add(name)
            if key in ("weight", "bias") and "format" in node.dims:
                yield tensor, key, {name: node.dims[name] for name in ("N", "K", "format")}
            else:
                yield tensor, "plain", {}


def _vector(tensor: Tensor, source: Source) -> Array:
    parts = [source.vector(name) for name in tensor.parts]
    joined = np.stack(parts, axis=1) if tensor.interleaved else np.concatenate(parts)
    return np.ascontiguousarray(joined.reshape(-1), np.float32)


def _matrix(tensor: Tensor, dims: dict[str, Any], caps: DeviceCaps, source: Source) -> Iterator[Piece]:
    form, lay = FORMATS[tensor.format], packed.layout(dims)
    step = max(2, PIECE_BYTES // (lay.row_bytes + lay.groups * lay.group_bytes) // 2 * 2)
    for i, (start, stop) in enumerate(packed.ranges(dims, caps)):
        for first in range(start, stop, step):
            end = min(first + step, stop)
            words, scales = form.repack(_rows(tensor, first, end, source))
            yield Piece(weight_buffer(tensor, part("weight", i)), (first - start) * lay.row_bytes, words)
            if scales.size:
                at = (first - start) * lay.groups * lay.group_bytes
                yield Piece(weight_buffer(tensor, part("scales", i)), at, scales)


def _rows(tensor: Tensor, first: int, end: int, source: Source) -> Array:
    """Rows of a weight that may be stacked of several tensors, or have their rows in turns."""
    count = len(tensor.parts)
    if count == 1:
        return source.rows(tensor.parts[0], tensor.format, first, end)
    if tensor.interleaved:
        each = [source.rows(name, tensor.format, first // count, end // count) for name in tensor.parts]
        return np.stack(each, axis=1).reshape(end - first, -1)
    found, at = [], 0
    for name, rows in zip(tensor.parts, tensor.part_rows, strict=True):
        a, b = max(first, at), min(end, at + rows)
        if a < b:
            found.append(source.rows(name, tensor.format, a - at, b - at))
        at += rows
    return np.concatenate(found)


def upload(device: Device, graph: Graph, source: Source, progress: Progress | None = None) -> dict[str, Any]:
    """Weights into buffers on the device. What was already made is given back if anything fails."""
    sizes = buffer_sizes(graph, device.caps)
    total, done, waiting = sum(sizes.values()), 0, 0
    buffers: dict[str, Any] = {}
    try:
        for name, size in sizes.items():
            buffers[name] = device.buffer(size)
        for piece in pieces(graph, device.caps, source):
            device.write(buffers[piece.buffer], piece.data, piece.offset)
            done, waiting = done + piece.data.nbytes, waiting + piece.data.nbytes
            if waiting >= FLUSH_BYTES:  # what is written lies in host memory until the queue has run
                device.flush()
                waiting = 0
            if progress:
                progress(done, total)
        device.flush()
    except BaseException:
        for native in buffers.values():
            native.destroy()
        raise
    return buffers


def dense(graph: Graph, source: Source, progress: Progress | None = None) -> dict[str, Array]:
    """Weights as f32 arrays in memory, for the interpreter. The graph's weights must all be of the format f32."""
    weights = graph.weights()
    found: dict[str, Array] = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in weights}
    total, done = sum(4 * tensor.size for tensor in weights), 0

    def fill(piece: tuple[Tensor, int, int]) -> int:
        tensor, first, end = piece
        if len(tensor.shape) == 1:
            found[tensor.name][:] = _vector(tensor, source)
        else:
            found[tensor.name][first:end] = _rows(tensor, first, end, source)
        return found[tensor.name][first:end].nbytes

    # Pieces that stay in a core's cache, on all cores: NumPy lets go of Python's lock while it computes.
    with ThreadPoolExecutor() as pool:
        for nbytes in pool.map(fill, [piece for tensor in weights for piece in _small_pieces(tensor)]):
            done += nbytes
            if progress:
                progress(done, total)
    return found


def _small_pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    if len(tensor.shape) == 1:
        yield tensor, 0, tensor.shape[0]
        return
    step = max(2, DENSE_PIECE_BYTES // (4 * tensor.shape[1]) // 2 * 2)
    for first in range(0, tensor.shape[0], step):
        yield tensor, first, min(first + step, tensor.shape[0])
