"""Route of rope: rotary positions, per row, from a table of (cos, sin)."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, batch_bytes, covering, f32
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, width, rotary = dims["tokens"], dims["H"], dims["D"], dims["rotary"]
    count = tokens * heads * width
    # The table has a row per position: at least one.
    buffers = {"x": f32(count), "batch": batch_bytes(tokens), "table": f32(rotary), "out": f32(count)}
    params = {"heads": heads, "width": width, "rotary": rotary}
    constants = {"ONE_ROW": tokens == 1, "INTERLEAVED": dims["interleaved"]}
    kernel = Kernel("pointwise/rope", ("shared/batch",))
    return LaunchList((covering(kernel, count // 2, params, constants),), buffers)


ROUTES: tuple[Route, ...] = (Route("rope", "pairs", _launch_list),)
