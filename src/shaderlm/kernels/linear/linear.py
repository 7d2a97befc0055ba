"""Routes of linear over every weight format, and which prologues and epilogues each of them runs."""

from __future__ import annotations

from functools import partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import Array, Dims, Route, part
from . import few_columns, int16, matrix, packed, rounded, rows_int16
from .formats import FORMATS


def pack_weight(weight: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Weights as 16-byte words and scales beside them, range of rows by range of rows."""
    repack = FORMATS[dims["format"]].repack
    parts: dict[str, Array] = {}
    for i, (first, end) in enumerate(packed.ranges(dims, caps)):
        parts[part("weight", i)], parts[part("scales", i)] = repack(weight[first:end])
    return parts


_PACK = {
    "x": packed.pack_x,
    "norm_weight": packed.pack_norm_weight,
    "weight": pack_weight,
    "bias": packed.pack_bias,
}


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Of the routes that keep x as it is."""
    if dims["prologue"] != "none":
        return f"it has no prologue {dims['prologue']}"
    if dims["epilogue"] == "rope_kv_write":
        return "it has no epilogue rope_kv_write"
    if dims["rounded"]:
        return "it does not round its results"
    return packed.pairs_are_whole(dims, caps) if packed.gated(dims) else None


_FEW_COLUMNS = 512


def _gemv_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """A norm before the product is for routers of experts: every workgroup computes it again."""
    reason = packed.one_row(dims)
    # After a norm, formats with whole numbers are left to gemv_int16.
    if reason or dims["prologue"] != "rms_norm" or FORMATS[dims["format"]].int16:
        return reason or _unsupported_reason(dims, caps)
    if dims["N"] > _FEW_COLUMNS:
        return f"a prologue is computed again for every few columns: N must be at most {_FEW_COLUMNS}, N is {dims['N']}"
    if dims["K"] % BLOCK:
        return f"after a prologue K must be a multiple of {BLOCK}, K is {dims['K']}"
    if caps.policy.prefer_few_barriers:
        return "this device prefers few barriers"
    return _unsupported_reason({**dims, "prologue": "none"}, caps)


_route = partial(Route, "linear", pack=_PACK, weight_parts=packed.weight_parts)
_rounding_route = partial(_route, exact=False)

ROUTES: tuple[Route, ...] = (
    _route(
        "few_columns",
        few_columns.launch_list,
        few_columns.unsupported_reason,
        prefer=few_columns.is_preferred,
        pack={**_PACK, "x": few_columns.pack_x},
    ),
    _route("gemv", packed.gemv_launch_list, _gemv_unsupported_reason, candidates=packed.gemv_candidates),
    _rounding_route(
        "gemv_int16",
        int16.launch_list,
        int16.unsupported_reason,
        prefer=int16.is_preferred,
        candidates=int16.candidates,
    ),
    _rounding_route(
        "gemv_rounded", rounded.launch_list, rounded.unsupported_reason, pack={**_PACK, "x": rounded.pack_x}
    ),
    _rounding_route(
        "gemv_rows_int16",
        rows_int16.gemv_launch_list,
        rows_int16.gemv_unsupported_reason,
        prefer=rows_int16.several_rows,
        candidates=rows_int16.gemv_candidates,
    ),
    _rounding_route(
        "matrix", matrix.launch_list, matrix.unsupported_reason, prefer=matrix.many_rows, candidates=matrix.candidates
    ),
    _rounding_route(
        "tile_int16",
        rows_int16.tile_launch_list,
        rows_int16.tile_unsupported_reason,
        prefer=rows_int16.several_rows,
        candidates=rows_int16.tile_candidates,
    ),
    _route("tile_shared", packed.tile_shared_launch_list, _unsupported_reason),
    _route("rows", packed.rows_launch_list, _unsupported_reason, prefer=packed.on_a_cpu),
)
