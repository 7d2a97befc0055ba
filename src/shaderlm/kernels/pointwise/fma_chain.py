"""Route of fma_chain, which measures the arithmetic speed of a device."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Kernel

_VALUES = 16  # per thread


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    count = dims["count"]
    params = {"count": count // 4, "rounds": dims["rounds"], "factor": 0.75, "term": 0.25}
    dispatch = covering(Kernel("pointwise/fma_chain_vec4"), count // _VALUES, params)
    return LaunchList((dispatch,), {"x": f32(count), "out": f32(count)})


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return f"count % {_VALUES} must be 0, count is {dims['count']}" if dims["count"] % _VALUES else None


ROUTES: tuple[Route, ...] = (Route("fma_chain", "vec4", _launch_list, _unsupported_reason),)
