"""Routes of linear_q4gsw: 4-bit groupwise symmetric weights, as given or prepacked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.blocks import nibbles_q4gsw
from ...gpu.caps import DeviceCaps
from ..route import Array, Dims, Dispatch, LaunchList, Packer, Route, ceil_div, f32, part, row_ranges
from ..wgsl import Kernel, compose
from . import packed

_OPERANDS = "linear/q4gsw_operands"
_TILE_KERNEL = Kernel("linear/linear_q4gsw_tile", (_OPERANDS,))

# As given: weight [N, words] u32, scales [groups, N] f32 ------------------------------------------------


def _words(dims: Dims) -> int:
    return ceil_div(dims["K"], 8)


def _groups(dims: Dims) -> int:
    return ceil_div(dims["K"], dims["group_size"])


def _ranges(dims: Dims, caps: DeviceCaps) -> list[tuple[int, int]]:
    return row_ranges(dims["N"], f32(max(_words(dims), _groups(dims))), caps)


def _packer(name: str) -> Packer:
    """One array per row range; rows of the weight are the last axis of the scales, and the first of others."""

    def pack(array: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
        values = array.astype(np.float32) if name == "scales" else array
        return {
            part(name, i): values[:, a:b] if name == "scales" else values[a:b]
            for i, (a, b) in enumerate(_ranges(dims, caps))
        }

    return pack


_AS_GIVEN = {name: _packer(name) for name in ("weight", "scales", "bias")}


def _launch_list(
    kernel: Kernel, workgroups: Callable[[Dims, int, DeviceCaps], int]
) -> Callable[[Dims, DeviceCaps], LaunchList]:
    """One dispatch per row range; `workgroups` counts them from the rows of the range."""

    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        dispatches = []
        buffers = {"x": f32(dims["tokens"] * dims["K"]), "residual": 0, "out": f32(dims["tokens"] * dims["N"])}
        for i, (first, end) in enumerate(_ranges(dims, caps)):
            rows = end - first
            params = {"tokens": dims["tokens"], "k": dims["K"], "n": rows, "words": _words(dims)}
            params |= {"group_size": dims["group_size"], "groups": _groups(dims)}
            params |= {"n_first": first, "n_total": dims["N"]}
            buffers[part("weight", i)] = f32(rows * _words(dims))
            buffers[part("scales", i)] = f32(rows * _groups(dims))
            buffers[part("bias", i)] = f32(rows) if dims["bias"] else 0
            bind = {name: part(name, i) for name in ("weight", "scales", "bias")}
            count = workgroups(dims, rows, caps)
            dispatches.append(Dispatch(kernel, count, params, {"HAS_BIAS": dims["bias"]}, bind))
        return LaunchList(tuple(dispatches), buffers)

    return launch_list


def _per_input_row(dims: Dims, rows: int, caps: DeviceCaps) -> int:
    return int(dims["tokens"])


def _per_tile(dims: Dims, rows: int, caps: DeviceCaps) -> int:
    tiles = ceil_div(dims["tokens"], 4) * ceil_div(rows, 4)
    return ceil_div(tiles, compose(_TILE_KERNEL).workgroup_size)


def _per_output(dims: Dims, rows: int, caps: DeviceCaps) -> int:
    return rows


def _clamped(dims: Dims, rows: int, caps: DeviceCaps) -> int:
    return min(rows, caps.max_workgroups)  # the kernel strides over the rest


def _tile_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["group_size"] % 8:
        return f"group_size % 8 must be 0, group_size is {dims['group_size']}"
    return None


def _gemv_bytes_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return packed.one_row(dims) or (f"K must be even, K is {dims['K']}" if dims["K"] % 2 else None)


def _gemv_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    k = f"K % 8 must be 0, K is {dims['K']}" if dims["K"] % 8 else None
    return packed.one_row(dims) or k or _tile_unsupported_reason(dims, caps)


# Prepacked: weight [N, K/32] 16-byte words, scales [N, groups] f32 or f16 --------------------------------


def prepack_weight(weight: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Reorder nibbles so that a 16-byte word holds a block of 32 as `format_q4` reads it."""
    nibbles = (nibbles_q4gsw(weight) + 8).astype(np.uint8)
    blocks = nibbles.reshape(weight.shape[0], -1, 32)
    words = (blocks[:, :, :16] | (blocks[:, :, 16:] << 4)).reshape(weight.shape[0], -1)
    return packed.split_rows("weight", words, dims, caps)


def prepack_scales(scales: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Scales of a row side by side."""
    return packed.split_rows("scales", np.ascontiguousarray(scales.T), dims, caps)


_PREPACKED = {"weight": prepack_weight, "scales": prepack_scales, "bias": packed.pack_bias}


def _packed_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["K"] % 32:
        return f"K % 32 must be 0, K is {dims['K']}"
    if dims["group_size"] % 32:
        return f"group_size % 32 must be 0, group_size is {dims['group_size']}"
    return None


def _gemv_packed_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return packed.one_row(dims) or _packed_unsupported_reason(dims, caps)


_GEMV = _launch_list(Kernel("linear/linear_q4gsw_gemv", (_OPERANDS, "shared/reduce_tree")), _clamped)
_GEMV_BYTES = _launch_list(Kernel("linear/linear_q4gsw_gemv_bytes", (_OPERANDS,)), _per_output)
_TILE = _launch_list(_TILE_KERNEL, _per_tile)
_NAIVE = _launch_list(Kernel("linear/linear_q4gsw_naive", (_OPERANDS,)), _per_input_row)

ROUTES: tuple[Route, ...] = (
    Route("linear_q4gsw", "gemv_packed", packed.gemv_launch_list, _gemv_packed_unsupported_reason, _PREPACKED),
    Route("linear_q4gsw", "gemv", _GEMV, _gemv_unsupported_reason, _AS_GIVEN),
    Route("linear_q4gsw", "tile_shared", packed.tile_shared_launch_list, _packed_unsupported_reason, _PREPACKED),
    Route(
        "linear_q4gsw", "rows", packed.rows_launch_list, _packed_unsupported_reason, _PREPACKED, prefer=packed.on_a_cpu
    ),
    Route("linear_q4gsw", "tile", _TILE, _tile_unsupported_reason, _AS_GIVEN),
    Route("linear_q4gsw", "gemv_bytes", _GEMV_BYTES, _gemv_bytes_unsupported_reason, _AS_GIVEN),
    Route("linear_q4gsw", "naive", _NAIVE, pack=_AS_GIVEN),
)
