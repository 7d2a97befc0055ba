"""Routes of argmax: a workgroup per row, or many workgroups per row and a second pass."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, ceil_div, f32
from ..wgsl import Kernel

_CHUNK = 2048


def _split_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    parts = ceil_div(width, _CHUNK)
    specialised = rows == 1 and not caps.software
    find = Dispatch(
        Kernel("pointwise/argmax_part", ("shared/best",)),
        rows * parts,
        {"rows": rows, "width": width, "parts": parts},
        {"CHUNK": _CHUNK},
        specialised=specialised,
    )
    merge = Dispatch(
        Kernel("pointwise/argmax_merge", ("shared/best",)),
        rows,
        {"rows": rows, "parts": parts},
        specialised=specialised,
    )
    buffers = {
        "x": f32(rows * width),
        "values": f32(rows * parts),
        "indices": f32(rows * parts),
        "out": f32(rows),
    }
    return LaunchList((find, merge), buffers)


def _split_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    short = dims["width"] <= _CHUNK
    return f"width must be above {_CHUNK} for a second pass to pay, width is {dims['width']}" if short else None


def _row_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    kernel = Kernel("pointwise/argmax_row", ("shared/best",))
    return LaunchList(
        (Dispatch(kernel, rows, {"rows": rows, "width": width}),), {"x": f32(rows * width), "out": f32(rows)}
    )


ROUTES = (
    Route("argmax", "split", _split_launch_list, _split_unsupported_reason),
    Route("argmax", "row", _row_launch_list),
)
