"""Route of kv_write: keys and values of new rows into the pool, each at its slot."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, batch_bytes, covering, f32
from ..wgsl import Kernel
from .attention import cache_bytes, packers, quads


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, row = dims["tokens"], dims["Hkv"] * quads(dims)
    kernel = Kernel("attention/kv_write", (f"shared/cache_{dims['cache']}", "shared/batch"))
    dispatch = covering(kernel, tokens * row, {"row": row}, {"ONE_ROW": tokens == 1})
    rows = dict.fromkeys(("k", "v"), f32(tokens * 4 * row))
    caches = dict.fromkeys(("k_cache", "v_cache"), cache_bytes(dims, 1))
    return LaunchList((dispatch,), {**rows, "batch": batch_bytes(tokens), **caches})


ROUTES: tuple[Route, ...] = (Route("kv_write", "quads", _launch_list, pack=packers(("k", "v", "k_cache", "v_cache"))),)
