"""Routes of ops of towers: positions, attention within spans, bounds, means of rows, and columns of zeros."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, ceil_div, covering, f32
from ..wgsl import Kernel

_ROWS = 64  # of a workgroup
_MOST = 128  # values of a head: a thread has two rows of them in registers


def _weighted_rows(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width, taps = dims["tokens"], dims["K"], dims["taps"]
    params = {"count": tokens * width, "width": width, "taps": taps}
    buffers = {"weight": f32(dims["N"] * width), "rows": f32(tokens * taps), "factors": f32(tokens * taps)}
    buffers["out"] = f32(tokens * width)
    return LaunchList((covering(Kernel("vision/weighted_rows"), tokens * width, params),), buffers)


def _attend_spans(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, width = dims["tokens"], dims["H"], dims["D"]
    rows = f32(tokens * heads * width)
    dispatch = Dispatch(
        Kernel("vision/attend_spans"),
        ceil_div(tokens, _ROWS) * heads,
        {"tokens": tokens, "heads": heads, "scale": float(dims["scale"])},
        {"QUADS": ceil_div(width, 4), "WG": _ROWS},
    )
    return LaunchList((dispatch,), {"q": rows, "k": rows, "v": rows, "spans": f32(2 * tokens), "out": rows})


def _whole_quads(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["D"] % 4 or dims["D"] > _MOST:
        return f"D must be a multiple of 4 and at most {_MOST}, D is {dims['D']}"
    return None


def _clamp(dims: Dims, caps: DeviceCaps) -> LaunchList:
    buffers = {"x": f32(dims["count"]), "low": f32(1), "high": f32(1), "out": f32(dims["count"])}
    return LaunchList((covering(Kernel("vision/clamp"), dims["count"], {"count": dims["count"]}),), buffers)


def _mean_rows(dims: Dims, caps: DeviceCaps) -> LaunchList:
    count = dims["tokens"] * dims["width"]
    params = {"count": count, "size": dims["group"], "width": dims["width"]}
    buffers = {"x": f32(count * dims["group"]), "out": f32(count)}
    return LaunchList((covering(Kernel("vision/mean_rows"), count, params),), buffers)


def _pad_columns(dims: Dims, caps: DeviceCaps) -> LaunchList:
    count = dims["tokens"] * dims["to"]
    params = {"count": count, "width": dims["width"], "to": dims["to"]}
    buffers = {"x": f32(dims["tokens"] * dims["width"]), "out": f32(count)}
    return LaunchList((covering(Kernel("vision/pad_columns"), count, params),), buffers)


def _rope_by_row(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, width, rotary = dims["tokens"], dims["H"], dims["D"], dims["rotary"]
    count = tokens * heads * width
    params = {"count": count // 2, "heads": heads, "width": width, "rotary": rotary}
    buffers = {"x": f32(count), "table": f32(tokens * rotary), "out": f32(count)}
    kernel = Kernel("vision/rope_by_row")
    return LaunchList((covering(kernel, count // 2, params, {"INTERLEAVED": dims["interleaved"]}),), buffers)


ROUTES: tuple[Route, ...] = (
    Route("weighted_rows", "values", _weighted_rows),
    Route("attend_spans", "rows", _attend_spans, _whole_quads),
    Route("clamp", "values", _clamp),
    Route("mean_rows", "values", _mean_rows),
    Route("pad_columns", "values", _pad_columns),
    Route("rope_by_row", "pairs", _rope_by_row),
)
