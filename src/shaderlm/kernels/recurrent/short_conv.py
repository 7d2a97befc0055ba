"""Routes of short_conv and its chains: a causal convolution over few tokens, whose state is the last of them."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32, is_specialised
from ..wgsl import Constant, Kernel

_WORKGROUP, _ROWS = 64, 8
_OPS = ("short_conv", "slice_short_conv", "mul_short_conv_mul")


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width, kernel, stride = dims["tokens"], dims["width"], dims["kernel"], dims.get("stride", dims["width"])
    gated = "before_first" in dims
    params = {"width": width, "stride": stride, "first": dims["before_first"] if gated else dims.get("first", 0)}
    params |= {name: dims.get(name, 0) for name in ("values_first", "after_first")}
    columns = ("recurrent/columns_gated",) if gated else ("recurrent/columns_each", "shared/silu")
    include = ("shared/batch", "recurrent/states", *columns)
    each = 1 if dims["single"] else _ROWS  # rows of a thread
    constants: dict[str, Constant] = {"ONE_ROW": tokens == 1, "WG": _WORKGROUP, "TAPS": kernel, "ROWS": each}
    constants |= {} if gated else {"SILU": dims["silu"]}
    workgroups, specialised = ceil_div(tokens, each) * ceil_div(width, _WORKGROUP), is_specialised(tokens, caps)
    rows = {**constants, "SINGLE": dims["single"]}
    dispatches = [Dispatch(Kernel("recurrent/short_conv", include), workgroups, params, rows, specialised=specialised)]
    if not dims["single"]:
        states = Kernel("recurrent/short_conv_state", include)
        dispatches.append(Dispatch(states, workgroups, params, constants, specialised=specialised))
    buffers = {
        "x": f32(tokens * stride),
        "out": f32(tokens * width),
        "weight": f32(width * kernel),
        "batch": batch_bytes(tokens),
        "page_table": f32(1),
        "state": f32(kernel * width),
    }
    return LaunchList(tuple(dispatches), buffers)


ROUTES: tuple[Route, ...] = tuple(Route(op, "channels", _launch_list) for op in _OPS)
