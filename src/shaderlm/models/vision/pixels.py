"""From the pixels of a picture to the patches that a tower reads: resizing, cutting and scaling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...graph import vision
from ...graph.graph import Builder, Graph
from ...vision.processors import Layout, Processor
from .sizes import whole_blocks


class _Axis(NamedTuple):
    """One resizing along one axis: [outer, size, inner] → [outer, to, inner]."""

    name: str
    outer: int
    size: int
    inner: int
    to: int
    first: NDArray[np.uint32]
    weights: NDArray[np.float32]


def _axes(layout: Layout, stage: int, processor: Processor) -> Iterator[_Axis]:
    """Columns first, then rows, as far as the size changes.

    Where stages are put together they are numbers: columns of the picture are resized to the same size.
    """
    rows, columns = layout.sizes[stage - 1] if stage else layout.source
    height, width = layout.sizes[stage]
    uncut = layout.uncut or (height, width)
    if (columns, uncut[1]) != (width, width) or (not stage and layout.tile_grid != (0, 0)):
        weights = _resized_and_cut(columns, uncut[1], width, processor)
        yield _Axis(f"resized.{stage}.columns", rows, columns, 3, width, *weights)
    if (rows, uncut[0]) != (height, height):
        weights = _resized_and_cut(rows, uncut[0], height, processor)
        yield _Axis(f"resized.{stage}.rows", 1, rows, 3 * width, height, *weights)


def _resized_and_cut(
    size: int, uncut: int, to: int, processor: Processor
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Of an axis that is resized, the middle: what is cut away is not computed."""
    first, weights = vision.resize_weights(size, uncut, processor.filter)
    begin = (uncut - to) // 2
    return first[begin : begin + to], weights[begin : begin + to]


def patches_graph(layout: Layout, processor: Processor) -> Graph:
    """pixels [rows, columns, 3], bytes → patches [n, 3 · patch²] of a layout, shifted and scaled."""
    b = Builder()
    x = pixels = b.tensor("pixels", *layout.source, 3, role="input", format="u8")
    b.tensor("corners", layout.patches, 2, role="input", format="u32")
    b.tensor("factors", 6, role="input")
    stages = []
    for i, size in enumerate(layout.sizes):
        for axis in _axes(layout, i, processor):
            out = b.tensor(f"{axis.name}.out", axis.outer, axis.to, axis.inner)
            first = b.tensor(f"{axis.name}.first", axis.to, role="input", format="u32")
            weights = b.tensor(f"{axis.name}.weights", axis.to, axis.weights.shape[1], role="input")
            dims: dict[str, Any] = {"outer": axis.outer, "size": axis.size, "inner": axis.inner, "to": axis.to}
            dims |= {"taps": axis.weights.shape[1], "bytes": x == pixels}
            b.add("resize", dims, {"x": x, "first": first, "weights": weights}, "pixels", out=out)
            x = out
        stages.append((x, 3 * size[0] * size[1]))
    used = sorted({tile.stage for tile in layout.tiles})
    x, count = stages[used[0]]
    for stage in used[1:]:
        other, more = stages[stage]
        both = b.tensor(f"stages.{stage}", count + more)
        b.add("concat", {"a": count, "b": more}, {"a": x, "b": other}, "pixels", out=both)
        x, count = both, count + more
    width = whole_blocks(3 * layout.patch**2)
    out = b.tensor("patches", layout.patches, width)
    dims = {"tokens": layout.patches, "patch": layout.patch, "count": count, "width": width, "bytes": x == pixels}
    b.add("patches", dims, {"x": x, "corners": "corners", "factors": "factors"}, "pixels", out=out)
    return b.graph(out)


def patches_inputs(layout: Layout, processor: Processor) -> dict[str, NDArray[Any]]:
    """What the graph of a layout reads beside pixels: where patches begin, and what becomes of their values."""
    first, offsets = 0, {}
    for stage in sorted({tile.stage for tile in layout.tiles}):
        height, width = layout.sizes[stage]
        offsets[stage] = first, width
        first += 3 * height * width
    places, corners, at = layout.places(), [], 0
    for tile, count in zip(layout.tiles, layout.tile_patches, strict=True):
        begin, width = offsets[tile.stage]
        rows, columns = (places[at : at + count] * layout.patch + (tile.top, tile.left)).T
        corners.append(np.stack([begin + 3 * (rows * width + columns), np.full(count, 3 * width)], axis=1))
        at += count
    scale = [1 / (255 * std) for std in processor.std]
    shift = [-mean / std for mean, std in zip(processor.mean, processor.std, strict=True)]
    tables = [axis for i in range(len(layout.sizes)) for axis in _axes(layout, i, processor)]
    return {
        **{f"{axis.name}.first": axis.first for axis in tables},
        **{f"{axis.name}.weights": axis.weights for axis in tables},
        "corners": np.concatenate(corners).astype(np.uint32),
        "factors": np.array([*scale, *shift], np.float32),
    }
