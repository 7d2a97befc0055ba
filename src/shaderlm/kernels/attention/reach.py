"""Routes of attention_reach: attention where rows of an image see all of it.

Such rows are of runs, which the kernels for prompts serve: with matrix units or without. Other rows go where those of
`attention` go. Few rows, and devices that have no such kernel, take one thread for each row and head.
"""

from __future__ import annotations

from typing import Any

from ...gpu.caps import DeviceCaps
from ...graph.batch import IMAGE_WORDS, least_pool_rows
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32
from ..wgsl import Kernel
from . import matrix
from .attention import (
    SEES_IMAGE,
    batch_files,
    cache_bytes,
    first_tile,
    launch_list_with,
    packers,
    quads,
    scale_of,
    score_constants,
)

_LANES = 64
_MOST = 256  # values of a head: a thread has two rows of them


def _as_attention(dims: Dims) -> dict[str, Any]:
    return {**dims, "sinks": False}


def with_runs(runs: Dispatch | None, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """With the dispatch that serves runs."""
    launch_list = launch_list_with(runs, _as_attention(dims), caps)
    return LaunchList(launch_list.dispatches, {**launch_list.buffers, "image_rows": f32(IMAGE_WORDS * dims["tokens"])})


def _by_matrix_units(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return with_runs(next(iter(matrix.usable(_as_attention(dims), caps, SEES_IMAGE)), None), dims, caps)


def _by_tiles(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return with_runs(first_tile(_as_attention(dims), caps, SEES_IMAGE), dims, caps)


def _tiles_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if first_tile(_as_attention(dims), caps, SEES_IMAGE) is None:
        return "it is for runs, by tiles that are too large here, or there are none"
    return None


def _by_rows(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, pool = dims["tokens"], _pool_rows(dims)
    queries = f32(tokens * dims["Hq"] * 4 * quads(dims))
    buffers = {"q": queries, **dict.fromkeys(("k_cache", "v_cache"), cache_bytes(dims, pool))}
    buffers |= {"batch": batch_bytes(tokens), "image_rows": f32(IMAGE_WORDS * tokens), "out": queries}
    include = ("attention/cache_rows", f"shared/cache_{dims['cache']}", *batch_files(dims)[1:], "attention/visible")
    if dims["paged"]:
        buffers["page_table"] = f32(1)
    params = {"tokens": tokens, "heads": dims["Hq"], "kv_heads": dims["Hkv"], "scale": scale_of(dims)}
    constants = {"QUADS": quads(dims), "ONE_ROW": tokens == 1, **score_constants(dims)}
    grid = ceil_div(tokens * dims["Hq"], _LANES)
    return LaunchList((Dispatch(Kernel("attention/attention_reach", include), grid, params, constants),), buffers)


def _rows_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return f"D must be at most {_MOST}, D is {dims['D']}" if dims["D"] > _MOST else None


def _pool_rows(dims: Dims) -> int:
    return least_pool_rows(dims["paged"])


_PACK = packers(("q",)) | packers(("k_cache", "v_cache"), _pool_rows)
ROUTES: tuple[Route, ...] = (
    Route("attention_reach", "tiles", _by_tiles, _tiles_unsupported_reason, _PACK),
    Route("attention_reach", "rows", _by_rows, _rows_unsupported_reason, _PACK),
    Route(
        "attention_reach",
        "matrix",
        _by_matrix_units,
        lambda dims, caps: matrix.unsupported_reason(_as_attention(dims), caps),
        _PACK,
        exact=False,
        prefer=lambda dims, caps: True,
    ),
)
