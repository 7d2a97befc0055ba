"""Products of several rows rounded to 16 bits: a kernel rounds them, another multiplies. Configurations, preconditions.

Two kernels multiply: a GEMV for a few rows, through which weights stream, and tiles in workgroup memory for more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, as_measured, ceil_div, f32, filling, over_limits, row_count
from ..wgsl import Constant, Kernel, compose
from .formats import FORMATS
from .measured import GEMV_ROWS_INT16
from .packed import LEAST_GROUPS, epilogue_files, gated, layout, over_ranges, padded_k, pairs_are_whole


@dataclass(frozen=True)
class GemvConfig:
    """Threads per workgroup, lanes that share a row's K, rows of the weight they share, rows of x of a workgroup."""

    threads: int
    lanes_per_row: int
    rows: int
    x_rows: int

    def __str__(self) -> str:
        return f"{self.threads}x{self.lanes_per_row}x{self.rows}x{self.x_rows}"


@dataclass(frozen=True)
class TileConfig:
    """Rows of x per thread, threads across rows and columns, slices of k, blocks of each slice in a step."""

    rows: int
    threads_m: int
    threads_n: int
    slices: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.threads_m}x{self.threads_n}x{self.slices}x{self.blocks}"

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.rows * self.threads_m, 4 * self.threads_n

    @property
    def loads_fit(self) -> bool:
        """What the kernel asks for: vectors and units of x, blocks of weights that a thread loads, room for sums."""
        (rows, columns), step = self.tile, self.slices * self.blocks
        threads = self.threads_m * self.threads_n * self.slices
        sums_fit = self.slices == 1 or self.threads_n <= 8 * self.blocks
        return rows * step <= threads and columns * step <= 2 * threads and sums_fit

    def tiles(self, tokens: int, n: int) -> int:
        """Workgroups of a product."""
        return ceil_div(tokens, self.tile[0]) * ceil_div(n, self.tile[1])


_LEAST_LANES = 4  # of a subgroup: so many round a block

# Rounding ----------------------------------------------------------------------------------------------------


def _after_rounding(products: LaunchList, dims: Dims, blocks_first: bool) -> LaunchList:
    """The launch list with the dispatch before it that rounds the rows, which has the prologue."""
    rounding, buffers = rounded_rows(dims, blocks_first, row_count(dims))
    return LaunchList((rounding, *products.dispatches), {**products.buffers, **buffers})


def rounded_rows(
    dims: Dims, blocks_first: bool, count: str, constants: Mapping[str, Constant] | None = None
) -> tuple[Dispatch, dict[str, int]]:
    """The dispatch that rounds rows, and its buffers. `count` is the file that counts them, with its constants."""
    tokens, k, norm = dims["tokens"], padded_k(dims), dims["prologue"] != "none"
    include = (f"linear/prologue_{dims['prologue']}", "shared/int16_round", count)
    kernel = Kernel("linear/round_rows_int16", include, frozenset({"subgroups"}))
    parts = 1 if norm else ceil_div(k // BLOCK, compose(kernel).workgroup_size // 4)
    params = {"tokens": tokens, "k": k, "parts": parts, "eps": float(dims["eps"]) if norm else 0.0}
    buffers = {"bytes": 2 * tokens * k, "units": 16 * tokens * k // BLOCK, **({"norm_weight": f32(k)} if norm else {})}
    return Dispatch(kernel, tokens * parts, params, {"BLOCKS_FIRST": blocks_first, **(constants or {})}), buffers


def tiles_of_choices(config: TileConfig, dims: Dims, include: tuple[str, ...]) -> tuple[Kernel, dict[str, Constant]]:
    """`linear_tile_int16` over lists of rows, for experts: the kernel, and what it is specialised with."""
    form, lay = FORMATS[dims["format"]], layout(dims)
    arithmetic = ("shared/int16", lay.file, form.int16, form.int16.replace("int16_", "staged_"))
    return Kernel("linear/linear_tile_int16", (*arithmetic, *include)), {**lay.constants, **_constants(config)}


def _constants(config: TileConfig) -> dict[str, Constant]:
    assert config.loads_fit, f"{config}: a thread loads more in a step than the kernel has registers for"
    constants: dict[str, Constant] = {"TM": config.rows, "THREADS_M": config.threads_m, "THREADS_N": config.threads_n}
    return constants | {"SLICES": config.slices, "BLOCKS": config.blocks}


def _include(dims: Dims) -> tuple[str, ...]:
    """What both kernels that multiply are made of."""
    arithmetic = ("shared/int16", layout(dims).file, FORMATS[dims["format"]].int16)
    return (*arithmetic, *epilogue_files(dims), row_count(dims))


def rounding_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why rows are not rounded and multiplied as integers here."""
    if not FORMATS[dims["format"]].int16:
        return f"weights of format {dims['format']} are not multiplied as integers"
    if not caps.dot4:
        return "this device has no instruction for dot products of bytes"
    if dims["tokens"] == 1:
        return "it takes several tokens, tokens is 1"
    if dims["prologue"] not in ("none", "rms_norm"):
        return f"it has no prologue {dims['prologue']}"
    if 0 < caps.subgroup_min < _LEAST_LANES:
        return f"it needs subgroups of {_LEAST_LANES} lanes or more, those of this device have {caps.subgroup_min}"
    return None


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    reason = rounding_unsupported_reason(dims, caps)
    if reason:
        return reason
    if dims["epilogue"] == "rope_kv_write":
        return "it has no epilogue rope_kv_write"
    return pairs_are_whole(dims, caps) if gated(dims) else None


# A few rows --------------------------------------------------------------------------------------------------

MAX_GEMV_ROWS = 4  # of x in a GEMV. Eight were slower than tiles (H200)


def gemv_config(dims: Dims, caps: DeviceCaps) -> GemvConfig:
    """What was measured for a shape."""
    x_rows = min(MAX_GEMV_ROWS, _round_up(dims["tokens"]))
    n = as_measured(dims["N"], caps)
    threads, lanes, rows = next(gemv for shape, gemv in GEMV_ROWS_INT16[x_rows] if shape.has(dims["K"], n, False))
    return GemvConfig(threads, min(lanes, caps.least_lanes), rows, x_rows)


def _round_up(count: int) -> int:
    """To a power of two."""
    return 1 << (count - 1).bit_length()


def gemv_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why the GEMV of several rows does not run a shape."""
    if dims["tokens"] > MAX_GEMV_ROWS:
        return f"it takes up to {MAX_GEMV_ROWS} tokens, tokens is {dims['tokens']}"
    return _unsupported_reason(dims, caps)


def gemv_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Up to four rows: weights stream through registers."""
    return gemv_with(gemv_config(dims, caps), dims, caps)


def gemv_candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with other configurations, by name."""
    usual, launch_lists = gemv_config(dims, caps), {}
    for threads, lanes_per_row, rows in itertools.product((64, 128, 256), (8, 16, 32), (1, 2, 4)):
        fits = threads <= caps.max_invocations and lanes_per_row <= caps.least_lanes
        if (
            fits
            and dims["N"] // (rows * threads // lanes_per_row) >= filling(LEAST_GROUPS, caps)
            and not (gated(dims) and rows == 1)
        ):
            config = replace(usual, threads=threads, lanes_per_row=lanes_per_row, rows=rows)
            launch_lists[str(config)] = partial(gemv_with, config, dims, caps)
    return launch_lists


def gemv_with(config: GemvConfig, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The same with a given configuration."""
    constants = {
        "WG": config.threads,
        "LANES_PER_ROW": config.lanes_per_row,
        "ROWS": config.rows,
        "X_ROWS": config.x_rows,
    }
    per_group, tiles = config.rows * config.threads // config.lanes_per_row, ceil_div(dims["tokens"], config.x_rows)
    kernel = Kernel("linear/linear_gemv_rows_int16", _include(dims), frozenset({"subgroups"}))
    products = over_ranges(kernel, constants, lambda n: tiles * ceil_div(n, per_group), dims, caps)
    return _after_rounding(products, dims, blocks_first=False)


# Tiles -------------------------------------------------------------------------------------------------------

_LEAST_MEMORY = TileConfig(4, 2, 4, 4)
# Large tiles first, each with the workgroups that it takes to keep an H200 busy (132 cores); the last has most slices.
_TILES: tuple[tuple[TileConfig, int], ...] = (
    (TileConfig(8, 8, 16, 1, 2), 256),
    (TileConfig(8, 4, 8, 4), 256),
    (TileConfig(8, 4, 8, 2), 256),  # where 16 KiB of workgroup memory are all
    (TileConfig(4, 4, 8, 8), 128),
    (_LEAST_MEMORY, 768),  # with so many, four slices do: 8 rows of 2048 × 16384 take 25 instead of 33 µs
    (TileConfig(4, 2, 4, 16), 1),
)


def _fitting(dims: Dims, caps: DeviceCaps) -> list[TileConfig]:
    """Tiles that the device has room for; the one that needs least where there are none, for the reason why."""
    configs = [config for config, _ in _TILES]
    return [c for c in configs if over_limits(tile_with(c, dims, caps), caps) is None] or [_LEAST_MEMORY]


def tile_config(dims: Dims, caps: DeviceCaps) -> TileConfig:
    """The largest tile that rows fill by more than half and of which there are enough, else one of the smallest."""
    tokens, configs, least = dims["tokens"], _fitting(dims, caps), dict(_TILES)
    filled = [config for config in configs if 2 * tokens > config.tile[0]] or [_LEAST_MEMORY]
    return next(
        (config for config in filled if config.tiles(tokens, dims["N"]) >= filling(least[config], caps)), filled[-1]
    )


def tile_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Any number of rows, in tiles."""
    return tile_with(tile_config(dims, caps), dims, caps)


def tile_candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with other tiles, by name."""
    configs = [config for config in _fitting(dims, caps) if 2 * dims["tokens"] >= config.tile[0]]
    return {str(config): partial(tile_with, config, dims, caps) for config in configs}


def tile_with(config: TileConfig, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The same with given tiles."""
    constants = _constants(config)
    staged = FORMATS[dims["format"]].int16.replace("int16_", "staged_")
    kernel = Kernel("linear/linear_tile_int16", (*_include(dims), staged, "linear/tiles_rows", "linear/store_row"))
    more = {"split": 1, **dict.fromkeys(("queries", "keys", "width", "rotary"), 0)}
    products = over_ranges(kernel, constants, lambda n: config.tiles(dims["tokens"], n), dims, caps, more)
    return _after_rounding(products, dims, blocks_first=True)


def tile_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why tiles of 16-bit inputs do not run a shape."""
    return _unsupported_reason(dims, caps)


def several_rows(dims: Dims, caps: DeviceCaps) -> bool:
    """Where products of 16 bits go before others."""
    return caps.policy.round_inputs and bool(dims["tokens"] > 1)
