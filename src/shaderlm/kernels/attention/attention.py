"""Routes of kv_write, attention, and of sdpa_kv, which is the one and then the other.

Where the queries stand is an operand (`positions`, of which the first counts), not a parameter: a plan is made once
for the largest `pos`, and serves every smaller one. Heads are padded to a multiple of four values (zeros change
neither scores nor the values kept).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ...gpu.caps import DeviceCaps
from ..route import Array, Dims, Dispatch, LaunchList, Route, ceil_div, covering, f32, reduction
from ..wgsl import Constant, Kernel

# Scores of one chunk of queries: large enough to fill a GPU, small enough for every binding.
_SCORE_BYTES = 64 << 20


def quads(dims: Dims) -> int:
    """Groups of four values per head."""
    return ceil_div(dims["D"], 4)


def pack_heads(array: Array, dims: Dims, caps: DeviceCaps) -> Array:
    """[..., D] with D padded to a multiple of four."""
    missing = 4 * quads(dims) - array.shape[-1]
    return np.pad(array, ((0, 0), (0, 0), (0, missing))) if missing else array


def _packer(name: str) -> Callable[[Array, Dims, DeviceCaps], dict[str, Array]]:
    return lambda array, dims, caps: {name: pack_heads(array, dims, caps)}


_PACK = {name: _packer(name) for name in ("q", "k", "v", "k_cache", "v_cache")}


def _cache_file(dims: Dims) -> str:
    return f"shared/cache_{dims['cache']}"


def cache_bytes(dims: Dims) -> int:
    """Size of one cache, keys or values."""
    return (4 if dims["cache"] == "f32" else 2) * int(dims["C"] * dims["Hkv"]) * 4 * quads(dims)


def _buffers(dims: Dims) -> dict[str, int]:
    queries = f32(dims["S"] * dims["Hq"] * 4 * quads(dims))
    caches = dict.fromkeys(("k_cache", "v_cache"), cache_bytes(dims))
    return {"q": queries, **caches, "positions": f32(dims["S"]), "out": queries}


def _write_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    row = dims["Hkv"] * quads(dims)
    kernel = Kernel("attention/kv_cache_write", (_cache_file(dims),))
    dispatch = covering(kernel, dims["S"] * row, {"count": dims["S"] * row, "row": row})
    rows = dict.fromkeys(("k", "v"), f32(dims["S"] * 4 * row))
    caches = dict.fromkeys(("k_cache", "v_cache"), cache_bytes(dims))
    return LaunchList((dispatch,), {**rows, "positions": f32(dims["S"]), **caches})


def _scale(dims: Dims) -> float:
    return float(dims["scale"]) if dims["scale"] is not None else 1.0 / float(np.sqrt(dims["D"]))


def _chunk(dims: Dims, caps: DeviceCaps) -> int:
    """Queries per pass over the cache, so that their scores fit the scratch buffer."""
    limit = min(_SCORE_BYTES, caps.max_binding, caps.max_buffer)
    return max(1, min(int(dims["S"]), limit // f32(dims["Hq"] * _row_length(dims["pos"] + dims["S"]))))


def _values(route: str, rows: int, params: Mapping[str, int | float], dims: Dims) -> Dispatch:
    kernel = Kernel(f"attention/attention_values_{route}", (_cache_file(dims),))
    heads, wide = dims["Hq"], quads(dims)
    if route == "strided":
        return covering(kernel, rows * heads * wide * 4, params)
    tiles = dims["Hkv"] * ceil_div(rows * (heads // dims["Hkv"]), 8)
    return Dispatch(kernel, tiles, params, {"WG": 64 if wide <= 32 else 128, "QUADS": wide})


def _coalesced_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return f"D must be at most 512, D is {dims['D']}" if quads(dims) > 128 else None


def _in_software(dims: Dims, caps: DeviceCaps) -> bool:
    """Chunks take a dozen barriers, which cost a CPU more than the arithmetic between them."""
    return caps.software


def _alone_in_software(dims: Dims, caps: DeviceCaps) -> bool:
    """A query head for itself has two barriers, and needs no second pass."""
    return caps.software and dims["S"] == 1 and _alone_lanes(dims, caps) > 0


def _row_length(context: int) -> int:
    """Scores of a query: whole quads, enough for the last query at the largest position."""
    return ceil_div(context, 4) * 4


def _three_pass(values: str) -> Callable[[Dims, DeviceCaps], LaunchList]:
    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        include, needs = reduction(caps)
        cache, heads, wide = (_cache_file(dims),), dims["Hq"], quads(dims)
        chunk = _chunk(dims, caps)
        dispatches: list[Dispatch] = []
        for first in range(0, dims["S"], chunk):
            rows = min(chunk, dims["S"] - first)
            context = dims["pos"] + first + rows
            stride = _row_length(context)
            params = {"rows": rows, "first": first, "stride": stride, "heads": heads, "kv_heads": dims["Hkv"]}
            params |= {"quads": wide, "scale": _scale(dims)}
            dispatches += [
                covering(
                    Kernel("attention/attention_scores", cache),
                    heads * ceil_div(rows, 4) * stride,
                    params,
                ),
                Dispatch(
                    Kernel("attention/softmax_causal", (include,), needs),
                    heads * rows,
                    params,
                    {"WG": 64 if context <= 1024 else 256},
                ),
                _values(values, rows, params, dims),
            ]
        scores = f32(heads * chunk * _row_length(dims["pos"] + dims["S"]))
        return LaunchList(tuple(dispatches), {**_buffers(dims), "scores": scores})

    return launch_list


def _strided_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return "it reads single f32 values, the cache is f16" if dims["cache"] == "f16" else None


# Keys up to which every query head reads them for itself, so that there is nothing to join: for heads of 64 and less,
# and for longer ones. Measured on an H200: 7.1 µs at 400 of 512 keys of 64, where chunks take 7.6.
_ALONE_KEYS, _ALONE_LONG_KEYS = 512, 256
_STEP = 128  # keys that are asked for at once


def _split_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    context = dims["pos"] + 1
    if not caps.subgroups:
        # Short chunks of keys until there are workgroups enough to fill a large GPU.
        keys = 32 if ceil_div(context, 32) * dims["Hkv"] <= 512 else 64
        return split_with(128, keys, dims, caps)
    lanes = _alone_lanes(dims, caps)
    if lanes:
        return alone_with(lanes, dims, caps)
    # Otherwise short chunks, and longer ones where there would be too many to join.
    keys = 64 if context <= 2048 else 128
    fitting = (config for config in ((256, keys), (128, keys)) if _fits(*config, dims, caps))
    return decode_with(*next(fitting, (128, 64)), dims, caps)


def _alone_lanes(dims: Dims, caps: DeviceCaps) -> int:
    """Threads of a workgroup that takes all keys of a query head; 0 where chunks of keys are faster, or it has no room.

    A CPU is faster with few threads, and has no others for the chunks.
    """
    if not caps.subgroups:
        return 0
    lanes = max(16, 1 << (quads(dims) - 1).bit_length()) if caps.software else min(512, caps.max_invocations)
    context = dims["pos"] + 1
    fits = f32(context + 6 * lanes) <= caps.max_workgroup_memory and quads(dims) <= lanes <= caps.max_invocations
    most = _ALONE_KEYS if dims["D"] <= 64 else _ALONE_LONG_KEYS
    return lanes if fits and (caps.software or context <= most) else 0


def alone_with(lanes: int, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """One workgroup per query head, over all keys."""
    dispatch = Dispatch(
        Kernel("attention/attention_decode_alone", (_cache_file(dims),), frozenset({"subgroups"})),
        dims["Hq"],
        {"heads": dims["Hq"], "kv_heads": dims["Hkv"], "rows": dims["C"], "scale": _scale(dims)},
        {"WG": lanes, "KEYS": dims["pos"] + 1, "QUADS": quads(dims)},
        specialised=not caps.software,
    )
    return LaunchList((dispatch,), _buffers(dims))


def _fits(lanes: int, keys: int, dims: Dims, caps: DeviceCaps) -> bool:
    """Has a workgroup room for this many keys?"""
    wide = quads(dims)
    needed = 16 * (4 * ceil_div(wide, 16) * 16 + 2 * keys + lanes // 2 + 4 * lanes)
    return wide <= lanes <= caps.max_invocations and needed <= caps.max_workgroup_memory


def decode_with(lanes: int, keys: int, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Chunks of so many keys, and a second dispatch that joins what they made."""
    splits = ceil_div(dims["pos"] + 1, keys)
    group = dims["Hq"] // dims["Hkv"]
    constants: dict[str, Constant] = {"WG": lanes, "KEYS": keys, "STEP": min(keys, _STEP)}
    constants |= {"GROUP": group, "H4": ceil_div(group, 4), "QUADS": quads(dims)}
    split = Dispatch(
        Kernel("attention/attention_decode", (_cache_file(dims),), frozenset({"subgroups"})),
        dims["Hkv"] * splits,
        {"splits": splits, "kv_heads": dims["Hkv"], "rows": dims["C"], "scale": _scale(dims)},
        constants,
        specialised=not caps.software,
    )
    return LaunchList((split, _merge(splits, keys, dims, caps)), {**_buffers(dims), **_scratch(splits, dims)})


def _scratch(splits: int, dims: Dims) -> dict[str, int]:
    return {"partial": 16 * dims["Hq"] * splits * quads(dims), "stats": 8 * dims["Hq"] * splits}


def split_with(lanes: int, keys: int, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The same without subgroups."""
    wide, group = quads(dims), dims["Hq"] // dims["Hkv"]
    splits = ceil_div(dims["pos"] + 1, keys)
    split = Dispatch(
        Kernel("attention/attention_decode_split", (_cache_file(dims),)),
        dims["Hkv"] * splits,
        {"splits": splits, "kv_heads": dims["Hkv"], "scale": _scale(dims)},
        {"WG": lanes, "KEYS": keys, "GROUP": group, "H4": ceil_div(group, 4), "QUADS": wide},
    )
    return LaunchList((split, _merge(splits, keys, dims, caps)), {**_buffers(dims), **_scratch(splits, dims)})


def _merge(splits: int, keys: int, dims: Dims, caps: DeviceCaps) -> Dispatch:
    return Dispatch(
        Kernel("attention/attention_decode_merge"),
        dims["Hq"],
        {"heads": dims["Hq"], "splits": splits, "keys": keys},
        {"WG": 256 if splits > 4 else 128, "QUADS": quads(dims)},
        specialised=not caps.software,
    )


def _split_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["S"] != 1:
        return f"S must be 1 (decode), S is {dims['S']}"
    if quads(dims) > 128:
        return f"D must be at most 512, D is {dims['D']}"
    group = dims["Hq"] // dims["Hkv"]
    if group > 16:
        return f"at most 16 query heads may share a kv head, {group} do"
    return None


def _writing_first(launch_list: Callable[[Dims, DeviceCaps], LaunchList]) -> Callable[[Dims, DeviceCaps], LaunchList]:
    def both(dims: Dims, caps: DeviceCaps) -> LaunchList:
        write, attend = _write_launch_list(dims, caps), launch_list(dims, caps)
        return LaunchList((*write.dispatches, *attend.dispatches), {**write.buffers, **attend.buffers})

    return both


_ATTENTION = (
    Route("attention", "split", _split_launch_list, _split_unsupported_reason, _PACK, prefer=_alone_in_software),
    Route(
        "attention", "coalesced", _three_pass("coalesced"), _coalesced_unsupported_reason, _PACK, prefer=_in_software
    ),
    Route("attention", "strided", _three_pass("strided"), _strided_unsupported_reason, _PACK),
)
ROUTES = (
    Route("kv_write", "quads", _write_launch_list, pack=_PACK),
    *_ATTENTION,
    *(replace(route, op="sdpa_kv", launch_list=_writing_first(route.launch_list)) for route in _ATTENTION),
)
