"""The GEMV over inputs that the product before it has rounded to 16 bits: configuration, preconditions, layout of x."""

from __future__ import annotations

import numpy as np

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import Array, Dims, LaunchList, ceil_div, f32, filling, row_count
from ..wgsl import Kernel
from . import int16
from .formats import FORMATS
from .measured import AFTER_ROUNDING, NEARLY_ALL, is_measured
from .packed import epilogue_files, gated, layout, one_row, over_ranges, padded_k

_ROWS = 3  # of the weight, that a lane group computes


def _shape(dims: Dims, caps: DeviceCaps) -> tuple[int, int]:
    """Threads, and lanes that share a row's K: one for each block, or for several (on Dawn at least two).

    H200, K 6,912, N 1,152: wgpu takes 4.4 µs with three groups of 216 lanes, and 4.9 with two blocks for each of 108.
    Dawn, whose compiler writes something else, takes 5.05 and 4.85.
    """
    blocks = padded_k(dims) // BLOCK
    most = min(1024 if caps.policy.large_workgroups else 256, caps.max_invocations)
    rounds = max(ceil_div(blocks, most), 2 if caps.implementation == "dawn" else 1)
    lanes_per_row = max(4, ceil_div(blocks, rounds))
    lane_groups = max(1, min(most // lanes_per_row, ceil_div(dims["N"], filling(NEARLY_ALL, caps) * _ROWS)))
    return min(most, ceil_div(lane_groups * lanes_per_row, 32) * 32), lanes_per_row


def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """One row: groups of lanes share the K of their rows."""
    threads, lanes_per_row = _shape(dims, caps)
    multiplied = ("linear/loaded_rows", "shared/subgroup_lanes", "shared/int16", "shared/row_sums", layout(dims).file)
    stored = ("linear/store_rows", *epilogue_files(dims), row_count(dims))
    include = (*multiplied, FORMATS[dims["format"]].int16, *stored)
    constants = {"WG": threads, "LANES_PER_ROW": lanes_per_row, "ROWS": _ROWS, "SUBGROUP": caps.subgroup_size}
    constants |= {
        "SLOTS": int16.slots(threads, lanes_per_row),
        "ROUNDS": ceil_div(padded_k(dims) // BLOCK, lanes_per_row),
    }
    kernel = Kernel("linear/linear_gemv_rounded", include, frozenset({"subgroups"}))
    products = over_ranges(
        kernel, constants, lambda rows: ceil_div(rows, _ROWS * (threads // lanes_per_row)), dims, caps, {}, True
    )
    return LaunchList(products.dispatches, {**products.buffers, "x": f32(padded_k(dims))})


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why rounded inputs are not multiplied here."""
    if dims["prologue"] != "int16_activations":
        return "it takes inputs that are rounded"
    if dims["epilogue"] == "rope_kv_write" or gated(dims):
        return f"it has no epilogue {dims['epilogue']}"
    if not is_measured(AFTER_ROUNDING, dims, caps):
        return "it was not measured to be faster for such a shape on a device like this"
    return one_row(dims) or int16.integers_unsupported_reason(dims, caps)


def pack_x(x: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """Inputs [1, K] as linear/store_rounded leaves them, in as many bytes as they take in f32."""
    blocks = x.astype(np.float32).reshape(-1, BLOCK)
    unit = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(32512)
    values = np.rint(np.divide(blocks, unit, out=np.zeros_like(blocks), where=unit > 0)).astype(np.int32)
    high = (values + 128) >> 8
    low = values - 256 * high
    first, second = slice(0, BLOCK // 2), slice(BLOCK // 2, BLOCK)
    planes = [part[:, half].astype(np.int8) for half in (first, second) for part in (high, low)]
    units = np.zeros((len(blocks), 4), np.float32)
    units[:, 0] = unit[:, 0]
    units[:, 1], units[:, 2] = (unit[:, 0] * values[:, half].sum(axis=1) for half in (first, second))
    written = np.frombuffer(b"".join(part.tobytes() for part in (*planes, units)), np.float32)
    return {"x": np.pad(written, (0, x.size - written.size)).reshape(x.shape)}
