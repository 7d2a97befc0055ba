"""Route of short_conv_gated_delta_rule: one workgroup for a row and a value head."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, f32, is_specialised
from ..wgsl import Constant, Kernel
from .gated_delta_rule import channels

_MAX_ROWS = 64  # of a column of the state, in registers of one lane, four columns each
_MOST_LANES = 512


def _parts(dims: Dims, caps: DeviceCaps) -> int:
    """Lanes that share four columns of the state: as many as fit, a power of two; 0 if none do."""
    quads, parts = dims["Dv"] // 4, 1
    limit = min(_MOST_LANES, caps.max_invocations)
    if dims["Dv"] % 4 or quads > limit:
        return 0
    while 2 * parts * quads <= limit and dims["Dk"] % (2 * parts) == 0:
        parts *= 2
    return parts


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, keys, values = dims["tokens"], dims["Hv"], dims["Dk"], dims["Dv"]
    parts, width = max(1, _parts(dims, caps)), channels(dims)
    constants: dict[str, Constant] = {
        "ONE_ROW": tokens == 1,
        "GROUPED": dims["grouped"],
        "KEYS": keys,
        "VALUES": values,
        "PARTS": parts,
        "ROWS": keys // parts,
        "WG": parts * max(1, values // 4),
        "TAPS": dims["kernel"],
    }
    names = ("stride", "first", "gates_stride", "gate_first", "alpha_first", "beta_first", "eps")
    params = {"key_heads": dims["Hk"], "value_heads": heads, **{name: dims[name] for name in names}}
    include = ("shared/batch", "recurrent/states", "recurrent/delta_factors", "shared/silu")
    kernel = Kernel("recurrent/short_conv_gated_delta_rule", include, unroll=True)
    buffers = {
        "x": f32(tokens * dims["stride"]),
        "gates": f32(tokens * dims["gates_stride"]),
        "conv_weight": f32(width * dims["kernel"]),
        "decay": f32(2 * heads),
        "norm_weight": f32(values),
        "batch": batch_bytes(tokens),
        "page_table": f32(1),
        "conv_state": f32(dims["kernel"] * width),
        "state": f32(heads * keys * values),
        "out": f32(tokens * heads * values),
    }
    specialised = is_specialised(tokens, caps)
    return LaunchList((Dispatch(kernel, tokens * heads, params, constants, specialised=specialised),), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if not dims["single"]:
        return "it is for rows of different sequences"
    parts = _parts(dims, caps)
    if not parts:
        return (
            f"Dv must be a multiple of 4 and at most 4 · {min(_MOST_LANES, caps.max_invocations)}, it is {dims['Dv']}"
        )
    rows = dims["Dk"] // parts
    return f"a lane has at most {_MAX_ROWS} rows of the state, here {rows}" if rows > _MAX_ROWS else None


ROUTES: tuple[Route, ...] = (Route("short_conv_gated_delta_rule", "heads", _launch_list, _unsupported_reason),)
