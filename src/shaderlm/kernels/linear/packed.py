"""What linear and linear_q4gsw share: GEMV, shared-memory tile and plain rows over any weight format.

Weights lie on the GPU as 16-byte words per row and, beside them, scales per row (`formats`). What is done with x before
the product is the prologue, what is done with the sums the epilogue: attributes of the op `linear`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import (
    Array,
    Dims,
    Dispatch,
    LaunchList,
    WeightPart,
    as_measured,
    batch_bytes,
    batch_if_read,
    ceil_div,
    f32,
    filling,
    is_specialised,
    part,
    processors,
    reduction,
    row_count,
    row_ranges,
)
from ..wgsl import Constant, Kernel, compose
from .formats import FORMATS, KernelFormat


@dataclass(frozen=True)
class Layout:
    """Bytes per row of a packed weight, its groups of scales, and how its WGSL file is specialised."""

    file: str
    row_bytes: int
    groups: int
    group_bytes: int
    constants: Mapping[str, Constant]


LEAST_GROUPS = 16  # of a config that is worth timing: fewer workgroups leave most of an H200 idle


def layout(dims: Dims) -> Layout:
    """Layout of the weight of `linear` (by format) or `linear_q4gsw` (by group size and scale dtype)."""
    k, form = padded_k(dims), _format(dims)
    row_bytes = k // BLOCK * form.block_bytes
    if "format" in dims:
        groups = k // form.group if form.group else 0
        return Layout(form.file, row_bytes, groups, form.group_bytes, form.constants)
    half = dims["scales"] == "f16"
    group_blocks = dims["group_size"] // BLOCK
    constants: dict[str, Constant] = {"F16_SCALES": half, "GROUP_BLOCKS": max(1, group_blocks)}
    return Layout(form.file, row_bytes, ceil_div(k, dims["group_size"]), 2 if half else 4, constants)


def _format(dims: Dims) -> KernelFormat:
    """The entry in the table of formats; q4gsw has q4_0's words."""
    return FORMATS[dims.get("format", "q4_0")]


def padded_k(dims: Dims) -> int:
    """K as the kernels see it: dense formats are padded with zeros to whole blocks of 32."""
    return ceil_div(dims["K"], BLOCK) * BLOCK


def ranges(dims: Dims, caps: DeviceCaps) -> list[tuple[int, int]]:
    """Row ranges of the weight, each within one binding together with its scales, and of whole pairs if they fit."""
    lay = layout(dims)
    return row_ranges(dims["N"], max(lay.row_bytes, lay.groups * lay.group_bytes), caps, 2)


def weight_parts(dims: Dims, caps: DeviceCaps) -> dict[str, WeightPart]:
    """The buffers of a weight and its bias, by the names in launch lists."""
    form, parts = _format(dims), {}
    for i, (first, end) in enumerate(ranges(dims, caps)):
        parts[part("weight", i)] = WeightPart(first, end, "words", form.layout)
        parts[part("scales", i)] = WeightPart(first, end, "scales", form.layout)
        parts[part("bias", i)] = WeightPart(first, end, "vector", {})
    return parts


def gated(dims: Dims) -> bool:
    """Does the epilogue multiply rows of the weight in pairs?"""
    return dims.get("epilogue") in ("silu_mul", "gelu_mul")


def epilogue_files(dims: Dims) -> tuple[str, ...]:
    """What becomes of sums: the epilogue, and the functions that it takes."""
    if dims.get("epilogue") == "gelu_residual":
        return "linear/epilogue_gelu_residual", "linear/activation_gelu", "shared/gelu"
    name = {"gelu_mul": "gelu", "gelu": "gelu", "gelu_erf": "gelu_erf"}.get(dims.get("epilogue", "none"), "silu")
    return "linear/epilogue", f"linear/activation_{name}", f"shared/{name}"


def columns(dims: Dims, rows: int) -> int:
    """How many results the rows of a weight make."""
    return rows // 2 if gated(dims) else rows


def pairs_are_whole(dims: Dims, caps: DeviceCaps) -> str | None:
    """What the gated epilogue wants of the row ranges."""
    if any(first % 2 for first, _ in ranges(dims, caps)):
        row = f"a row takes {layout(dims).row_bytes:,} bytes, one binding holds {caps.max_operand:,}"
        return f"two rows of the weight must fit one binding; {row}"
    return None


def split_rows(name: str, array: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """One array per row range."""
    return {part(name, i): array[a:b] for i, (a, b) in enumerate(ranges(dims, caps))}


def pack_x(x: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Inputs [M, K], with zeros up to a multiple of 32."""
    missing = padded_k(dims) - x.shape[1]
    return {"x": np.pad(x, ((0, 0), (0, missing))) if missing else x}


def pack_norm_weight(weight: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Weights of a norm over the inputs, with zeros where those have them."""
    return {"norm_weight": np.pad(weight, (0, padded_k(dims) - weight.shape[0]))}


def pack_bias(bias: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Bias [N] by row ranges."""
    return split_rows("bias", bias, dims, caps)


def head_params(dims: Dims) -> dict[str, int]:
    """Parameters of the epilogue rope_kv_write."""
    queries, keys = dims["Hq"] * dims["D"], dims["Hkv"] * dims["D"]
    return {"queries": queries, "keys": keys, "width": dims["D"], "rotary": dims["rotary"]}


def head_buffers(dims: Dims) -> dict[str, int]:
    """Buffers of the epilogue rope_kv_write."""
    row = (4 if dims["cache"] == "f32" else 2) * dims["Hkv"] * dims["D"]
    buffers = {"batch": batch_bytes(dims["tokens"]), "table": f32(dims["rotary"]), "k_cache": row, "v_cache": row}
    return {**buffers, "out": f32(dims["tokens"] * dims["Hq"] * dims["D"])}


# Bits of the parameter `epilogue` (epilogue.wgsl).
_BIAS, _RESIDUAL, _GATED = 1, 2, 4


def over_ranges(
    kernel: Kernel,
    constants: Mapping[str, Constant],
    workgroups: Callable[[int], int],
    dims: Dims,
    caps: DeviceCaps,
    more_params: Mapping[str, float] | None = None,
    always_unbind: bool = False,
    specialise: bool = True,
) -> LaunchList:
    """One dispatch per range of the weight's rows; `workgroups` counts them from the rows of the range.

    Operands that are not there have no binding in specialised shaders, or where `always_unbind` says so; elsewhere an
    empty buffer is bound, so that one compiled shader serves all. `specialise`: where the policy specialises.
    """
    lay, k = layout(dims), padded_k(dims)
    constants = {**lay.constants, **constants}
    residual, tokens = dims.get("epilogue") in ("add", "gelu_residual"), dims["tokens"]
    out = tokens * columns(dims, dims["N"])
    there = {"bias": dims["bias"], "scales": lay.groups}
    buffers = {"x": f32(tokens * k), "out": f32(out), **batch_if_read(dims)}
    if not {"linear/epilogue", "linear/epilogue_gelu_residual"}.isdisjoint(kernel.include):
        there["residual"] = residual
        buffers["residual"] = f32(out) if residual else 0
    specialised = specialise and is_specialised(tokens, caps)
    unbound = tuple(name for name, is_there in there.items() if not is_there) if specialised or always_unbind else ()
    dispatches = []
    for i, (first, end) in enumerate(ranges(dims, caps)):
        rows = end - first
        buffers[part("weight", i)] = rows * lay.row_bytes
        buffers[part("scales", i)] = rows * lay.groups * lay.group_bytes
        buffers[part("bias", i)] = f32(rows) if dims["bias"] else 0
        params = {
            "tokens": tokens,
            "k": k,
            "n": rows,
            "groups": lay.groups,
            "n_first": columns(dims, first),
            "n_total": columns(dims, dims["N"]),
            "epilogue": dims["bias"] * _BIAS + residual * _RESIDUAL + gated(dims) * _GATED,
            **(more_params or {}),
        }
        bind = {name: part(name, i) for name in ("weight", "scales", "bias")}
        dispatches.append(
            Dispatch(kernel, workgroups(rows), params, constants, bind, specialised=specialised, unbound=unbound)
        )
    return LaunchList(tuple(dispatches), buffers)


@dataclass(frozen=True)
class GemvConfig:
    """Launch configuration of a GEMV: threads, lanes that share the K of a row, rows that they share, and who adds up.

    `stage` blocks of x at a time are staged in workgroup memory, and multiplied in "f32" or, for the formats with
    integer weights, "fixed" point.
    """

    threads: int
    lanes_per_row: int
    rows: int
    reduction: str
    arithmetic: str
    stage: int

    @property
    def per_group(self) -> int:
        """Rows of a workgroup."""
        return self.rows * self.threads // self.lanes_per_row

    def constants(self, caps: DeviceCaps) -> dict[str, Constant]:
        """Those of the kernel."""
        constants: dict[str, Constant] = {
            "WG": self.threads,
            "LANES_PER_ROW": self.lanes_per_row,
            "ROWS": self.rows,
            "STAGE": self.stage,
        }
        return constants | ({"SUBGROUP": caps.subgroup_size} if self.reduction == "row_sum_subgroup" else {})

    @property
    def needs(self) -> frozenset[str]:
        """Device features."""
        return frozenset({"subgroups"} if self.reduction == "row_sum_subgroup" else ())

    @property
    def files(self) -> tuple[str, ...]:
        """What the kernel includes for it."""
        sums = ("shared/subgroup_lanes", "shared/row_sums") if self.reduction == "row_sum_subgroup" else ()
        return (*sums, f"shared/{self.reduction}", f"shared/stage_{self.arithmetic}")


# Measured on an H200: about this many threads, four rows to the lanes that share them, read memory fastest.
_GEMV_THREADS = 56_000


def gemv_shape(dims: Dims, caps: DeviceCaps) -> GemvConfig:
    """The launch configuration for a shape: the more rows there are, the fewer lanes share one."""
    k, n, integer_rows = dims["K"], dims["N"], _format(dims).integer_rows
    threads = min(256, caps.max_invocations)
    stage = 128 if k > 2048 and caps.max_workgroup_memory >= 32 << 10 else 64
    if integer_rows and caps.dot4 and n >= 4096:
        arithmetic, rows = "fixed", integer_rows
        lanes_per_row = power_of_two(filling(_GEMV_THREADS, caps) * rows / n, 8 if k >= 1024 else 4, 64)
    else:
        arithmetic = "f32"
        rows = 2 if gated(dims) or (k >= 4096 and dims.get("format") != "f32") else 1
        lanes_per_row = 64 if k >= 4096 else 32
        if as_measured(n, caps) <= 512 and k >= 1024 and rows == 1:  # a router: few rows for so many lanes
            threads, lanes_per_row = min(128, threads), 64
    reduction = "row_sum_subgroup" if caps.subgroups else "row_sum_tree"
    return GemvConfig(threads, min(lanes_per_row, threads), rows, reduction, arithmetic, stage)


def power_of_two(number: float, least: int, most: int) -> int:
    """The power of two nearest to a number, within bounds."""
    return max(least, min(most, 1 << round(math.log2(max(number, 1)))))


def gemv_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """One row: groups of lanes share the K of their rows."""
    return gemv_with(gemv_shape(dims, caps), dims, caps)


def gemv_candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with other threads, lanes per row and rows, by name."""
    usual = gemv_shape(dims, caps)
    launch_lists = {}
    for threads, lanes_per_row, rows in itertools.product((128, 256), (8, 16, 32, 64), (1, 2, 4)):
        groups = dims["N"] // (rows * threads // lanes_per_row)
        if (
            threads <= caps.max_invocations
            and groups >= filling(LEAST_GROUPS, caps)
            and not (gated(dims) and rows == 1)
        ):
            config = replace(usual, threads=threads, lanes_per_row=lanes_per_row, rows=rows)
            launch_lists[f"{threads}x{lanes_per_row}x{rows}"] = partial(gemv_with, config, dims, caps)
    return launch_lists


def gemv_with(config: GemvConfig, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The GEMV with a given config."""
    prologue = dims.get("prologue", "none")
    reduce = (reduction(caps)[0],) if prologue != "none" else ()
    include = (
        *config.files,
        layout(dims).file,
        f"linear/prologue_{prologue}",
        f"linear/root_{prologue}",
        *reduce,
        "linear/store_rows",
    )
    kernel = Kernel("linear/linear_gemv_staged", (*include, *epilogue_files(dims), row_count(dims)), config.needs)
    params = {"eps": float(dims["eps"]) if prologue != "none" else 0.0}
    products = over_ranges(
        kernel, config.constants(caps), lambda rows: ceil_div(rows, config.per_group), dims, caps, params
    )
    if prologue == "none":
        return products
    return LaunchList(products.dispatches, {**products.buffers, "norm_weight": f32(padded_k(dims))})


def tile_shared_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Any number of rows: tiles of 16·TM × 16·TN staged in workgroup memory."""
    tm, tn = _tile_of(dims, caps)
    tiles_m = ceil_div(dims["tokens"], 16 * tm)
    # Few tiles leave room for longer steps, which wait less often; many tiles want the memory for each other.
    few = tiles_m * ceil_div(dims["N"], 16 * tn) <= filling(256, caps)
    quads = 8 if few and caps.max_workgroup_memory >= 9 * 128 * 16 else 4
    kernel = Kernel("linear/linear_tile_shared", (layout(dims).file, *epilogue_files(dims), row_count(dims)))
    constants = {"TM": tm, "TN": tn, "QUADS": quads}
    return over_ranges(kernel, constants, lambda rows: tiles_m * ceil_div(rows, 16 * tn), dims, caps)


def _tile_of(dims: Dims, caps: DeviceCaps) -> tuple[int, int]:
    """Results of a thread, rows × columns: as many as leave a tile for each processor, or the fewest there are."""
    sizes = [(8, 4), (4, 4), (2, 4), (1, 4), (1, 2), *([] if gated(dims) else [(1, 1)])]
    for tm, tn in sizes:
        tiles = ceil_div(dims["tokens"], 16 * tm) * ceil_div(dims["N"], 16 * tn)
        # The largest tiles want many rounds of them, and rows to fill them (measured on an H200).
        if tiles >= (filling(1024, caps) if tm == 8 else processors(caps)) and (tm < 8 or dims["tokens"] >= 256):
            return tm, tn
    return sizes[-1]


def rows_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Any number of rows: each thread up to 2 × 8 results by itself, without barriers.

    The sizes were measured on SwiftShader.
    """
    x_rows = min(dims["tokens"], 2)
    inputs, needs = ("quad", frozenset({"subgroups"})) if caps.subgroups else ("each", frozenset[str]())
    include = (f"linear/inputs_{inputs}", layout(dims).file, *epilogue_files(dims), row_count(dims))
    kernel = Kernel("linear/linear_rows", include, needs)
    threads = compose(kernel).workgroup_size
    tiles_m = ceil_div(dims["tokens"], x_rows)

    def workgroups(rows: int) -> int:
        return ceil_div(tiles_m * 4 * ceil_div(rows, 32), threads)

    return over_ranges(kernel, {"X_ROWS": x_rows}, workgroups, dims, caps)


def on_a_cpu(dims: Dims, caps: DeviceCaps) -> bool:
    """Where `rows_launch_list` is the one to prefer."""
    return caps.policy.prefer_few_barriers


def one_row(dims: Dims) -> str | None:
    """GEMV's first precondition."""
    return f"tokens must be 1, tokens is {dims['tokens']}" if dims["tokens"] != 1 else None
