"""Products of many rows by the matrix units of a device: inputs rounded to f16, sums in f32. Configurations.

Three kernels: `round_rows` makes f16 of the inputs, with a power of two per row; `linear_matrix` multiplies tiles;
where k is split over workgroups, `linear_matrix_merge` adds the parts up. The weight lies as for every other route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps, MatrixShape
from ..route import Dims, Dispatch, LaunchList, ceil_div, f32, reduction, row_count
from ..wgsl import Constant, Kernel, compose
from .packed import gated, layout, over_ranges, padded_k, pairs_are_whole

MATRIX_UNITS = "shared/matrix_units"
_NEEDS = frozenset({"f16", "subgroups", "subgroup_matrix"})


@dataclass(frozen=True)
class LaunchConfig:
    """A tile, how many blocks of a row are fetched together, and who shares the work.

    `subgroups` share a tile along rows, columns and k. With `early`, a group of blocks is fetched while all of the one
    before it is multiplied, which takes registers; else while the end of it is. `buffers` of a step are in workgroup
    memory, and k is in `split` parts.
    """

    rows: int
    columns: int
    blocks: int
    subgroups: tuple[int, int, int]
    early: bool = False
    buffers: int = 1
    split: int = 1

    def __str__(self) -> str:
        shared = ".".join(str(count) for count in self.subgroups)
        more = ("e" if self.early else "") + ("b" if self.buffers > 1 else "")
        return f"{self.rows}x{self.columns}x{self.blocks}-{shared}{more}-{self.split}"

    def groups(self, dims: Dims) -> int:
        """Steps over k."""
        return ceil_div(padded_k(dims), BLOCK * self.blocks)

    def tiles(self, dims: Dims) -> int:
        """Workgroups of a product, for one part of k."""
        return ceil_div(dims["tokens"], self.rows) * ceil_div(dims["N"], self.columns)

    def constants(self, shape: MatrixShape, lanes: int) -> dict[str, Constant]:
        """What the kernel is specialised with, on a device with subgroups of so many lanes."""
        tile = {"BM": self.rows, "BN": self.columns, "BLOCKS": self.blocks, "BUFFERS": self.buffers}
        tile |= {"AHEAD": 4, "FETCH": 0} if self.early else {"AHEAD": 1, "FETCH": 3}
        subgroups = dict(zip(("SUBS_M", "SUBS_N", "SUBS_K"), self.subgroups, strict=True))
        matrix = {"MATRIX_M": shape.m, "MATRIX_N": shape.n, "MATRIX_K": shape.k, "SUBGROUP": lanes}
        return {**tile, **subgroups, **matrix}

    def fits(self, shape: MatrixShape) -> bool:
        """Does every subgroup get whole matrices?"""
        sides = zip(
            (self.rows, self.columns, 8 * self.blocks), self.subgroups, (shape.m, shape.n, shape.k), strict=True
        )
        return all(side % (count * matrix) == 0 for side, count, matrix in sides)


def matrix_shape(caps: DeviceCaps) -> MatrixShape | None:
    """The shape that is multiplied: f16 with sums in f32, the largest that the device lists."""
    usable = [
        shape
        for shape in caps.matrix_shapes
        if (shape.component, shape.result) == ("f16", "f32") and shape.k % 8 == 0 and shape.n % 4 == 0
    ]
    return max(usable, key=lambda shape: (shape.m * shape.n * shape.k, shape.m), default=None)


def units_unsupported_reason(caps: DeviceCaps) -> str | None:
    """Why kernels do not use the matrix units of a device."""
    if not caps.subgroup_matrix:
        return "this device has no matrix units"
    if matrix_shape(caps) is None:
        listed = ", ".join(str(shape) for shape in caps.matrix_shapes)
        return f"its matrix units do not multiply f16 with sums in f32; they have {listed}"
    if caps.subgroup_min != caps.subgroup_max or not caps.subgroup_max:
        return f"subgroups must have one size, they have {caps.subgroup_min} to {caps.subgroup_max} lanes"
    return None


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why matrix units do not run a shape."""
    reason = units_unsupported_reason(caps)
    if reason:
        return reason
    if dims["tokens"] == 1:
        return "one row would leave most of a matrix empty; tokens is 1"
    if dims["epilogue"] == "rope_kv_write":
        return "it has no epilogue rope_kv_write"
    config, shape = config_for(dims, caps), matrix_shape(caps)
    if shape is not None and not config.fits(shape):
        return f"matrices of {shape.m}×{shape.n}×{shape.k} do not divide its tiles of {config}"
    return pairs_are_whole(dims, caps) if gated(dims) else None


def many_rows(dims: Dims, caps: DeviceCaps) -> bool:
    """Where matrix units go before other routes."""
    return caps.subgroup_matrix and bool(dims["tokens"] > 1)


@dataclass(frozen=True)
class Tiles:
    """Tiles for up to so many rows, tuning candidates of each other, and how many workgroups keep a GPU busy."""

    rows: int
    configs: tuple[LaunchConfig, ...]
    workgroups: int


# Measured on an H200, which has 132 cores. The first of a line is right on average.
TILES = (
    Tiles(
        16,
        (
            LaunchConfig(16, 64, 16, (1, 2, 4)),
            LaunchConfig(16, 64, 8, (1, 2, 2)),
            LaunchConfig(16, 32, 8, (1, 2, 2), early=True),
            LaunchConfig(16, 32, 16, (1, 2, 4), early=True),
        ),
        256,
    ),
    Tiles(32, (LaunchConfig(32, 128, 8, (1, 4, 2), early=True), LaunchConfig(32, 64, 8, (1, 2, 2), early=True)), 192),
    Tiles(64, (LaunchConfig(64, 64, 8, (2, 2, 1), early=True), LaunchConfig(64, 256, 8, (1, 8, 1))), 192),
    Tiles(512, (LaunchConfig(128, 128, 8, (4, 2, 1)), LaunchConfig(128, 96, 8, (4, 2, 1))), 96),
)
_CORES = 132
_SPLITS = (1, 2, 4, 8, 16)


def tiles_for(dims: Dims) -> Tiles:
    """The tiles for a number of rows."""
    return next((tiles for tiles in TILES if dims["tokens"] <= tiles.rows), TILES[-1])


def config_for(dims: Dims, caps: DeviceCaps) -> LaunchConfig:
    """The configuration for a shape: k is split as far as it takes to keep the device busy."""
    tiles = tiles_for(dims)
    config = tiles.configs[0]
    count = config.tiles(dims)
    split = next((split for split in _SPLITS if count * split >= tiles.workgroups), _SPLITS[-1])
    if split == 1 and _CORES < count <= 1.5 * _CORES:
        split = 2  # a second round would leave most cores idle
    return replace(config, split=min(split, config.groups(dims)))


def candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with other tiles and parts of k, by name."""
    found = {}
    for tile in tiles_for(dims).configs:
        groups = tile.groups(dims)
        for split in _SPLITS:
            config = replace(tile, split=split)
            if split == 1 or (split <= groups and config.tiles(dims) * split <= 12 * _CORES):
                found[str(config)] = partial(launch_list_with, config, dims, caps)
    return found


def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Any number of rows."""
    return launch_list_with(config_for(dims, caps), dims, caps)


def launch_list_with(config: LaunchConfig, dims: Dims, caps: DeviceCaps, units: str = MATRIX_UNITS) -> LaunchList:
    """The same with a given configuration. `units` is the file that multiplies matrices."""
    shape = matrix_shape(caps)
    assert shape is not None, "unsupported_reason was asked"
    file, rows = layout(dims).file, row_count(dims)
    weights = (file, file.replace("format_", "halves_"), "shared/halves", units)
    store = ("linear/finish_store", "linear/epilogue", "shared/silu", rows)
    needs = _NEEDS if units == MATRIX_UNITS else frozenset[str]()
    constants = config.constants(shape, caps.subgroup_max)
    if config.split == 1:
        kernel = Kernel("linear/linear_matrix", (*weights, *store), needs, units == MATRIX_UNITS)
        found = over_ranges(kernel, constants, lambda n: config.tiles({**dims, "N": n}), dims, caps, {"split": 1})
        return _after_rounding(found.dispatches, found.buffers, config, dims, caps)
    kernel = Kernel("linear/linear_matrix", (*weights, "linear/finish_parts", rows), needs, units == MATRIX_UNITS)
    merge = Kernel("linear/linear_matrix_merge", store)
    threads = compose(merge).workgroup_size
    # Of the two the merge has the epilogue's operands, and neither those of the format.
    more = {"split": config.split}
    found = over_ranges(merge, {}, lambda n: ceil_div(dims["tokens"] * ceil_div(n, 4), threads), dims, caps, more)
    dispatches = []
    for merged in found.dispatches:
        tiles = config.tiles({**dims, "N": merged.params["n"]}) * config.split
        product = replace(merged, kernel=kernel, workgroups=tiles, constants={**layout(dims).constants, **constants})
        dispatches += [product, replace(merged, constants={})]
    largest = max(ceil_div(int(merged.params["n"]), 4) for merged in found.dispatches)
    parts = {"parts": config.split * dims["tokens"] * largest * 16}
    return _after_rounding(tuple(dispatches), {**found.buffers, **parts}, config, dims, caps)


def _after_rounding(
    dispatches: tuple[Dispatch, ...], buffers: Mapping[str, int], config: LaunchConfig, dims: Dims, caps: DeviceCaps
) -> LaunchList:
    """The launch list with the kernel before it that rounds the inputs."""
    tokens, k, norm = dims["tokens"], padded_k(dims), dims["prologue"] != "none"
    stride = config.groups(dims) * config.blocks * BLOCK
    reduce, needs = reduction(caps)
    include = (f"linear/prologue_{dims['prologue']}", "shared/halves", reduce, row_count(dims))
    params = {"tokens": tokens, "k": dims["K"], "quads": k // 4, "stride": stride // 4}
    params["eps"] = float(dims["eps"]) if norm else 0.0
    rounding = Dispatch(
        Kernel("linear/round_rows", include, needs, unroll=True), tokens, params, {"BLOCKS": config.blocks}
    )
    more = {"x_half": 2 * tokens * stride, "row_scale": f32(tokens), **({"norm_weight": f32(k)} if norm else {})}
    return LaunchList((rounding, *dispatches), {**buffers, **more})
