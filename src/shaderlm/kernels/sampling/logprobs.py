"""Route of logprobs: the most likely tokens of every chunk, then of every row."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ...graph.sampling import ADJUSTMENT, MAX_LOGPROBS, OUTPUT
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32
from ..wgsl import Kernel
from .argmax import CHUNK


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    parts = ceil_div(width, CHUNK)
    shape = {"rows": rows, "width": width, "parts": parts}
    common = ("sampling/keys", "sampling/best", "sampling/workgroup", "sampling/adjustment")
    part = Kernel("sampling/logprobs_part", (*common, "sampling/next_best", "sampling/output_count_batch"))
    merge = Kernel("sampling/logprobs_merge", (*common, "sampling/output_count_batch"))
    buffers = {
        "logits": f32(rows * width),
        "outputs": OUTPUT.itemsize * rows,
        "adjustments": ADJUSTMENT.itemsize * rows,
        "batch": batch_bytes(dims["tokens"]),
        "tokens": f32(dims["slots"]),
        "bests": 8 * rows * parts * MAX_LOGPROBS,
        "sums": f32(rows * parts),
        "out": 8 * rows * (1 + MAX_LOGPROBS),
    }
    dispatches = (
        Dispatch(part, rows * parts, shape, {"CHUNK": CHUNK, "MOST": MAX_LOGPROBS}),
        Dispatch(merge, rows, shape, {"MOST": MAX_LOGPROBS}),
    )
    return LaunchList(dispatches, buffers)


ROUTES: tuple[Route, ...] = (Route("logprobs", "chunks", _launch_list),)
