"""Route of add_gated."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_if_read, f32, row_count
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width, k = dims["tokens"], dims["width"], dims["K"]
    kernel = Kernel("experts/add_gated", (row_count(dims),))
    dispatch = Dispatch(kernel, tokens, {"tokens": tokens, "width": width, "k": k})
    rows = f32(tokens * width)
    buffers = {"a": rows, "b": rows, "x": f32(tokens * k), "gate": f32(k), "out": rows, **batch_if_read(dims)}
    return LaunchList((dispatch,), buffers)


ROUTES = (Route("add_gated", "workgroup", _launch_list),)
