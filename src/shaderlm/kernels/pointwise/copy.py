"""Route of copy, which measures the memory bandwidth of a device."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    count = dims["count"]
    dispatch = covering(Kernel("pointwise/copy_vec4"), count // 4, {"count": count // 4})
    return LaunchList((dispatch,), {"x": f32(count), "out": f32(count)})


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return f"count % 4 must be 0, count is {dims['count']}" if dims["count"] % 4 else None


ROUTES: tuple[Route, ...] = (Route("copy", "vec4", _launch_list, _unsupported_reason),)
