"""Route of take_rows: the rows of a step that give logits."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, batch_bytes, covering, f32
from ..wgsl import Kernel

_OUTPUT_BYTES = 32


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, rows, width = dims["tokens"], dims["rows"], dims["width"]
    params = {"tokens": tokens, "rows": rows, "width": width}
    buffers = {"x": f32(tokens * width), "outputs": _OUTPUT_BYTES * rows, "batch": batch_bytes(tokens)}
    buffers["out"] = f32(rows * width)
    return LaunchList((covering(Kernel("pointwise/take_rows"), rows * width, params),), buffers)


ROUTES: tuple[Route, ...] = (Route("take_rows", "values", _launch_list),)
