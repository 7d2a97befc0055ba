"""Routes of linear, linear_add and linear_silu_mul: the same kernels with three epilogues, over every weight format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...gpu.facts import Facts
from ..route import Array, Dims, Route, part
from . import int16, packed
from .formats import FORMATS
from .packed import Epilogue


def pack_weight(weight: Array, dims: Dims, facts: Facts) -> dict[str, Array]:
    """Weights as 16-byte words and scales beside them, range of rows by range of rows."""
    repack = FORMATS[dims["format"]].repack
    parts: dict[str, Array] = {}
    for i, (first, end) in enumerate(packed.ranges(dims, facts)):
        parts[part("weight", i)], parts[part("scales", i)] = repack(weight[first:end])
    return parts


_PACK = {"x": packed.pack_x, "weight": pack_weight, "bias": packed.pack_bias}


def _routes(op: str, epilogue: Epilogue) -> Iterator[Route]:
    def why_not(dims: Dims, facts: Facts) -> str | None:
        return packed.pairs_are_whole(dims, facts) if epilogue.gated else None

    def gemv_why_not(dims: Dims, facts: Facts) -> str | None:
        return packed.one_row(dims) or why_not(dims, facts)

    gemv, tile, rows, tile_f16 = (
        partial(recipe, epilogue=epilogue)
        for recipe in (
            packed.gemv_recipe,
            packed.tile_shared_recipe,
            packed.rows_recipe,
            packed.tile_shared_f16_recipe,
        )
    )

    def int16_why_not(dims: Dims, facts: Facts) -> str | None:
        return int16.why_not(dims, facts) or why_not(dims, facts)

    yield Route(op, "gemv", gemv, gemv_why_not, _PACK, cuts=partial(packed.gemv_cuts, epilogue=epilogue))
    yield Route(
        op,
        "gemv_int16",
        partial(int16.recipe, epilogue=epilogue),
        int16_why_not,
        _PACK,
        exact=False,
        prefer=int16.large_enough,
        fast=True,
        cuts=partial(int16.cuts, epilogue=epilogue),
    )
    yield Route(op, "tile_shared", tile, why_not, _PACK)
    yield Route(op, "rows", rows, why_not, _PACK, prefer=packed.on_a_cpu)
    yield Route(op, "tile_shared_f16", tile_f16, why_not, _PACK, exact=False)


def _norm_route(op: str, epilogue: Epilogue) -> Route:
    def why_not(dims: Dims, facts: Facts) -> str | None:
        return int16.why_not(dims, facts) or (packed.pairs_are_whole(dims, facts) if epilogue.gated else None)

    pack = {**_PACK, "norm_weight": packed.pack_norm_weight}
    recipe = partial(int16.recipe, epilogue=epilogue, norm=True)
    cuts = partial(int16.cuts, epilogue=epilogue, norm=True)
    return Route(op, "gemv_int16", recipe, why_not, pack, exact=False, fast=True, cuts=cuts)


ROUTES = (
    *_routes("linear", packed.PLAIN),
    *_routes("linear_add", Epilogue(residual=True)),
    *_routes("linear_silu_mul", Epilogue(gated=True)),
    _norm_route("rms_norm_linear", packed.PLAIN),
    _norm_route("rms_norm_linear_silu_mul", Epilogue(gated=True)),
    Route(
        "rms_norm_linear_rope_kv_write",
        "gemv_int16",
        int16.rope_recipe,
        int16.rope_why_not,
        {**_PACK, "norm_weight": packed.pack_norm_weight},
        exact=False,
        fast=True,
        cuts=int16.rope_cuts,
    ),
)
