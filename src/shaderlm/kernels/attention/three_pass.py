"""Routes of attention in three passes: scores, softmax, values. Baselines, for callers that know the number of keys.

The batch is consecutive rows of one sequence in the pool from row 0 on, the last of which sees all `keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, ceil_div, covering, f32, reduction
from ..wgsl import Kernel
from .attention import operand_bytes, packers, quads, scale_of

# Scores of one chunk of queries: large enough to fill a GPU, small enough for every binding.
_SCORE_BYTES = 64 << 20
_SHARED = ("attention/three_pass", "shared/batch")


def _row_length(context: int) -> int:
    """Scores of a query: whole quads, enough for the last query at the largest position."""
    return ceil_div(context, 4) * 4


def _chunk(dims: Dims, caps: DeviceCaps) -> int:
    """Queries per pass over the cache, so that their scores fit the scratch buffer."""
    limit = min(_SCORE_BYTES, caps.max_operand)
    return max(1, min(int(dims["tokens"]), limit // f32(dims["Hq"] * _row_length(dims["keys"]))))


def _values(route: str, rows: int, params: Mapping[str, int | float], dims: Dims, cache: str) -> Dispatch:
    kernel = Kernel(f"attention/attention_values_{route}", (*_SHARED, cache))
    heads, wide = dims["Hq"], quads(dims)
    if route == "strided":
        return covering(kernel, rows * heads * wide * 4, params)
    tiles = dims["Hkv"] * ceil_div(rows * (heads // dims["Hkv"]), 8)
    return Dispatch(kernel, tiles, params, {"WG": 64 if wide <= 32 else 128, "QUADS": wide})


def _three_pass(values: str) -> Callable[[Dims, DeviceCaps], LaunchList]:
    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        include, needs = reduction(caps)
        cache, heads, wide = f"shared/cache_{dims['cache']}", dims["Hq"], quads(dims)
        chunk = _chunk(dims, caps)
        dispatches: list[Dispatch] = []
        for first in range(0, dims["tokens"], chunk):
            rows = min(chunk, dims["tokens"] - first)
            context = dims["keys"] - dims["tokens"] + first + rows
            stride = _row_length(context)
            params = {"rows": rows, "first": first, "stride": stride, "heads": heads, "kv_heads": dims["Hkv"]}
            params |= {"quads": wide, "scale": scale_of(dims)}
            scores = Kernel("attention/attention_scores", (*_SHARED, cache))
            softmax = Kernel("attention/softmax_causal", (*_SHARED, include), needs)
            dispatches += [
                covering(scores, heads * ceil_div(rows, 4) * stride, params),
                Dispatch(softmax, heads * rows, params, {"WG": 64 if context <= 1024 else 256}),
                _values(values, rows, params, dims, cache),
            ]
        scores_bytes = f32(heads * chunk * _row_length(dims["keys"]))
        return LaunchList(tuple(dispatches), {**operand_bytes(dims, dims["keys"]), "scores": scores_bytes})

    return launch_list


def _unsupported_reason(dims: Dims) -> str | None:
    if dims["paged"]:
        return "it reads a cache without pages"
    for name in ("window", "softcap", "sinks"):
        if dims[name]:
            return f"it has no {name}, {name} is {dims[name]}"
    if not dims["keys"]:
        return "it must know the number of keys, keys is 0"
    return None


def _coalesced_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    too_wide = f"D must be at most 512, D is {dims['D']}" if quads(dims) > 128 else None
    return _unsupported_reason(dims) or too_wide


def _strided_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    single = "it reads single f32 values, the cache is f16" if dims["cache"] == "f16" else None
    return _unsupported_reason(dims) or single


_PACK = packers(("q", "k_cache", "v_cache"))
ROUTES: tuple[Route, ...] = (
    Route("attention", "coalesced", _three_pass("coalesced"), _coalesced_unsupported_reason, _PACK),
    Route("attention", "strided", _three_pass("strided"), _strided_unsupported_reason, _PACK),
)
