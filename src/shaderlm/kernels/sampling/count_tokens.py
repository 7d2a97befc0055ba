"""Route of count_tokens: the tokens of a prompt, for the penalties of the rows that follow."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width = dims["tokens"], dims["width"]
    kernel = Kernel("sampling/count_tokens", ("shared/batch",))
    buffers = {"batch": 16 * (1 + tokens), "sequences": f32(tokens), "counts": f32(dims["slots"] * width)}
    return LaunchList((covering(kernel, tokens, {"tokens": tokens, "width": width}),), buffers)


ROUTES: tuple[Route, ...] = (Route("count_tokens", "rows", _launch_list),)
