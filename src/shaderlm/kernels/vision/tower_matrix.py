"""The routes of attend_spans with matrix units: keys and values in f16, and the kernel that reads prompts.

A token batch is made of the spans, in which rows of a span see all of it. Heads are padded to whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ...gpu.caps import DeviceCaps
from ..attention.matrix import TILES, Tile
from ..linear.matrix import matrix_shape, units_unsupported_reason
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, covering, f32, over_limits
from ..wgsl import Kernel
from .tower import heads_of_product, product_buffers, rotary_unsupported_reason, widths_changed

_NEEDS = frozenset({"f16", "subgroups", "subgroup_matrix"})
_INCLUDE = (
    *("attention/segments_spans", "attention/served_rows", "shared/batch", "shared/batch_spans"),
    *("attention/visible", "attention/sinks_none"),
)
_LEAST = 64  # rows from which on it pays


def _as_attention(dims: Dims, width: int) -> dict[str, Any]:
    """Dims of attention with heads of so many values: what its tiles follow from."""
    return {"D": width, "Hq": dims["H"], "Hkv": dims["H"], "window": 0, "softcap": 0.0, "tokens": dims["tokens"]}


def _attended(dims: Dims, caps: DeviceCaps) -> tuple[Dispatch, int] | None:
    """The dispatch with the fastest tile that fits, and the width that heads are padded to."""
    shape, lanes = matrix_shape(caps), caps.subgroup_max
    if shape is None or not lanes:
        return None
    unit = max(shape.n, shape.k, 8)
    width = ceil_div(dims["D"], unit) * unit
    for tile in TILES:
        if tile.fits(_as_attention(dims, width), shape, lanes):
            dispatch = _dispatch(tile, dims, width, tile.constants(_as_attention(dims, width), shape, lanes))
            if over_limits(LaunchList((dispatch,), {}), caps) is None:
                return dispatch, width
    return None


def _dispatch(tile: Tile, dims: Dims, width: int, constants: dict[str, Any]) -> Dispatch:
    rows = tile.row_groups * tile.pairs
    names = {"k_cache": "k16", "v_cache": "v16", "batch": "records"}
    return Dispatch(
        Kernel("attention/attention_matrix", _INCLUDE, _NEEDS, unroll=True),
        ceil_div(dims["tokens"], rows) * dims["H"],
        {"kv_heads": dims["H"], "scale": float(dims["scale"]) * 1.4426950408889634},
        constants,
        names,
    )


# Makes k16 and v16: dispatches, buffers, and the name of q, whose heads have so many values.
_Heads = Callable[[Dims, int], tuple[tuple[Dispatch, ...], dict[str, int], str]]


def _of_tensors(dims: Dims, width: int) -> tuple[tuple[Dispatch, ...], dict[str, int], str]:
    """Of q, k and v, each a tensor."""
    narrow, count = dims["D"], dims["tokens"] * dims["H"] * width // 8
    params = {"count": count, "width": narrow, "octets": width // 8}
    dispatches = [covering(Kernel("vision/spans_cache"), count, params)]
    buffers = dict.fromkeys("qkv", f32(dims["tokens"] * dims["H"] * narrow))
    if width == narrow:
        return tuple(dispatches), buffers, "q"
    dispatches.insert(0, widths_changed(8 * count, narrow, width, {"x": "q", "out": "q_wide"}))
    return tuple(dispatches), {**buffers, "q_wide": f32(8 * count)}, "q_wide"


def _of_product(dims: Dims, width: int) -> tuple[tuple[Dispatch, ...], dict[str, int], str]:
    """Of a product that has all three."""
    dispatch = heads_of_product(dims, width, {"q": "q_wide", "k": "k16", "v": "v16"}, halves=True)
    wide = f32(dims["tokens"] * dims["H"] * width)
    return (dispatch,), {**product_buffers(dims), "q_wide": wide}, "q_wide"


def _launch_list(heads_of: _Heads, dims: Dims, caps: DeviceCaps) -> LaunchList:
    found = _attended(dims, caps)
    if found is None:
        return LaunchList((), {})
    (attended, width), tokens, narrow = found, dims["tokens"], dims["D"]
    values = tokens * dims["H"] * width
    heads, buffers, q = heads_of(dims, width)
    out = "out" if width == narrow else "out_wide"
    params = {"tokens": tokens, "width": dims["H"] * width}
    batch = covering(Kernel("vision/spans_batch"), tokens, params, None, {"out": out})
    dispatches = [*heads, batch, replace(attended, bind={**attended.bind, "q": q, "out": out})]
    buffers |= {"spans": f32(2 * tokens), "k16": 2 * values, "v16": 2 * values, "records": batch_bytes(tokens)}
    buffers["out"] = f32(tokens * dims["H"] * narrow)
    if width != narrow:
        dispatches.append(widths_changed(tokens * dims["H"] * narrow, width, narrow, {"x": "out_wide"}))
        buffers["out_wide"] = f32(values)
    return LaunchList(tuple(dispatches), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if reason := units_unsupported_reason(caps) or rotary_unsupported_reason(dims):
        return reason
    if dims["tokens"] < _LEAST:
        return f"tokens must be at least {_LEAST}, tokens is {dims['tokens']}"
    return None if _attended(dims, caps) else f"heads of {dims['D']} values fit no tile"


ROUTES: tuple[Route, ...] = tuple(
    Route(
        op, "matrix", partial(_launch_list, heads_of), _unsupported_reason, exact=False, prefer=lambda dims, caps: True
    )
    for op, heads_of in (
        ("attend_spans", _of_tensors),
        ("slice_attend_spans", _of_product),
        ("slice_rope_by_row_attend_spans", _of_product),
    )
)
