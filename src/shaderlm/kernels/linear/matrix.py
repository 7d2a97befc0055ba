"""Products of many rows by the matrix units of a device: inputs rounded to f16, sums in f32. Configurations.

`round_rows` makes f16 of the inputs, with a power of two per row; `linear_matrix` multiplies tiles; where k is split
over workgroups, `linear_matrix_merge` adds the parts up. `linear_matrix_few` takes the place of `linear_matrix` for few
rows. The weight lies as for every other route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps, MatrixShape
from ..route import Dims, Dispatch, LaunchList, ceil_div, f32, filling, processors, reduction, row_count
from ..wgsl import Constant, Kernel, compose
from .packed import (
    epilogue_files,
    gated,
    head_buffers,
    head_params,
    layout,
    over_ranges,
    padded_k,
    pairs_are_whole,
    ranges,
)
from .rows_int16 import MAX_GEMV_ROWS

MATRIX_UNITS = "shared/matrix_units"
MERGE, ROUND = "linear/linear_matrix_merge", "linear/round_rows"
X_GIVEN, X_OF_PARTS = "linear/x_given", "linear/x_of_parts"  # where ROUND has its inputs from
_NEEDS = frozenset({"f16", "subgroups", "subgroup_matrix"})


@dataclass(frozen=True)
class Inputs:
    """x_half: blocks whose eighths lie together, values of a row with zeros at its end, rows, and those of a matrix.

    Where matrices do not lie by themselves, a matrix has one row of one word.
    """

    blocks: int
    stride: int
    rows: int
    matrix_rows: int = 1
    matrix_words: int = 1


@dataclass(frozen=True)
class MatrixConfig:
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

    kernel = "linear/linear_matrix"

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

    def workgroups(self, dims: Dims) -> int:
        """Workgroups of a product."""
        return self.tiles(dims) * self.split

    def params(self, dims: Dims) -> dict[str, int]:
        """Parameters of this kernel alone."""
        return {"split": self.split}

    def inputs(self, dims: Dims, shape: MatrixShape) -> Inputs:
        """How x_half lies."""
        return Inputs(self.blocks, self.groups(dims) * self.blocks * BLOCK, dims["tokens"])

    def constants(self, shape: MatrixShape, lanes: int) -> dict[str, Constant]:
        """What the kernel is specialised with, on a device with subgroups of so many lanes."""
        tile = {"BM": self.rows, "BN": self.columns, "BLOCKS": self.blocks, "BUFFERS": self.buffers}
        tile |= {"AHEAD": 4, "FETCH": 0} if self.early else {"AHEAD": 1, "FETCH": 3}
        subgroups = dict(zip(("SUBS_M", "SUBS_N", "SUBS_K"), self.subgroups, strict=True))
        return {**tile, **subgroups, **matrix_constants(shape, lanes)}

    def fits(self, shape: MatrixShape) -> bool:
        """Does every subgroup get whole matrices?"""
        sides = zip(
            (self.rows, self.columns, 8 * self.blocks), self.subgroups, (shape.m, shape.n, shape.k), strict=True
        )
        return all(side % (count * matrix) == 0 for side, count, matrix in sides)


@dataclass(frozen=True)
class FewConfig:
    """Few rows, whose inputs stay in registers: a tile, blocks of k of a subgroup, and subgroups, which share k.

    `buffers` of a step are in workgroup memory, and `spread` workgroups share the columns (0: one for each tile).
    k is in `split` parts.
    """

    rows: int
    columns: int
    blocks: int
    subgroups: int
    buffers: int = 1
    spread: int = 0
    split: int = 1

    kernel = "linear/linear_matrix_few"

    def __str__(self) -> str:
        shared = f"{self.subgroups}{'b' if self.buffers > 1 else ''}"
        return f"few{self.rows}x{self.columns}x{self.blocks}-{shared}-{self.spread}-{self.split}"

    def workgroups(self, dims: Dims) -> int:
        """Workgroups of a product."""
        return ceil_div(dims["tokens"], self.rows) * self.params(dims)["spread"] * self.split

    def params(self, dims: Dims) -> dict[str, int]:
        """Parameters of this kernel alone."""
        tiles = ceil_div(dims["N"], self.columns)
        return {"spread": min(self.spread or tiles, tiles), "split": self.split}

    def inputs(self, dims: Dims, shape: MatrixShape) -> Inputs:
        """How x_half lies: as matrices, of whole tiles."""
        rows = ceil_div(dims["tokens"], self.rows) * self.rows
        stride = self.split * self.subgroups * self.blocks * BLOCK
        return Inputs(self.blocks, stride, rows, shape.m, shape.k // 8)

    def constants(self, shape: MatrixShape, lanes: int) -> dict[str, Constant]:
        """What the kernel is specialised with, on a device with subgroups of so many lanes."""
        tile = {"TM": self.rows // shape.m, "TN": self.columns // shape.n, "BLOCKS": self.blocks}
        return {**tile, "SUBS": self.subgroups, "BUFFERS": self.buffers, **matrix_constants(shape, lanes)}

    def fits(self, shape: MatrixShape) -> bool:
        """Does every subgroup get whole matrices?"""
        sides = ((self.rows, shape.m), (self.columns, shape.n), (8 * self.blocks, shape.k))
        return all(side % matrix == 0 for side, matrix in sides)


def matrix_constants(shape: MatrixShape, lanes: int) -> dict[str, int]:
    """What kernels with matrix units are told of the device: the matrices, and the lanes of a subgroup."""
    return {"MATRIX_M": shape.m, "MATRIX_N": shape.n, "MATRIX_K": shape.k, "SUBGROUP": lanes}


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
    if not caps.same_subgroup_size:
        return f"subgroups must have one size, they have {caps.subgroup_min} to {caps.subgroup_max} lanes"
    return None


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why matrix units do not run a shape."""
    reason = units_unsupported_reason(caps)
    if reason:
        return reason
    if dims["tokens"] == 1:
        return "one row would leave most of a matrix empty; tokens is 1"
    if dims["prologue"] not in ("none", "rms_norm"):
        return f"it has no prologue {dims['prologue']}"
    rope = dims["epilogue"] == "rope_kv_write"
    if rope and dims["tokens"] <= MAX_GEMV_ROWS:
        return f"up to {MAX_GEMV_ROWS} rows are left to gemv_rows_int16 and rope_kv_write; tokens is {dims['tokens']}"
    if rope and (dims["D"] % 4 or dims["rotary"] % 4):
        return f"D and rotary must be multiples of 4, they are {dims['D']} and {dims['rotary']}"
    config, shape = config_for(dims, caps), matrix_shape(caps)
    if shape is not None and not config.fits(shape):
        return f"matrices of {shape.m}×{shape.n}×{shape.k} do not divide its tiles of {config}"
    if rope and any(first % 4 for first, _ in ranges(dims, caps)):
        return f"four rows of the weight must fit one binding; one binding holds {caps.max_operand:,} bytes"
    return pairs_are_whole(dims, caps) if gated(dims) else None


def many_rows(dims: Dims, caps: DeviceCaps) -> bool:
    """Where matrix units go before other routes."""
    return caps.subgroup_matrix and bool(dims["tokens"] > 1)


@dataclass(frozen=True)
class Tiles:
    """Tiles for up to so many rows, tuning candidates of each other, and how many workgroups keep an H200 busy.

    `few_tiles` is the one where a core has two tiles at most: more lanes share them. `one_wave` is the one where its
    own tiles give nearly every core one. `narrow` is the one where the others leave many cores idle in the last round.
    """

    rows: int
    configs: tuple[MatrixConfig, ...]
    workgroups: int
    few_tiles: MatrixConfig | None = None
    one_wave: MatrixConfig | None = None
    narrow: MatrixConfig | None = None


# Measured on an H200, which has 132 cores. The first of a line is right on average.
TILES = (
    Tiles(
        16,
        (
            MatrixConfig(16, 64, 8, (1, 2, 2)),
            MatrixConfig(16, 64, 16, (1, 2, 4)),
            MatrixConfig(16, 32, 8, (1, 2, 2), early=True),
            MatrixConfig(16, 32, 16, (1, 2, 4), early=True),
        ),
        256,
        MatrixConfig(16, 64, 16, (1, 2, 4)),
    ),
    Tiles(32, (MatrixConfig(32, 128, 8, (1, 4, 2), early=True), MatrixConfig(32, 64, 8, (1, 2, 2), early=True)), 128),
    Tiles(
        64,
        (MatrixConfig(64, 64, 8, (2, 2, 1), early=True), MatrixConfig(64, 256, 8, (1, 8, 1))),
        192,
        one_wave=MatrixConfig(64, 256, 8, (1, 8, 1)),
    ),
    Tiles(512, (MatrixConfig(128, 128, 8, (4, 2, 1)), MatrixConfig(128, 96, 8, (4, 2, 1))), 96),
)
# For more rows, those of pictures, with weights of 16 bits: four times the registers of those of 4 bits for each block.
PICTURE_TILES = Tiles(
    1 << 32,
    (MatrixConfig(128, 128, 4, (2, 4, 1)), MatrixConfig(128, 128, 8, (4, 2, 1))),
    96,
    narrow=MatrixConfig(128, 96, 8, (4, 2, 1)),
)
_FEW_BLOCKS = 64  # of k, that a workgroup takes for few rows
_LONG_ROW = 4096  # inputs that 256 lanes of round_rows keep in registers
_SPLITS = (1, 2, 4, 8, 16)


def tiles_for(dims: Dims) -> Tiles:
    """The tiles for a number of rows."""
    if dims["tokens"] > TILES[-1].rows and dims.get("format") in ("f16", "bf16"):
        return PICTURE_TILES
    return next((tiles for tiles in TILES if dims["tokens"] <= tiles.rows), TILES[-1])


def _columns_of_rounds(config: MatrixConfig, dims: Dims, caps: DeviceCaps) -> int:
    """What a core computes one after the other, in columns."""
    return ceil_div(config.tiles(dims), processors(caps)) * config.columns


def few_config(dims: Dims, caps: DeviceCaps) -> FewConfig | None:
    """Few rows whose k a workgroup can take, or four of them where a core has one tile of columns at most.

    Products of a layer that take it run one kernel. The less code a layer has, the sooner its kernels start (H200):
    that is why 17 to 32 rows take it for many columns too, where wider tiles alone are as fast.
    """
    blocks, tiles, shape = ceil_div(dims["K"], BLOCK), ceil_div(dims["N"], 16), matrix_shape(caps)
    cores = processors(caps)
    if dims["tokens"] > 32 or blocks <= 32 or shape is None:
        return None
    split = ceil_div(blocks, _FEW_BLOCKS)
    if split > 1 and (split > 4 or tiles > cores or dims["epilogue"] == "rope_kv_write"):
        return None
    rows, buffers, most = (16, 2, 2) if dims["tokens"] <= 16 else (32, 1, 8)
    rounds = ceil_div(tiles * split, cores)
    if split == 1 and rounds > most:
        return None
    config = FewConfig(rows, 16, 8, ceil_div(blocks, 8 * split), buffers, ceil_div(tiles, rounds), split)
    if not config.fits(shape):
        return None
    shader = compose(Kernel(config.kernel), config.constants(shape, caps.subgroup_max))
    there = (caps.max_workgroup_memory, caps.max_invocations)
    return config if shader.workgroup_memory <= there[0] and shader.workgroup_size <= there[1] else None


def config_for(dims: Dims, caps: DeviceCaps) -> MatrixConfig | FewConfig:
    """The configuration for a shape."""
    return few_config(dims, caps) or tile_config(dims, caps)


def tile_config(dims: Dims, caps: DeviceCaps) -> MatrixConfig:
    """Tiles for any number of rows: k is split as far as it takes to keep the device busy."""
    tiles, cores = tiles_for(dims), processors(caps)
    if tiles.one_wave is not None and 0.8 * cores <= tiles.one_wave.tiles(dims) <= cores:
        return tiles.one_wave
    config = tiles.configs[0]
    if tiles.narrow and 1.2 * _columns_of_rounds(tiles.narrow, dims, caps) < _columns_of_rounds(config, dims, caps):
        return tiles.narrow
    count = config.tiles(dims)
    split = next((split for split in _SPLITS if count * split >= filling(tiles.workgroups, caps)), _SPLITS[-1])
    if split == 1 and cores < count <= 1.5 * cores:
        split = 2  # a second round would leave most cores idle
    if split == 1 and tiles.few_tiles is not None and count <= 2 * cores:
        return tiles.few_tiles
    if 1 < split < 8 and config.groups(dims) > 8 * split and dims["tokens"] <= 32:
        split *= 2  # sums are merged anyway, and steps of a workgroup wait for each other
    return replace(config, split=min(split, config.groups(dims)))


def candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with other tiles and parts of k, by name."""
    launch_lists = {}
    few = few_config(dims, caps)
    if few is not None:
        launch_lists[str(few)] = partial(launch_list_with, few, dims, caps)
    for tile in tiles_for(dims).configs:
        groups = tile.groups(dims)
        for split in _SPLITS:
            config = replace(tile, split=split)
            if split == 1 or (split <= groups and config.tiles(dims) * split <= 12 * processors(caps)):
                launch_lists[str(config)] = partial(launch_list_with, config, dims, caps)
    return launch_lists


def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Any number of rows."""
    return launch_list_with(config_for(dims, caps), dims, caps)


def launch_list_with(
    config: MatrixConfig | FewConfig, dims: Dims, caps: DeviceCaps, units: str = MATRIX_UNITS
) -> LaunchList:
    """The same with a given configuration. `units` is the file that multiplies matrices."""
    shape = matrix_shape(caps)
    assert shape is not None, "unsupported_reason was asked"
    rope = dims["epilogue"] == "rope_kv_write"
    rows = row_count({"batched": True}) if rope else row_count(dims)
    store: tuple[str, ...] = ("linear/finish_store", *epilogue_files(dims), rows)
    if rope:
        store = ("linear/finish_rope_kv_write", f"shared/cache_{dims['cache']}", rows)
    few = isinstance(config, FewConfig)
    if few:
        inputs_file = units.replace("shared/matrix_", "linear/inputs_")
        include = (inputs_file, *store, f"linear/part_{'whole' if rope else 'store'}")
    else:
        include = ("linear/tiles_rows", *(store if config.split == 1 else ("linear/finish_parts", rows)))
    kernel = _kernel(config.kernel, dims, units, include)
    constants = config.constants(shape, caps.subgroup_max)
    inputs = config.inputs(dims, shape)
    if config.split == 1:
        heads = head_params(dims)
        whole = over_ranges(
            kernel, constants, lambda n: config.workgroups({**dims, "N": n}), dims, caps, heads, specialise=False
        )
        dispatches = tuple(
            replace(each, params={**each.params, **config.params({**dims, "N": each.params["n"]})})
            for each in whole.dispatches
        )
        return _after_rounding(dispatches, whole.buffers, inputs, dims, caps)
    assert not (few and rope), "few rows have all of k in one part before rope_kv_write"
    merge = Kernel(MERGE, store)
    threads = compose(merge).workgroup_size
    # Of the two the merge has the epilogue's operands, and neither those of the format.
    more = {"split": config.split, **head_params(dims)}
    merges = over_ranges(
        merge, {}, lambda n: ceil_div(dims["tokens"] * ceil_div(n, 4), threads), dims, caps, more, specialise=False
    )
    both: list[Dispatch] = []
    for merged in merges.dispatches:
        range_dims = {**dims, "N": merged.params["n"]}
        product = replace(
            merged,
            kernel=kernel,
            workgroups=config.workgroups(range_dims),
            params={**merged.params, **config.params(range_dims)},
            constants={**layout(dims).constants, **constants},
            bind={**merged.bind, **({"out": "parts"} if few else {})},
        )
        both += [product, replace(merged, constants={})]
    largest = max(ceil_div(int(merged.params["n"]), 4) for merged in merges.dispatches)
    parts = {"parts": config.split * dims["tokens"] * largest * 16}
    return _after_rounding(tuple(both), {**merges.buffers, **parts}, inputs, dims, caps)


def _kernel(path: str, dims: Dims, units: str, include: tuple[str, ...]) -> Kernel:
    """A kernel over weights of a format as f16, with these matrix units."""
    file, needs = layout(dims).file, _NEEDS if units == MATRIX_UNITS else frozenset[str]()
    weights = (file, file.replace("format_", "dequant_f16_"), "shared/dequant_f16", units)
    return Kernel(path, (*weights, *include), needs, units == MATRIX_UNITS)


def _after_rounding(
    dispatches: tuple[Dispatch, ...], buffers: Mapping[str, int], inputs: Inputs, dims: Dims, caps: DeviceCaps
) -> LaunchList:
    """The launch list with the kernel before it that rounds the inputs."""
    rounding, more = rounded_rows(inputs, dims, caps, row_count(dims))
    if dims["epilogue"] == "rope_kv_write":
        more |= head_buffers(dims)
    return LaunchList((rounding, *dispatches), {**buffers, **more})


def rounded_rows(
    inputs: Inputs, dims: Dims, caps: DeviceCaps, count: str, constants: Mapping[str, Constant] | None = None
) -> tuple[Dispatch, dict[str, int]]:
    """The dispatch that rounds inputs, and its buffers. `count` is the file that counts rows, with its constants."""
    tokens, k, norm = dims["tokens"], padded_k(dims), dims["prologue"] != "none"
    reduce, needs = reduction(caps)
    include = (X_GIVEN, f"linear/prologue_{dims['prologue']}", "shared/dequant_f16", reduce, count)
    params = {"tokens": tokens, "k": dims["K"], "quads": k // 4, "stride": inputs.stride // 4}
    params |= {"eps": float(dims["eps"]) if norm else 0.0, "split": 0, "adds": 0}
    how: dict[str, Constant] = {"BLOCKS": inputs.blocks, "MATRIX_ROWS": inputs.matrix_rows}
    how |= {"MATRIX_WORDS": inputs.matrix_words, **(constants or {})}
    if k > _LONG_ROW and tokens <= filling(64, caps) and inputs.matrix_rows == 1:  # else one kernel for all products
        how["WG"] = min(512, caps.max_invocations)
    rounding = Dispatch(Kernel(ROUND, include, needs, unroll=True), tokens, params, how)
    more = {"x_half": 2 * inputs.rows * inputs.stride, "row_scale": f32(tokens)}
    return rounding, more | ({"norm_weight": f32(k)} if norm else {})


def tiles_of_choices(
    config: MatrixConfig, dims: Dims, caps: DeviceCaps, rows: int, include: tuple[str, ...], units: str
) -> tuple[Kernel, Mapping[str, Constant], Inputs]:
    """`linear_matrix` over lists of rows, for experts: the kernel, what it is specialised with, and its inputs."""
    shape = matrix_shape(caps)
    assert shape is not None, "units_unsupported_reason was asked"
    return (
        _kernel(config.kernel, dims, units, include),
        {**layout(dims).constants, **config.constants(shape, caps.subgroup_max)},
        config.inputs({**dims, "tokens": rows}, shape),
    )
