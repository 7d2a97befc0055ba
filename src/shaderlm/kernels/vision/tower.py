"""Routes of ops of towers: positions, attention within spans, bounds, means of rows, and columns of zeros."""

from __future__ import annotations

from collections.abc import Mapping

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, ceil_div, covering, f32
from ..wgsl import Constant, Kernel

_ROWS = 64  # of a workgroup
_MOST = 128  # values of a head: a thread has two rows of them in registers


def values_of(*sizes: int) -> tuple[int, dict[str, Constant]]:
    """How many values a thread takes, four where all sizes are whole quads; and the type of that in a kernel."""
    return (1, {"value": "f32"}) if any(size % 4 for size in sizes) else (4, {"value": "vec4<f32>"})


def _weighted_rows(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width, taps = dims["tokens"], dims["K"], dims["taps"]
    unit, value = values_of(width)
    count = tokens * width // unit
    params = {"count": count, "width": width // unit, "taps": taps}
    buffers = {"weight": f32(dims["N"] * width), "rows": f32(tokens * taps), "factors": f32(tokens * taps)}
    buffers["out"] = f32(tokens * width)
    return LaunchList((covering(Kernel("vision/weighted_rows"), count, params, value),), buffers)


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


def heads_of_product(dims: Dims, width: int, bind: Mapping[str, str], *, halves: bool) -> Dispatch:
    """The dispatch that makes q, k and v of a product that has all three, with heads of so many values."""
    rotary, count = dims.get("rotary", 0), dims["tokens"] * dims["H"] * width // 8
    params = {"count": count, "heads": dims["H"], "quads": dims["D"] // 4, "octets": width // 8, "half": rotary // 8}
    kernel = Kernel("vision/spans_qkv", (f"vision/turns_{'by_row' if rotary else 'none'}",))
    return covering(kernel, count, params, {"HALVES": halves}, bind)


def product_buffers(dims: Dims) -> dict[str, int]:
    """What the dispatch reads."""
    table = {"table": f32(dims["tokens"] * dims["rotary"])} if "rotary" in dims else {}
    return {"x": f32(3 * dims["tokens"] * dims["H"] * dims["D"]), **table}


def rotary_unsupported_reason(dims: Dims) -> str | None:
    """Why the dispatch does not rotate heads."""
    rotary = dims.get("rotary", 0)
    return f"rotary must be a multiple of 8, it is {rotary}" if rotary % 8 else None


def _attend_product(dims: Dims, caps: DeviceCaps) -> LaunchList:
    split = heads_of_product(dims, dims["D"], {}, halves=False)
    attended = _attend_spans(dims, caps)
    return LaunchList((split, *attended.dispatches), {**attended.buffers, **product_buffers(dims)})


def _whole_octets(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["D"] % 8:
        return f"D must be a multiple of 8, D is {dims['D']}"
    return rotary_unsupported_reason(dims) or _whole_quads(dims, caps)


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


def widths_changed(count: int, width: int, to: int, bind: Mapping[str, str] | None = None) -> Dispatch:
    """The dispatch that makes so many values: rows of another width, with zeros or without the last values."""
    unit, value = values_of(width, to)
    params = {"count": count // unit, "width": width // unit, "to": to // unit}
    return covering(Kernel("vision/pad_columns"), count // unit, params, value, bind)


def _pad_columns(dims: Dims, caps: DeviceCaps) -> LaunchList:
    count = dims["tokens"] * dims["to"]
    buffers = {"x": f32(dims["tokens"] * dims["width"]), "out": f32(count)}
    return LaunchList((widths_changed(count, dims["width"], dims["to"]),), buffers)


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
    *(
        Route(op, "rows", _attend_product, _whole_octets)
        for op in ("slice_attend_spans", "slice_rope_by_row_attend_spans")
    ),
    Route("clamp", "values", _clamp),
    Route("mean_rows", "values", _mean_rows),
    Route("pad_columns", "values", _pad_columns),
    Route("rope_by_row", "pairs", _rope_by_row),
)
