"""Routes of argmax: a workgroup per row, or many workgroups per row and a second pass."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, ceil_div, f32, is_specialised
from ..wgsl import Kernel

CHUNK = 2048


def part_dispatch(rows: int, width: int, operand: str, counted: bool, caps: DeviceCaps) -> Dispatch:
    """The best of each chunk. `counted`: the true number of rows is in the batch."""
    parts = ceil_div(width, CHUNK)
    count = f"sampling/output_count_{'batch' if counted else 'fixed'}"
    return Dispatch(
        Kernel("sampling/argmax_part", ("sampling/keys", "sampling/best", count)),
        rows * parts,
        {"rows": rows, "width": width, "parts": parts},
        {"CHUNK": CHUNK},
        {"logits": operand},
        specialised=is_specialised(rows, caps),
    )


def _split_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    parts = ceil_div(width, CHUNK)
    merge = Dispatch(
        Kernel("sampling/argmax_merge", ("sampling/best", "sampling/best_part")),
        rows,
        {"rows": rows, "parts": parts},
        specialised=is_specialised(rows, caps),
    )
    buffers = {
        "x": f32(rows * width),
        "keys": f32(rows * parts),
        "indices": f32(rows * parts),
        "out": f32(rows),
    }
    return LaunchList((part_dispatch(rows, width, "x", False, caps), merge), buffers)


def _split_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    short = dims["width"] <= CHUNK
    return f"width must be above {CHUNK} for a second pass to pay, width is {dims['width']}" if short else None


def _row_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    kernel = Kernel("sampling/argmax_row", ("sampling/keys", "sampling/best"))
    dispatch = Dispatch(kernel, rows, {"rows": rows, "width": width}, bind={"logits": "x"})
    return LaunchList((dispatch,), {"x": f32(rows * width), "out": f32(rows)})


ROUTES: tuple[Route, ...] = (
    Route("argmax", "split", _split_launch_list, _split_unsupported_reason),
    Route("argmax", "row", _row_launch_list),
)
