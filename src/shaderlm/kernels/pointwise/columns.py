"""Route of columns: a part of each row, copied out."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width, count = dims["rows"], dims["width"], dims["count"]
    params = {"rows": rows, "width": width, "first": dims["first"], "count": count}
    buffers = {"x": f32(rows * width), "out": f32(rows * count)}
    return LaunchList((covering(Kernel("pointwise/columns"), rows * count, params),), buffers)


ROUTES = (Route("columns", "values", _launch_list),)
