"""Route of attention_reach: attention where rows of an image see all of it."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ...graph.batch import IMAGE_WORDS, least_pool_rows
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32
from ..wgsl import Kernel
from .attention import cache_bytes, packers, quads, scale_of, score_constants

_LANES = 64
_MOST = 256  # values of a head: a thread has two rows of them


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, pool = dims["tokens"], _pool_rows(dims)
    queries = f32(tokens * dims["Hq"] * 4 * quads(dims))
    buffers = {"q": queries, **dict.fromkeys(("k_cache", "v_cache"), cache_bytes(dims, pool))}
    buffers |= {"batch": batch_bytes(tokens), "image_rows": f32(IMAGE_WORDS * tokens), "out": queries}
    batch = ("shared/batch", f"shared/batch_{'pages' if dims['paged'] else 'contiguous'}")
    include = ("attention/cache_rows", f"shared/cache_{dims['cache']}", *batch, "attention/visible")
    if dims["paged"]:
        buffers["page_table"] = f32(1)
    params = {"tokens": tokens, "heads": dims["Hq"], "kv_heads": dims["Hkv"], "scale": scale_of(dims)}
    constants = {"QUADS": quads(dims), "ONE_ROW": tokens == 1, **score_constants(dims)}
    grid = ceil_div(tokens * dims["Hq"], _LANES)
    return LaunchList((Dispatch(Kernel("attention/attention_reach", include), grid, params, constants),), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return f"D must be at most {_MOST}, D is {dims['D']}" if dims["D"] > _MOST else None


def _pool_rows(dims: Dims) -> int:
    return least_pool_rows(dims["paged"])


_PACK = packers(("q",)) | packers(("k_cache", "v_cache"), _pool_rows)
ROUTES: tuple[Route, ...] = (Route("attention_reach", "rows", _launch_list, _unsupported_reason, _PACK),)
