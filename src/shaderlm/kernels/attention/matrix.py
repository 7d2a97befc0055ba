"""The route of attention with matrix units: rows of runs (prompts) by attention_matrix, others as in `flash`.

Queries and the weights of keys are rounded to f16, which the cache is already; sums are f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...gpu.caps import DeviceCaps, MatrixShape
from ...graph.batch import PAGE, RUN_ROWS
from ..linear.matrix import matrix_constants, matrix_shape, units_unsupported_reason
from ..route import Dims, Dispatch, LaunchList, Route, ceil_div, over_limits
from ..wgsl import Constant, Kernel
from .attention import PACK, SEES_BEFORE, batch_files, launch_list_with, scale_of, score_constants, score_files

_NEEDS = frozenset({"f16", "subgroups", "subgroup_matrix"})


@dataclass(frozen=True)
class Tile:
    """Keys of a tile, and the subgroups that share it: along (row, head) pairs, and along keys and columns."""

    keys: int
    row_groups: int
    column_groups: int
    pairs: int  # (row, head) pairs of a subgroup

    def constants(self, dims: Dims, shape: MatrixShape, lanes: int) -> dict[str, Constant]:
        """What the kernel is specialised with, on a device with subgroups of so many lanes."""
        scores = self.keys // shape.n // self.column_groups
        sums = dims["D"] // shape.n // self.column_groups
        return {
            **matrix_constants(shape, lanes),
            "ROW_GROUPS": self.row_groups,
            "COLUMN_GROUPS": self.column_groups,
            "ROW_TILES": self.pairs // shape.m,
            "KEYS": self.keys,
            "GROUP": _group(dims),
            "D": dims["D"],
            "ROUND_TILES": math.gcd(scores, sums),
            **score_constants(dims, math.log2(math.e)),
        }

    def fits(self, dims: Dims, shape: MatrixShape, lanes: int) -> bool:
        """Does every subgroup get whole matrices, and every lane a part of a row in softmax?"""
        stacked = self.row_groups * self.pairs
        per_row = lanes * self.row_groups * self.column_groups // stacked
        sides = [side % each for side in (dims["D"], self.keys) for each in (shape.k, shape.n * self.column_groups)]
        return (
            not any((*sides, self.pairs % shape.m, PAGE % self.keys, shape.n % 8))
            and _group(dims) <= stacked <= 2 * self.keys
            and per_row in (1, 2, 4, 8)
            and self.keys % (8 * per_row) == 0
        )


# The fastest first: of heads of 64, 128, 256 and 80 values.
TILES = (Tile(64, 2, 4, 32), Tile(32, 4, 2, 16), Tile(32, 2, 2, 16), Tile(32, 2, 1, 16), Tile(32, 4, 1, 16))


def _group(dims: Dims) -> int:
    return int(dims["Hq"] // dims["Hkv"])


def run_rows(tile: Tile, dims: Dims, shape: MatrixShape, lanes: int, sees: str = SEES_BEFORE) -> Dispatch:
    """The rows of runs with this tile, on a device with subgroups of so many lanes."""
    include = ("attention/segments", sees, *batch_files(dims), *score_files(dims))
    rows = tile.row_groups * tile.pairs // _group(dims)
    return Dispatch(
        Kernel("attention/attention_matrix", include, _NEEDS, unroll=True),
        ceil_div(dims["tokens"], rows) * dims["Hkv"],
        {"kv_heads": dims["Hkv"], "scale": scale_of(dims) * math.log2(math.e)},
        tile.constants(dims, shape, lanes),
    )


def usable(dims: Dims, caps: DeviceCaps, sees: str = SEES_BEFORE) -> list[Dispatch]:
    """With every tile that fits the shape and this device, the fastest first."""
    shape, lanes = matrix_shape(caps), caps.subgroup_max
    if shape is None or not lanes:
        return []
    dispatches = [run_rows(tile, dims, shape, lanes, sees) for tile in TILES if tile.fits(dims, shape, lanes)]
    return [dispatch for dispatch in dispatches if over_limits(LaunchList((dispatch,), {}), caps) is None]


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return launch_list_with(next(iter(usable(dims, caps)), None), dims, caps)


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why the rows of runs are not multiplied by matrix units."""
    reason = units_unsupported_reason(caps)
    if reason:
        return reason
    if dims["tokens"] < RUN_ROWS:
        return f"it is for runs: tokens must be at least {RUN_ROWS}, tokens is {dims['tokens']}"
    if not dims["runs"]:
        return "it is for runs, of which there are none"
    if dims["cache"] != "f16":
        return f"it reads a cache of f16, the cache is {dims['cache']}"
    if not usable(dims, caps):
        return f"heads of {dims['D']} values, {_group(dims)} for a kv head, fit no tile"
    return None


ROUTES: tuple[Route, ...] = (
    Route(
        "attention",
        "matrix",
        _launch_list,
        unsupported_reason,
        PACK,
        exact=False,
        prefer=lambda dims, caps: True,
    ),
)
