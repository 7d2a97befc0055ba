"""Routes of linear: out = x · wᵀ + bias with weights in f32, f16, q8_0 or q4_0."""

from __future__ import annotations

import numpy as np

from ...formats.blocks import split_blocks
from ...gpu.facts import Facts
from ..route import Array, Dims, Route
from . import packed


def pack_weight(weight: Array, dims: Dims, facts: Facts) -> dict[str, Array]:
    """Weights as 16-byte words and scales beside them, by row ranges."""
    kind = dims["format"]
    if kind in ("q8_0", "q4_0"):
        scales, quants = split_blocks(weight, kind)
        quants = quants.reshape(quants.shape[0], -1)
    else:
        quants = np.pad(weight, ((0, 0), (0, packed.padded_k(dims) - weight.shape[1])))
        scales = np.zeros((weight.shape[0], 0), np.float16)
    return {
        **packed.split_rows("weight", quants, dims, facts),
        **packed.split_rows("scales", scales, dims, facts),
    }


def _gemv_why_not(dims: Dims, facts: Facts) -> str | None:
    return packed.one_row(dims)


_PACK = {"x": packed.pack_x, "weight": pack_weight, "bias": packed.pack_bias}

ROUTES = (
    Route("linear", "gemv", packed.gemv_recipe, _gemv_why_not, pack=_PACK),
    Route("linear", "tile_shared", packed.tile_shared_recipe, pack=_PACK),
    Route("linear", "tile_shared_f16", packed.tile_shared_f16_recipe, pack=_PACK, exact=False),
)
