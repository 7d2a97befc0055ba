"""Routes of linear, linear_add and linear_silu_mul: the same kernels with three epilogues, over every weight format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...gpu.caps import DeviceCaps
from ..route import Array, Dims, Route, part
from . import int16, packed
from .formats import FORMATS
from .packed import Epilogue


def pack_weight(weight: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Weights as 16-byte words and scales beside them, range of rows by range of rows."""
    repack = FORMATS[dims["format"]].repack
    parts: dict[str, Array] = {}
    for i, (first, end) in enumerate(packed.ranges(dims, caps)):
        parts[part("weight", i)], parts[part("scales", i)] = repack(weight[first:end])
    return parts


_PACK = {"x": packed.pack_x, "weight": pack_weight, "bias": packed.pack_bias}


def _routes(op: str, epilogue: Epilogue) -> Iterator[Route]:
    def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
        return packed.pairs_are_whole(dims, caps) if epilogue.gated else None

    def gemv_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
        return packed.one_row(dims) or unsupported_reason(dims, caps)

    gemv, tile, rows, tile_f16 = (
        partial(launch_list, epilogue=epilogue)
        for launch_list in (
            packed.gemv_launch_list,
            packed.tile_shared_launch_list,
            packed.rows_launch_list,
            packed.tile_shared_f16_launch_list,
        )
    )

    def int16_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
        return int16.unsupported_reason(dims, caps) or unsupported_reason(dims, caps)

    yield Route(
        op, "gemv", gemv, gemv_unsupported_reason, _PACK, candidates=partial(packed.gemv_candidates, epilogue=epilogue)
    )
    yield Route(
        op,
        "gemv_int16",
        partial(int16.launch_list, epilogue=epilogue),
        int16_unsupported_reason,
        _PACK,
        exact=False,
        prefer=int16.large_enough,
        fast=True,
        candidates=partial(int16.candidates, epilogue=epilogue),
    )
    yield Route(op, "tile_shared", tile, unsupported_reason, _PACK)
    yield Route(op, "rows", rows, unsupported_reason, _PACK, prefer=packed.on_a_cpu)
    yield Route(op, "tile_shared_f16", tile_f16, unsupported_reason, _PACK, exact=False)


def _norm_route(op: str, epilogue: Epilogue) -> Route:
    def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
        return int16.unsupported_reason(dims, caps) or (packed.pairs_are_whole(dims, caps) if epilogue.gated else None)

    pack = {**_PACK, "norm_weight": packed.pack_norm_weight}
    launch_list = partial(int16.launch_list, epilogue=epilogue, norm=True)
    candidates = partial(int16.candidates, epilogue=epilogue, norm=True)
    return Route(op, "gemv_int16", launch_list, unsupported_reason, pack, exact=False, fast=True, candidates=candidates)


ROUTES = (
    *_routes("linear", packed.PLAIN),
    *_routes("linear_add", Epilogue(residual=True)),
    *_routes("linear_silu_mul", Epilogue(gated=True)),
    _norm_route("rms_norm_linear", packed.PLAIN),
    _norm_route("rms_norm_linear_silu_mul", Epilogue(gated=True)),
    Route(
        "rms_norm_linear_rope_kv_write",
        "gemv_int16",
        int16.rope_launch_list,
        int16.rope_unsupported_reason,
        {**_PACK, "norm_weight": packed.pack_norm_weight},
        exact=False,
        fast=True,
        candidates=int16.rope_candidates,
    ),
)
