"""Route of rope_kv_write: queries rotated, keys rotated on their way into the cache, values beside them."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Constant, Kernel
from .attention import batch_bytes, cache_bytes


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, wide = dims["tokens"], dims["D"] // 4
    params = {"heads": dims["Hq"], "kv_heads": dims["Hkv"], "quads": wide, "rotary": dims["rotary"] // 4}
    for name in ("q_first", "q_stride", "k_first", "k_stride", "v_first", "v_stride"):
        params[name] = dims[name] // 4
    buffers = {name: f32(tokens * dims[f"{name}_stride"]) for name in "qkv"}
    buffers |= {
        "batch": batch_bytes(tokens),
        "table": f32(dims["rotary"]),  # a row per position: at least one
        "out": f32(tokens * dims["Hq"] * dims["D"]),
        "k_cache": cache_bytes(dims, 1),
        "v_cache": cache_bytes(dims, 1),
    }
    constants: dict[str, Constant] = {"INTERLEAVED": dims["interleaved"], "ONE_ROW": tokens == 1}
    kernel = Kernel("attention/rope_kv_write", (f"shared/cache_{dims['cache']}", "shared/batch"))
    threads = tokens * (dims["Hq"] + 2 * dims["Hkv"]) * wide
    return LaunchList((covering(kernel, threads, params, constants),), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    pairs = 4 if dims["interleaved"] else 8
    if dims["rotary"] % pairs:
        return f"rotary % {pairs} must be 0, rotary is {dims['rotary']}"
    for name in ("D", "q_first", "q_stride", "k_first", "k_stride", "v_first", "v_stride"):
        if dims[name] % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    return None


ROUTES: tuple[Route, ...] = (Route("rope_kv_write", "quads", _launch_list, _unsupported_reason),)
