"""The route of attend_spans with matrix units: keys and values in f16, and the kernel that reads prompts.

A token batch is made of the spans, in which rows of a span see all of it. Heads are padded to whole matrices.
"""

from __future__ import annotations

from typing import Any

from ...gpu.caps import DeviceCaps
from ..attention.matrix import TILES, Tile
from ..linear.matrix import matrix_shape, units_unsupported_reason
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, covering, f32, over_limits
from ..wgsl import Kernel

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
    padded = width != dims["D"]
    rows = tile.row_groups * tile.pairs
    names = {"k_cache": "k16", "v_cache": "v16", "batch": "records"}
    names |= {"q": "q_wide", "out": "out_wide"} if padded else {}
    return Dispatch(
        Kernel("attention/attention_matrix", _INCLUDE, _NEEDS, unroll=True),
        ceil_div(dims["tokens"], rows) * dims["H"],
        {"kv_heads": dims["H"], "scale": float(dims["scale"]) * 1.4426950408889634},
        constants,
        names,
    )


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    found = _attended(dims, caps)
    if found is None:
        return LaunchList((), {})
    (attended, width), tokens, heads, narrow = found, dims["tokens"], dims["H"], dims["D"]
    octets = tokens * heads * width // 8
    cache = covering(Kernel("vision/spans_cache"), octets, {"count": octets, "width": narrow, "octets": width // 8})
    wide_out = {"out": "out_wide"} if width != narrow else {}
    batch = covering(Kernel("vision/spans_batch"), tokens, {"tokens": tokens, "width": heads * width}, None, wide_out)
    rows, wide = f32(tokens * heads * narrow), f32(tokens * heads * width)
    buffers = {"q": rows, "k": rows, "v": rows, "spans": f32(2 * tokens), "k16": wide // 2, "v16": wide // 2}
    buffers |= {"records": batch_bytes(tokens), "out": rows}
    dispatches = [cache, batch, attended]
    if width != narrow:
        kernel = Kernel("vision/pad_columns")
        more, less = (
            {"count": tokens * heads * to, "width": of, "to": to} for of, to in ((narrow, width), (width, narrow))
        )
        dispatches.insert(0, covering(kernel, more["count"], more, None, {"x": "q", "out": "q_wide"}))
        dispatches.append(covering(kernel, less["count"], less, None, {"x": "out_wide"}))
        buffers |= {"q_wide": wide, "out_wide": wide}
    return LaunchList(tuple(dispatches), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if reason := units_unsupported_reason(caps):
        return reason
    if dims["tokens"] < _LEAST:
        return f"tokens must be at least {_LEAST}, tokens is {dims['tokens']}"
    return None if _attended(dims, caps) else f"heads of {dims['D']} values fit no tile"


ROUTES: tuple[Route, ...] = (
    Route("attend_spans", "matrix", _launch_list, _unsupported_reason, exact=False, prefer=lambda dims, caps: True),
)
