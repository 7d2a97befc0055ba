"""Route of rope_kv_write: queries rotated, keys rotated on their way into the cache, values beside them."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Constant, Kernel
from .attention import cache_bytes


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, quads = dims["T"], dims["D"] // 4
    params = {"tokens": tokens, "heads": dims["Hq"], "kv_heads": dims["Hkv"], "quads": quads}
    params["rotary"] = dims["rotary"] // 4
    for name in ("q_first", "q_stride", "k_first", "k_stride", "v_first", "v_stride"):
        params[name] = dims[name] // 4
    buffers = {name: f32(tokens * dims[f"{name}_stride"]) for name in "qkv"}
    buffers |= {
        "positions": f32(tokens),
        "table": f32(dims["positions"] * dims["rotary"]),
        "out": f32(tokens * dims["Hq"] * dims["D"]),
        "k_cache": cache_bytes(dims),
        "v_cache": cache_bytes(dims),
    }
    constants: dict[str, Constant] = {"INTERLEAVED": dims["interleaved"]}
    kernel = Kernel("attention/rope_kv_write", (f"shared/cache_{dims['cache']}",))
    threads = tokens * (dims["Hq"] + 2 * dims["Hkv"]) * quads
    return LaunchList((covering(kernel, threads, params, constants),), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    pairs = 4 if dims["interleaved"] else 8
    if dims["rotary"] % pairs:
        return f"rotary % {pairs} must be 0, rotary is {dims['rotary']}"
    for name in ("D", "q_first", "q_stride", "k_first", "k_stride", "v_first", "v_stride"):
        if dims[name] % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    return None


ROUTES = (Route("rope_kv_write", "quads", _launch_list, _unsupported_reason),)
