"""Route of rope: rotary positions from a table of (cos, sin)."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, width, rotary = dims["T"], dims["H"], dims["D"], dims["rotary"]
    params = {"tokens": tokens, "heads": heads, "width": width, "rotary": rotary}
    count = tokens * heads * width
    buffers = {
        "x": f32(count),
        "positions": f32(tokens),
        "table": f32(dims["positions"] * rotary),
        "out": f32(count),
    }
    constants = {"INTERLEAVED": dims["interleaved"]}
    return LaunchList((covering(Kernel("pointwise/rope"), count // 2, params, constants),), buffers)


ROUTES = (Route("rope", "pairs", _launch_list),)
