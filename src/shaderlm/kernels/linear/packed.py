"""What linear and linear_q4gsw share: the GEMV and the shared-memory tile over any weight format.

Weights lie on the GPU as 16-byte words per row and, beside them, scales per row (`shared/format_*.wgsl`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...formats.blocks import BLOCK
from ...gpu.facts import Facts
from ..route import Array, Dims, Dispatch, Recipe, ceil_div, f32, part, row_ranges
from ..wgsl import Constant, Kernel


@dataclass(frozen=True)
class Layout:
    """Bytes per row of a packed weight of k columns, its scales, and how its WGSL file is specialised."""

    file: str
    row_bytes: int
    groups: int
    scale_bytes: int
    constants: Mapping[str, Constant]


def layout(dims: Dims) -> Layout:
    """Layout of the weight of `linear` (by format) or `linear_q4gsw` (by group size and scale dtype)."""
    k = padded_k(dims)
    kind = dims.get("format", "q4gsw")
    if kind == "f32":
        return Layout("shared/format_f32", 4 * k, 0, 4, {})
    if kind == "f16":
        return Layout("shared/format_f16", 2 * k, 0, 4, {})
    if kind == "q8_0":
        return Layout("shared/format_q8_0", k, k // BLOCK, 2, {})
    if kind == "q4_0":
        return Layout("shared/format_q4", k // 2, k // BLOCK, 2, {})
    half = dims["scales"] == "f16"
    group_blocks = dims["group_size"] // BLOCK
    constants: dict[str, Constant] = {"F16_SCALES": half, "GROUP_BLOCKS": max(1, group_blocks)}
    return Layout("shared/format_q4", k // 2, ceil_div(k, dims["group_size"]), 2 if half else 4, constants)


def padded_k(dims: Dims) -> int:
    """K as the kernels see it: dense formats are padded with zeros to whole blocks of 32."""
    return ceil_div(dims["K"], BLOCK) * BLOCK


def ranges(dims: Dims, facts: Facts) -> list[tuple[int, int]]:
    """Row ranges of the weight, each within one binding together with its scales."""
    lay = layout(dims)
    return row_ranges(dims["N"], max(lay.row_bytes, lay.groups * lay.scale_bytes), facts)


def split_rows(name: str, array: Array, dims: Dims, facts: Facts) -> dict[str, Array]:
    """One array per row range."""
    return {part(name, i): array[a:b] for i, (a, b) in enumerate(ranges(dims, facts))}


def pack_x(x: Array, dims: Dims, facts: Facts) -> dict[str, Array]:
    """Inputs [M, K], with zeros up to a multiple of 32."""
    missing = padded_k(dims) - x.shape[1]
    return {"x": np.pad(x, ((0, 0), (0, missing))) if missing else x}


def pack_bias(bias: Array, dims: Dims, facts: Facts) -> dict[str, Array]:
    """Bias [N] by row ranges."""
    return split_rows("bias", bias, dims, facts)


def _over_ranges(
    kernel: Kernel, constants: Mapping[str, Constant], per_group: int, tiles_m: int, dims: Dims, facts: Facts
) -> Recipe:
    lay, k = layout(dims), padded_k(dims)
    spans = ranges(dims, facts)
    dispatches = []
    buffers = {"x": f32(dims["M"] * k), "out": f32(dims["M"] * dims["N"])}
    for i, (first, end) in enumerate(spans):
        rows = end - first
        buffers[part("weight", i)] = rows * lay.row_bytes
        buffers[part("scales", i)] = rows * lay.groups * lay.scale_bytes
        buffers[part("bias", i)] = f32(rows) if dims["bias"] else 0
        dispatches.append(
            Dispatch(
                kernel,
                tiles_m * ceil_div(rows, per_group),
                {
                    "m": dims["M"],
                    "k": k,
                    "n": rows,
                    "groups": lay.groups,
                    "n_first": first,
                    "n_total": dims["N"],
                },
                {**lay.constants, **constants, "HAS_BIAS": dims["bias"]},
                {name: part(name, i) for name in ("weight", "scales", "bias")},
            )
        )
    return Recipe(tuple(dispatches), buffers)


@dataclass(frozen=True)
class Gemv:
    """How a GEMV is cut: threads per workgroup, lanes that share a row's K, rows per team, and who adds up.

    `stage` blocks of x at a time are staged in workgroup memory (0: x is read where it lies), and multiplied in
    "f32" or, for the formats with integer weights, "fixed" point.
    """

    threads: int
    team: int
    rows: int
    reduction: str
    arithmetic: str = "f32"
    stage: int = 0

    @property
    def needs(self) -> frozenset[str]:
        """Device features."""
        return frozenset({"subgroups"} if self.reduction == "team_subgroup" else ())


# Measured on an H200: about this many threads, four rows to a team, read memory fastest.
_GEMV_THREADS = 56_000


def gemv_shape(dims: Dims, facts: Facts) -> Gemv:
    """The cut for a shape: short teams for many rows, long ones for few; on a CPU one lane a row, no barriers."""
    if facts.software:
        return Gemv(32, 1, 4, "team_single")
    k, n, kind = dims["K"], dims["N"], dims.get("format", "q4_0")
    threads = min(256, facts.max_invocations)
    stage = 128 if k > 2048 and facts.max_workgroup_memory >= 32 << 10 else 64
    # Metal has no instruction for dot products of bytes.
    integers = kind in ("q4_0", "q8_0") and facts.backend != "Metal"
    if integers and n >= 4096:
        arithmetic, rows = "fixed", 4 if kind == "q4_0" else 2
        team = power_of_two(_GEMV_THREADS * rows / n, 8 if k >= 1024 else 4, 64)
    else:
        arithmetic = "f32"
        rows = 2 if k >= 4096 and kind != "f32" else 1
        team = 64 if k >= 4096 else 32
    reduction = "team_subgroup" if facts.subgroups else "team_tree"
    return Gemv(threads, min(team, threads), rows, reduction, arithmetic, stage)


def power_of_two(wanted: float, least: int, most: int) -> int:
    """The power of two nearest to `wanted`, within bounds."""
    return max(least, min(most, 1 << round(math.log2(max(wanted, 1)))))


def gemv_recipe(dims: Dims, facts: Facts) -> Recipe:
    """M = 1: teams of lanes share the K of their rows."""
    return gemv_with(gemv_shape(dims, facts), dims, facts)


def gemv_with(cut: Gemv, dims: Dims, facts: Facts) -> Recipe:
    """The GEMV with a given cut."""
    include = (f"shared/{cut.reduction}", layout(dims).file)
    if cut.stage:
        kernel = Kernel("linear/linear_gemv_staged", (*include, f"shared/stage_{cut.arithmetic}"), cut.needs)
    else:
        kernel = Kernel("linear/linear_gemv_direct", include, cut.needs)
    constants = {"WG": cut.threads, "TEAM": cut.team, "ROWS": cut.rows}
    if cut.stage:
        constants["STAGE"] = cut.stage
    return _over_ranges(kernel, constants, cut.rows * cut.threads // cut.team, 1, dims, facts)


def tile_shared_recipe(dims: Dims, facts: Facts, half: bool = False) -> Recipe:
    """Any M: tiles of 64 or 128 × 64 staged in workgroup memory. The sizes were measured on an H200."""
    tm = 8 if dims["M"] >= 256 and ceil_div(dims["M"], 128) * ceil_div(dims["N"], 64) >= 1024 else 4
    tiles = ceil_div(dims["M"], 16 * tm) * ceil_div(dims["N"], 64)
    # Few tiles leave room for longer steps, which wait less often; many tiles want the memory for each other.
    quads = 8 if tiles <= 256 and 9 * 128 * (8 if half else 16) <= facts.max_workgroup_memory else 4
    needs = frozenset({"f16"}) if half else frozenset[str]()
    kernel = Kernel("linear/linear_tile_shared", (layout(dims).file,), needs)
    constants: dict[str, Constant] = {"TM": tm, "QUADS": quads, "tile4": "vec4<f16>" if half else "vec4<f32>"}
    return _over_ranges(kernel, constants, 64, ceil_div(dims["M"], 16 * tm), dims, facts)


def tile_shared_f16_recipe(dims: Dims, facts: Facts) -> Recipe:
    """The same with both operands stored as f16 in workgroup memory; products and sums stay f32."""
    return tile_shared_recipe(dims, facts, half=True)


def one_row(dims: Dims) -> str | None:
    """GEMV's first precondition."""
    return f"M must be 1, M is {dims['M']}" if dims["M"] != 1 else None
