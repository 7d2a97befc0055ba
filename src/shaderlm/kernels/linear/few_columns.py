"""The route of products with fewer columns than a block of weights has: the only one whose inputs need no padding."""

from __future__ import annotations

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import Array, Dims, LaunchList, ceil_div, f32, row_count
from ..wgsl import Kernel
from .formats import FORMATS
from .packed import epilogue_files, gated, layout, over_ranges, pairs_are_whole

_LANES = 64  # WG of the kernel


def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """A thread for two results."""
    tokens, columns = dims["tokens"], dims["K"]
    kernel = Kernel("linear/linear_few_columns", (layout(dims).file, *epilogue_files(dims), row_count(dims)))
    products = over_ranges(
        kernel, {}, lambda rows: ceil_div(tokens * ceil_div(rows, 2), _LANES), dims, caps, {"columns": columns}
    )
    return LaunchList(products.dispatches, {**products.buffers, "x": f32(tokens * columns)})


def _wrong(dims: Dims) -> str | None:
    if dims["K"] >= BLOCK:
        return f"it is for less than {BLOCK} columns, K is {dims['K']}"
    if FORMATS[dims["format"]].layout["kind"] != "dense":
        return f"rows of {dims['format']} have whole blocks"
    if dims["prologue"] != "none" or dims["rounded"] or dims["epilogue"] == "rope_kv_write":
        return "it has no prologue, does not round its results and writes no keys"
    return None


def applies(dims: Dims) -> bool:
    """To a shape, if not on every device."""
    return _wrong(dims) is None


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Formats of blocks have whole ones."""
    return _wrong(dims) or (pairs_are_whole(dims, caps) if gated(dims) else None)


def is_preferred(dims: Dims, caps: DeviceCaps) -> bool:
    """Wherever it applies."""
    return bool(dims["K"] < BLOCK)


def pack_x(x: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    """As they are."""
    return {"x": x}
