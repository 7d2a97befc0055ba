"""Route of short_conv: a causal convolution over few tokens, whose state is the last of them."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, batch_bytes, covering, f32
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width, kernel = dims["tokens"], dims["width"], dims["kernel"]
    params, one_row = {"width": width, "taps": kernel}, {"ONE_ROW": tokens == 1}
    constants = {**one_row, "SINGLE": dims["single"], "SILU": dims["silu"]}
    rows = Kernel("recurrent/short_conv", ("shared/batch", "recurrent/states", "shared/silu"))
    dispatches = [covering(rows, tokens * width, params, constants)]
    if not dims["single"]:
        states = Kernel("recurrent/short_conv_state", ("shared/batch", "recurrent/states"))
        dispatches.append(covering(states, tokens * width, params, one_row))
    buffers = {
        **dict.fromkeys(("x", "out"), f32(tokens * width)),
        "weight": f32(width * kernel),
        "batch": batch_bytes(tokens),
        "page_table": f32(1),
        "state": f32((kernel - 1) * width),
    }
    return LaunchList(tuple(dispatches), buffers)


ROUTES: tuple[Route, ...] = (Route("short_conv", "channels", _launch_list),)
