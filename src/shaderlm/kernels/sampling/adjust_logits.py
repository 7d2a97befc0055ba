"""Route of adjust_logits: penalties, biases and masks of every row; what they are is read from buffers."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ...graph.sampling import ADJUSTMENT, BIAS
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32
from ..wgsl import Kernel
from .argmax import CHUNK


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    parts = ceil_div(width, CHUNK)
    dispatch = Dispatch(
        Kernel("sampling/adjust_logits", ("sampling/adjustment", "sampling/output_count_batch")),
        rows * parts,
        {"rows": rows, "width": width, "parts": parts},
        {"CHUNK": CHUNK},
    )
    buffers = {
        "logits": f32(rows * width),
        "adjustments": ADJUSTMENT.itemsize * rows,
        "batch": batch_bytes(dims["tokens"]),
        "counts": f32(dims["slots"] * width),
        "biases": BIAS.itemsize * dims["biases"],
        "masks": f32(dims["masks"] * ceil_div(width, 32)),
        "out": f32(rows * width),
    }
    return LaunchList((dispatch,), buffers)


ROUTES: tuple[Route, ...] = (Route("adjust_logits", "chunks", _launch_list),)
