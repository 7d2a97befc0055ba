"""The route of rms_norm_rope_attention: norms of heads, rope, the cache and attention of one row in one dispatch."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ...graph.batch import least_pool_rows
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, f32
from ..wgsl import Kernel
from .attention import (
    PACK_CACHES,
    cache_bytes,
    one_workgroup,
    quads,
    scale_of,
    score_files,
    single_pass_constants,
    single_pass_parts,
)
from .rope_kv_write import unsupported_reason as rope_unsupported_reason


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    include = (
        "attention/queries_rms_norm_rope", "attention/head_quads", "attention/rotate_quads",
        "attention/served_rows", "attention/cache_rows", "shared/subgroup_lanes",
        f"shared/cache_{dims['cache']}", "shared/batch", "shared/batch_contiguous", *score_files(dims),
    )  # fmt: skip
    constants = {**single_pass_constants(dims, caps), "ONE_ROW": True, "INTERLEAVED": dims["interleaved"]}
    params = {"heads": dims["Hq"], "kv_heads": dims["Hkv"], "max_keys": 0xFFFF_FFFF, "skipped": 0}
    params |= {name: dims[name] // 4 for name in ("rotary", "q_first", "k_first", "v_first")}
    dispatch = Dispatch(
        Kernel("attention/attention_single_pass", include, frozenset({"subgroups"})),
        dims["Hq"] * single_pass_parts(dims, caps),
        {**params, "scale": scale_of(dims), "eps": float(dims["eps"])},
        constants,
        specialised=caps.policy.specialise_constants,
    )
    return LaunchList((dispatch,), {**row_buffers(dims), "out": f32(dims["Hq"] * dims["D"])})


def row_buffers(dims: Dims) -> dict[str, int]:
    """What is read of one row before its attention, and the caches."""
    buffers = {name: f32(dims[f"{name}_stride"]) for name in "qkv"}
    buffers |= dict.fromkeys(("q_norm", "k_norm"), f32(dims["D"]))
    buffers |= {"batch": batch_bytes(1), "table": f32(dims["rotary"])}
    caches = cache_bytes(dims, least_pool_rows(False, dims["keys"]))
    return buffers | dict.fromkeys(("k_cache", "v_cache"), caches)


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why one row is not attended to together with its norms, rope and cache."""
    if dims["tokens"] != 1:
        return f"it takes one token, tokens is {dims['tokens']}"
    if dims["paged"] or dims["sinks"]:
        return "with a page table or sinks it would bind more than ten buffers"
    if not one_workgroup(dims):
        return f"one workgroup takes all keys of a row, the context class is {dims['context']}"
    if quads(dims) & (quads(dims) - 1):
        return f"D must be 4 times a power of two, D is {dims['D']}"
    lanes = min(256, caps.max_invocations)
    if quads(dims) > lanes:
        return f"D must be at most {4 * lanes}, D is {dims['D']}"
    return rope_unsupported_reason(dims, caps)


ROUTES: tuple[Route, ...] = (
    Route("rms_norm_rope_attention", "single_pass", _launch_list, unsupported_reason, PACK_CACHES),
)
