"""Route of slice: some columns of each row, copied out."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, batch_if_read, covering, f32, row_count
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width, count = dims["tokens"], dims["width"], dims["count"]
    params = {"tokens": tokens, "width": width, "first": dims["first"], "count": count}
    buffers = {"x": f32(tokens * width), "out": f32(tokens * count), **batch_if_read(dims)}
    return LaunchList((covering(Kernel("pointwise/slice", (row_count(dims),)), tokens * count, params),), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return None if dims["step"] == 1 else f"it copies neighbouring columns, step is {dims['step']}"


ROUTES: tuple[Route, ...] = (Route("slice", "values", _launch_list, _unsupported_reason),)
