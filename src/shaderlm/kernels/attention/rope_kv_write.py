"""Routes of rope_kv_write and rms_norm_rope_kv_write: queries rotated, keys rotated on their way into the cache, values
beside them; the second with norms of the heads before that. And of rms_norm_rope: the same of queries alone.
"""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, covering, f32, reduction
from ..wgsl import Constant, Kernel
from .attention import cache_bytes


def _includes(dims: Dims) -> tuple[str, ...]:
    return f"shared/cache_{dims['cache']}", "shared/batch", "attention/rotate_quads"


def _params(dims: Dims) -> dict[str, int]:
    params = {"heads": dims["Hq"], "kv_heads": dims["Hkv"], "quads": dims["D"] // 4, "rotary": dims["rotary"] // 4}
    for name in ("q_first", "q_stride", "k_first", "k_stride", "v_first", "v_stride"):
        params[name] = dims[name] // 4
    return params


def _constants(dims: Dims) -> dict[str, Constant]:
    return {"INTERLEAVED": dims["interleaved"], "ONE_ROW": dims["tokens"] == 1}


def _buffers(dims: Dims) -> dict[str, int]:
    tokens = dims["tokens"]
    return {name: f32(tokens * dims[f"{name}_stride"]) for name in "qkv"} | {
        "batch": batch_bytes(tokens),
        "table": f32(dims["rotary"]),  # a row per position: at least one
        "out": f32(tokens * dims["Hq"] * dims["D"]),
        "k_cache": cache_bytes(dims, 1),
        "v_cache": cache_bytes(dims, 1),
    }


def _heads(dims: Dims) -> int:
    return int(dims["tokens"] * (dims["Hq"] + 2 * dims["Hkv"]))


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    kernel = Kernel("attention/rope_kv_write", _includes(dims))
    threads = _heads(dims) * dims["D"] // 4
    return LaunchList((covering(kernel, threads, _params(dims), _constants(dims)),), _buffers(dims))


def _norm_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    sums, needs = reduction(caps)
    kernel = Kernel("attention/rms_norm_rope_kv_write", (*_includes(dims), "attention/head_quads", sums), needs)
    params = {**_params(dims), "eps": float(dims["eps"])}
    buffers = _buffers(dims) | dict.fromkeys(("q_norm", "k_norm"), f32(dims["D"]))
    return LaunchList((Dispatch(kernel, _heads(dims), params, _constants(dims)),), buffers)


def _queries_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, values = dims["tokens"], dims["tokens"] * dims["H"] * dims["D"]
    sums, needs = reduction(caps)
    kernel = Kernel("attention/rms_norm_rope", ("shared/batch", "attention/rotate_quads", sums), needs)
    params = {"heads": dims["H"], "eps": float(dims["eps"])}
    params |= {name: dims[name] // 4 for name in ("rotary", "first", "stride")} | {"quads": dims["D"] // 4}
    buffers = {"x": f32(tokens * dims["stride"]), "weight": f32(dims["D"]), "batch": batch_bytes(tokens)}
    buffers |= {"table": f32(dims["rotary"]), "out": f32(values)}
    return LaunchList((Dispatch(kernel, tokens * dims["H"], params, _constants(dims)),), buffers)


def _queries_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return _quads_unsupported_reason(dims, ("D", "first", "stride"))


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why heads are not rotated in quads."""
    return _quads_unsupported_reason(dims, ("D", "q_first", "q_stride", "k_first", "k_stride", "v_first", "v_stride"))


def _quads_unsupported_reason(dims: Dims, names: tuple[str, ...]) -> str | None:
    pairs = 4 if dims["interleaved"] else 8
    if dims["rotary"] % pairs:
        return f"rotary % {pairs} must be 0, rotary is {dims['rotary']}"
    for name in names:
        if dims[name] % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    return None


ROUTES: tuple[Route, ...] = (
    Route("rope_kv_write", "quads", _launch_list, unsupported_reason),
    Route("rms_norm_rope_kv_write", "heads", _norm_launch_list, unsupported_reason),
    Route("rms_norm_rope", "heads", _queries_launch_list, _queries_unsupported_reason),
)
