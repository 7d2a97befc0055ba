"""Route of gated_delta_rule: the state of each head in registers, row by row."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32
from ..wgsl import Kernel

_PARTS, _COLUMNS = 4, 32
_MAX_KEYS = 256  # a lane has KEYS / 4 values of the state in registers


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, keys, values = dims["tokens"], dims["Hv"], dims["Dk"], dims["Dv"]
    constants = {
        "ONE_ROW": tokens == 1,
        "SINGLE": dims["single"],
        "GROUPED": dims["grouped"],
        "KEYS": keys,
        "ROWS": keys // _PARTS,
    }
    params = {"key_heads": dims["Hk"], "value_heads": heads, "values": values}
    kernel = Kernel("recurrent/gated_delta_rule", ("shared/batch", "recurrent/states"))
    dispatch = Dispatch(kernel, tokens * heads * ceil_div(values, _COLUMNS), params, constants)
    buffers = {
        "x": f32(tokens * (2 * dims["Hk"] * keys + heads * values)),
        **dict.fromkeys(("alpha", "beta"), f32(tokens * heads)),
        "decay": f32(2 * heads),
        "batch": batch_bytes(tokens),
        "page_table": f32(1),
        "state": f32(heads * keys * values),
        "out": f32(tokens * heads * values),
    }
    return LaunchList((dispatch,), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    keys = dims["Dk"]
    if keys % _PARTS or keys > _MAX_KEYS:
        return f"Dk must be a multiple of {_PARTS} and at most {_MAX_KEYS}, it is {keys}"
    return None


ROUTES: tuple[Route, ...] = (Route("gated_delta_rule", "rows", _launch_list, _unsupported_reason),)
