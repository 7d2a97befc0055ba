"""Routes of linear_experts over every weight format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ...graph.conditions import EXPERT_GATES
from ..linear import int16, matrix, packed, rows_int16
from ..linear.formats import FORMATS
from ..route import (
    Array,
    Dims,
    Dispatch,
    LaunchList,
    Route,
    WeightPart,
    batch_if_read,
    ceil_div,
    covering,
    f32,
    is_specialised,
    over_limits,
    part,
    row_count,
)
from ..wgsl import Kernel

# Bits of the parameter `combine` (choices.wgsl).
_COMBINE = {"none": 0, **dict.fromkeys(EXPERT_GATES, 1), "sum": 2}
_BIAS, _RESIDUAL = 4, 8


def _matrix_rows(dims: Dims) -> int:
    """The matrices of all experts lie one below the other."""
    return int(dims["experts"] * dims["N"])


def _pack_weight(weight: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    words, scales = FORMATS[dims["format"]].repack(weight)
    return {part("weight", 0): words, part("scales", 0): scales}


def _weight_parts(dims: Dims, caps: DeviceCaps) -> dict[str, WeightPart]:
    """All experts in one binding: which of them a row wants is known on the device alone."""
    form, rows = FORMATS[dims["format"]], _matrix_rows(dims)
    return {part(name, 0): WeightPart(0, rows, kind, form.layout) for name, kind in _BUFFERS}


_BUFFERS = (("weight", "words"), ("scales", "scales"))


def _exact_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["prologue"] != "none":
        return f"it has no prologue {dims['prologue']}"
    return _unsupported_reason(dims, caps)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["prologue"] not in ("none", "rms_norm"):
        return f"it has no prologue {dims['prologue']}"
    return f"K must be a multiple of {BLOCK}, K is {dims['K']}" if dims["K"] % BLOCK else None


def _buffers(dims: Dims) -> dict[str, int]:
    lay, rows = packed.layout(dims), _matrix_rows(dims)
    summed, choices = dims["combine"] == "sum", dims["tokens"] * dims["used"]
    width = dims["N"] // 2 if dims["combine"] in EXPERT_GATES else dims["N"]
    out = f32((dims["tokens"] if summed else choices) * width)
    return {
        "x": f32((choices if summed else dims["tokens"]) * dims["K"]),
        part("weight", 0): rows * lay.row_bytes,
        part("scales", 0): rows * lay.groups * lay.group_bytes,
        "bias": f32(rows) if dims["bias"] else 0,
        "ids": f32(choices),
        "factors": f32(choices) if summed else 0,
        "residual": out if dims["residual"] else 0,
        "out": out,
        **({"norm_weight": f32(dims["K"])} if dims["prologue"] != "none" else {}),
        **batch_if_read(dims),
    }


def _combine(dims: Dims) -> int:
    return int(_COMBINE[dims["combine"]] + dims["bias"] * _BIAS + dims["residual"] * _RESIDUAL)


def _apply(dims: Dims) -> tuple[str, ...]:
    """What is made of gate and up; where they are not combined, anything."""
    if dims["combine"] == "gelu_mul":
        return "pointwise/apply_gelu_mul", "shared/gelu"
    return (f"pointwise/apply_{dims['combine'] if dims['combine'] in EXPERT_GATES else 'silu_mul'}",)


def _as_linear(dims: Dims) -> Dims:
    """The product that is most alike: with the K of all experts that lanes share, or the columns of all of a row."""
    span, each = (dims["used"], 1) if dims["combine"] == "sum" else (1, dims["used"])
    epilogue = "silu_mul" if dims["combine"] in EXPERT_GATES else "none"  # columns are taken in pairs
    return {"K": dims["K"] * span, "N": dims["N"] * each, "format": dims["format"], "epilogue": epilogue}


def _gemv_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    config = packed.gemv_shape(_as_linear(dims), caps)
    return _few_rows_launch_list("experts/linear_experts_gemv", config, config.files, config.needs, dims, caps, {})


def _int16_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return _int16_with(int16.config_for(_as_linear(dims), caps), dims, caps)


def _int16_candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """Other launch configurations of one row, which decoding takes."""
    if dims["tokens"] > 1:
        return {}
    configs = int16.candidate_configs(_as_linear(dims), caps)
    return {str(config): partial(_int16_with, config, dims, caps) for config in configs}


def _int16_with(config: int16.Int16Config, dims: Dims, caps: DeviceCaps) -> LaunchList:
    reduce = ("shared/reduce_subgroup",) if dims["prologue"] != "none" else ()
    prologue = (f"linear/prologue_{dims['prologue']}", f"linear/root_{dims['prologue']}", *reduce)
    arithmetic = (
        *prologue,
        "shared/subgroup_lanes",
        "shared/int16_round",
        "shared/int16",
        "shared/row_sums",
        FORMATS[dims["format"]].int16,
    )
    needs = frozenset({"subgroups"})
    eps = float(dims["eps"]) if dims["prologue"] != "none" else 0.0
    path = "experts/linear_experts_gemv_int16"
    return _few_rows_launch_list(path, config, arithmetic, needs, dims, caps, {"eps": eps})


def _int16_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return _unsupported_reason(dims, caps) or int16.integers_unsupported_reason(dims, caps)


def _few_rows_launch_list(
    path: str,
    config: packed.GemvConfig | int16.Int16Config,
    arithmetic: tuple[str, ...],
    needs: frozenset[str],
    dims: Dims,
    caps: DeviceCaps,
    more: Mapping[str, float],
) -> LaunchList:
    """Every row reads the matrices of its experts for itself."""
    lay, summed = packed.layout(dims), dims["combine"] == "sum"
    kernel = Kernel(path, (*arithmetic, lay.file, "experts/choices", *_apply(dims), row_count(dims)), needs)
    params = {
        "tokens": dims["tokens"],
        "k": dims["K"],
        "n": dims["N"],
        "groups": lay.groups,
        "experts": dims["experts"],
        "used": dims["used"],
        "combine": _combine(dims),
        **more,
    }
    tiles = ceil_div(dims["N"], config.per_group)
    workgroups = dims["tokens"] * (1 if summed else dims["used"]) * tiles
    there = {"scales": lay.groups, "bias": dims["bias"], "factors": summed, "residual": dims["residual"]}
    dispatch = Dispatch(
        kernel,
        workgroups,
        params,
        {**lay.constants, **config.constants(caps)},
        {name: part(name, 0) for name, _ in _BUFFERS},
        specialised=is_specialised(dims["tokens"], caps),
        unbound=tuple(name for name, is_there in there.items() if not is_there),
    )
    return LaunchList((dispatch,), _buffers(dims))


_FEW_ROWS = 16  # up to which every row reads the matrices of its experts for itself
_TILE = 32  # choices of one expert that a workgroup takes


def _grouped_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Many rows: choices are sorted by their experts, so that those of one expert share its matrix."""
    lay, n = packed.layout(dims), dims["N"]
    group, tiles = _group(dims, _TILE)
    params = {"k": dims["K"], "n": n, "groups": lay.groups, "used": dims["used"], "tiles": tiles}
    product = Dispatch(
        Kernel("experts/linear_experts_tile", (lay.file, "experts/store_choice", *_apply(dims))),
        tiles * ceil_div(n, 64),
        {**params, "combine": _combine(dims)},
        {**lay.constants, "TILE": _TILE},
    )
    return _with_sums((group,), product, dims, {"tiles": 16 * tiles})


def _group(dims: Dims, tile: int) -> tuple[Dispatch, int]:
    """The dispatch that sorts choices by their experts, and how many tiles of choices there may be."""
    experts, choices = dims["experts"], dims["tokens"] * dims["used"]
    # Every expert may leave its last tile unfilled; none has a tile without a choice.
    tiles = min(choices, choices // tile + experts)
    params = {"tokens": dims["tokens"], "experts": experts, "used": dims["used"], "tiles": tiles}
    constants = {"EXPERTS": max(8, 1 << (experts - 1).bit_length()), "TILE": tile}
    return Dispatch(Kernel("experts/group_experts", (row_count(dims),)), 1, params, constants), tiles


def _with_sums(before: tuple[Dispatch, ...], product: Dispatch, dims: Dims, more: Mapping[str, int]) -> LaunchList:
    """The launch list of products of choices, and of their sums over the choices of a row where these are wanted."""
    summed, tokens, used, n = dims["combine"] == "sum", dims["tokens"], dims["used"], dims["N"]
    bind = {name: part(name, 0) for name, _ in _BUFFERS} | ({"out": "products"} if summed else {})
    product = replace(product, bind=bind)
    buffers = {**_buffers(dims), "order": f32(tokens * used), **more}
    if not summed:
        del buffers["residual"]
        return LaunchList((*before, product), buffers)
    kernel = Kernel("experts/sum_choices", (row_count(dims),))
    sizes = {"tokens": tokens, "used": used, "n": n, "add": dims["residual"]}
    add = covering(kernel, tokens * n, sizes, bind={"y": "products"})
    return LaunchList((*before, product, add), {**buffers, "products": f32(tokens * used * n)})


# By the choices that an expert has on average. Those of linear for as many rows (H200).
_MATRIX_TILES = (
    (8, matrix.MatrixConfig(16, 64, 8, (1, 2, 2))),
    (24, matrix.MatrixConfig(32, 64, 8, (1, 2, 2), early=True)),
    (96, matrix.MatrixConfig(64, 64, 8, (2, 2, 1), early=True)),
)
_LARGE_TILE = matrix.MatrixConfig(128, 128, 8, (4, 2, 1))


def matrix_config(dims: Dims) -> matrix.MatrixConfig:
    """Tiles that most experts fill."""
    average = dims["tokens"] * dims["used"] / dims["experts"]
    return next((config for most, config in _MATRIX_TILES if average <= most), _LARGE_TILE)


def _matrix_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return matrix_with(matrix_config(dims), dims, caps)


def matrix_with(
    config: matrix.MatrixConfig, dims: Dims, caps: DeviceCaps, units: str = matrix.MATRIX_UNITS
) -> LaunchList:
    """Many rows by matrix units: as grouped, with inputs rounded to f16."""
    summed, used = dims["combine"] == "sum", dims["used"]
    rows = dims["tokens"] * (used if summed else 1)  # of x
    group, tiles = _group(dims, config.rows)
    include = ("experts/tiles_choices", "experts/finish_choices", "experts/store_choice", *_apply(dims))
    kernel, constants, inputs = matrix.tiles_of_choices(config, dims, caps, rows, include, units)
    product = Dispatch(kernel, tiles * ceil_div(dims["N"], config.columns), _tile_params(dims, tiles), constants)
    rounding, halves = matrix.rounded_rows(inputs, {**dims, "tokens": rows}, caps, *_choice_count(dims))
    return _with_sums((group, rounding), product, dims, {"tiles": 16 * tiles, **halves})


def _tile_params(dims: Dims, tiles: int) -> dict[str, int]:
    """Parameters of products of tiles of choices (tiles_choices.wgsl)."""
    each = 1 if dims["combine"] == "sum" else dims["used"]
    params = {"k": dims["K"], "n": dims["N"], "groups": packed.layout(dims).groups, "each": each}
    return {**params, "tiles": tiles, "combine": _combine(dims), "split": 1}


def _choice_count(dims: Dims) -> tuple[str, Mapping[str, int]]:
    """The file that counts the rows of x, and its constants. Where experts have their own inputs, these are choices."""
    if dims["combine"] == "sum" and dims["batched"]:
        return "experts/row_count_choices", {"USED": dims["used"]}
    return row_count(dims), {}


# By the choices that an expert has on average. Those of linear for as many rows (H200).
_INT16_TILES = (
    (8, rows_int16.TileConfig(4, 4, 8, 8)),
    (24, rows_int16.TileConfig(8, 4, 8, 4)),
)
_LARGE_INT16_TILE = rows_int16.TileConfig(8, 8, 16, 1, 2)
_LEAST_INT16_TILE = rows_int16.TileConfig(4, 2, 4, 4)  # where 16 KiB of workgroup memory are all


def int16_tile(dims: Dims, caps: DeviceCaps) -> rows_int16.TileConfig:
    """Tiles that most experts fill, if the device has room for them."""
    average = dims["tokens"] * dims["used"] / dims["experts"]
    config = next((config for most, config in _INT16_TILES if average <= most), _LARGE_INT16_TILE)
    return config if over_limits(grouped_int16_with(config, dims), caps) is None else _LEAST_INT16_TILE


def _grouped_int16_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return grouped_int16_with(int16_tile(dims, caps), dims)


def grouped_int16_with(config: rows_int16.TileConfig, dims: Dims) -> LaunchList:
    """Many rows rounded to 16 bits: as grouped, with products of bytes."""
    rows = dims["tokens"] * (dims["used"] if dims["combine"] == "sum" else 1)  # of x
    tile_rows, tile_columns = config.tile
    group, tiles = _group(dims, tile_rows)
    include = ("experts/tiles_choices", "experts/store_choice", *_apply(dims))
    kernel, constants = rows_int16.tiles_of_choices(config, dims, include)
    product = Dispatch(kernel, tiles * ceil_div(dims["N"], tile_columns), _tile_params(dims, tiles), constants)
    rounding, rounded = rows_int16.rounded_rows({**dims, "tokens": rows}, True, *_choice_count(dims))
    return _with_sums((group, rounding), product, dims, {"tiles": 16 * tiles, **rounded})


def _grouped_int16_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return _unsupported_reason(dims, caps) or rows_int16.rounding_unsupported_reason(dims, caps)


def _matrix_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    reason = _unsupported_reason(dims, caps) or matrix.units_unsupported_reason(caps)
    if reason:
        return reason
    config, shape = matrix_config(dims), matrix.matrix_shape(caps)
    if shape is not None and not config.fits(shape):
        return f"matrices of {shape.m}×{shape.n}×{shape.k} do not divide its tiles of {config}"
    return None


def _many_rows(dims: Dims, caps: DeviceCaps) -> bool:
    return bool(dims["tokens"] > _FEW_ROWS)


def _rounded(dims: Dims, caps: DeviceCaps) -> bool:
    return not _many_rows(dims, caps) and int16.large_enough(_as_linear(dims), caps)


_route = partial(Route, "linear_experts", pack={"weight": _pack_weight}, weight_parts=_weight_parts)
_rounding_route = partial(_route, exact=False)

ROUTES: tuple[Route, ...] = (
    _route("gemv", _gemv_launch_list, _exact_unsupported_reason),
    _rounding_route(
        "gemv_int16", _int16_launch_list, _int16_unsupported_reason, prefer=_rounded, candidates=_int16_candidates
    ),
    _rounding_route("matrix", _matrix_launch_list, _matrix_unsupported_reason, prefer=_many_rows),
    _rounding_route("grouped_int16", _grouped_int16_launch_list, _grouped_int16_unsupported_reason, prefer=_many_rows),
    _route("grouped", _grouped_launch_list, _exact_unsupported_reason, prefer=_many_rows),
)
