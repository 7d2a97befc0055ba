"""Routes of argmax: a workgroup per row, or many workgroups per row and a second pass."""

from __future__ import annotations

from ...gpu.facts import Facts
from ..route import Dims, Dispatch, Recipe, Route, ceil_div, f32
from ..wgsl import Kernel

_CHUNK = 2048


def _split_recipe(dims: Dims, facts: Facts) -> Recipe:
    rows, width = dims["rows"], dims["width"]
    parts = ceil_div(width, _CHUNK)
    written = rows == 1 and not facts.software
    find = Dispatch(
        Kernel("pointwise/argmax_part", ("shared/best",)),
        rows * parts,
        {"rows": rows, "width": width, "parts": parts},
        {"CHUNK": _CHUNK},
        written=written,
    )
    merge = Dispatch(
        Kernel("pointwise/argmax_merge", ("shared/best",)), rows, {"rows": rows, "parts": parts}, written=written
    )
    buffers = {
        "x": f32(rows * width),
        "values": f32(rows * parts),
        "indices": f32(rows * parts),
        "out": f32(rows),
    }
    return Recipe((find, merge), buffers)


def _split_why_not(dims: Dims, facts: Facts) -> str | None:
    short = dims["width"] <= _CHUNK
    return f"width must be above {_CHUNK} for a second pass to pay, width is {dims['width']}" if short else None


def _row_recipe(dims: Dims, facts: Facts) -> Recipe:
    rows, width = dims["rows"], dims["width"]
    kernel = Kernel("pointwise/argmax_row", ("shared/best",))
    return Recipe((Dispatch(kernel, rows, {"rows": rows, "width": width}),), {"x": f32(rows * width), "out": f32(rows)})


ROUTES = (
    Route("argmax", "split", _split_recipe, _split_why_not),
    Route("argmax", "row", _row_recipe),
)
