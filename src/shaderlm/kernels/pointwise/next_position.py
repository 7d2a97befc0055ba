"""Route of next_position, which ends a step, so that the next one needs nothing from the host."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, f32
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    dispatch = Dispatch(Kernel("pointwise/next_position"), 1, {"by": dims["by"]})
    return LaunchList((dispatch,), {"positions": f32(1)})


ROUTES = (Route("next_position", "thread", _launch_list),)
