"""The GEMV over inputs rounded to 16 bits, with and without a norm before it: configurations and preconditions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..attention.attention import cache_bytes
from ..route import Dims, LaunchList, ceil_div, f32
from ..wgsl import Kernel
from .formats import FORMATS
from .packed import LEAST_GROUPS, PLAIN, Epilogue, layout, one_row, over_ranges, padded_k, pairs_are_whole

_BLOCK_BYTES = 80  # of workgroup memory: 64 bytes, their unit and sums
_LANE_BYTES = 5  # for sums of subgroups of four
_PAIRS = Epilogue(gated=True)  # rows two by two


@dataclass(frozen=True)
class LaunchConfig:
    """Threads per workgroup, lanes that share a row's K, rows per team, blocks of inputs staged at a time."""

    threads: int
    team: int
    rows: int
    stage: int

    def __str__(self) -> str:
        return f"{self.threads}x{self.team}x{self.rows}"


def config_for(dims: Dims, caps: DeviceCaps, epilogue: Epilogue) -> LaunchConfig:
    """The config for a shape; the steps were measured on an H200."""
    k, n, blocks = dims["K"], dims["N"], padded_k(dims) // BLOCK
    threads = min(256 if 1024 < k < 4096 or n >= 32768 else 512 if k >= 4096 else 128, caps.max_invocations)
    if n >= 16384:
        team, rows = 16 if k > 1024 else 8, 4
    else:
        team = 32 if 4096 <= k < 8192 else max(8, min(64, _round_up(blocks)))
        few = n <= (4096 if k >= 4096 else 1024)
        rows = 4 if k > 8192 else 1 if few and not epilogue.gated else 2
    return _config(threads, min(team, threads), rows, dims, caps)


def _config(threads: int, team: int, rows: int, dims: Dims, caps: DeviceCaps) -> LaunchConfig:
    """With as many blocks staged at a time as there is memory for."""
    blocks = padded_k(dims) // BLOCK
    room = (caps.max_workgroup_memory - _LANE_BYTES * threads) // _BLOCK_BYTES
    return LaunchConfig(threads, team, rows, blocks if blocks <= room else room // team * team)


def _round_up(count: int) -> int:
    """To a power of two."""
    return 1 << (count - 1).bit_length()


def candidate_configs(dims: Dims, caps: DeviceCaps, epilogue: Epilogue) -> list[LaunchConfig]:
    """Cuts that may be the fastest: no team is longer than a row, and the card is not left half empty."""
    found = []
    for threads, team, rows in itertools.product((128, 256, 512), (8, 16, 32, 64), (1, 2, 4)):
        groups = dims["N"] // (rows * threads // team)
        fits = threads <= caps.max_invocations and team <= max(8, _round_up(padded_k(dims) // BLOCK))
        if fits and groups >= LEAST_GROUPS and not (epilogue.gated and rows == 1):
            found.append(_config(threads, team, rows, dims, caps))
    return found


def large_enough(dims: Dims, caps: DeviceCaps) -> bool:
    """Below about this size rounding the inputs takes longer than it saves (H200)."""
    return bool(dims["K"] * dims["N"] >= 3_000_000)


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Where the GEMV over 16 bits does not apply."""
    if not FORMATS[dims["format"]].int16:
        return f"weights of format {dims['format']} are not multiplied as integers"
    if caps.backend == "Metal":
        return "Metal has no instruction for dot products of bytes"
    if caps.max_workgroup_memory < _LANE_BYTES * 512 + _BLOCK_BYTES * 64:
        return f"{caps.max_workgroup_memory:,} bytes of workgroup memory are too few"
    return one_row(dims)


def launch_list(dims: Dims, caps: DeviceCaps, epilogue: Epilogue, norm: bool = False) -> LaunchList:
    """M = 1: teams of lanes share the K of their rows."""
    return launch_list_with(config_for(dims, caps, epilogue), dims, caps, epilogue, norm)


def candidates(
    dims: Dims, caps: DeviceCaps, epilogue: Epilogue, norm: bool = False
) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with every config that may be the fastest, by name."""
    found = candidate_configs(dims, caps, epilogue)
    return {str(config): partial(launch_list_with, config, dims, caps, epilogue, norm) for config in found}


def launch_list_with(
    config: LaunchConfig, dims: Dims, caps: DeviceCaps, epilogue: Epilogue, norm: bool = False
) -> LaunchList:
    """The same with a given config."""
    multiply = FORMATS[dims["format"]].int16
    include = ("linear/gemv_int16", "linear/store_rows", layout(dims).file, multiply, "linear/epilogue")
    kernel = Kernel(f"linear/{'rms_norm_' if norm else ''}linear_gemv_int16", include, frozenset({"subgroups"}))
    constants = {"WG": config.threads, "TEAM": config.team, "ROWS": config.rows, "STAGE": config.stage}
    per_group = config.rows * config.threads // config.team
    more = {"eps": float(dims["eps"])} if norm else None
    found = over_ranges(kernel, constants, lambda rows: ceil_div(rows, per_group), dims, caps, epilogue, more)
    return LaunchList(found.dispatches, {**found.buffers, "norm_weight": f32(padded_k(dims))}) if norm else found


def rope_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """With queries and keys rotated, and keys and values written to the cache, on the way out."""
    return rope_launch_list_with(config_for(dims, caps, _PAIRS), dims, caps)


def rope_candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with every config that may be the fastest, by name."""
    return {
        str(config): partial(rope_launch_list_with, config, dims, caps)
        for config in candidate_configs(dims, caps, _PAIRS)
    }


def rope_launch_list_with(config: LaunchConfig, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The same with a given config."""
    multiply = FORMATS[dims["format"]].int16
    include = ("linear/gemv_int16", layout(dims).file, multiply, f"shared/cache_{dims['cache']}")
    kernel = Kernel("linear/rms_norm_linear_rope_kv_write_gemv_int16", include, frozenset({"subgroups"}))
    constants = {"WG": config.threads, "TEAM": config.team, "ROWS": config.rows, "STAGE": config.stage}
    per_group = config.rows * config.threads // config.team
    more = {
        "eps": float(dims["eps"]),
        "queries": dims["Hq"] * dims["D"],
        "keys": dims["Hkv"] * dims["D"],
        "width": dims["D"],
        "rotary": dims["rotary"],
    }
    found = over_ranges(kernel, constants, lambda rows: ceil_div(rows, per_group), dims, caps, PLAIN, more)
    # There is no residual to add, and no place for one.
    dispatches = tuple(
        replace(one, unbound=tuple(name for name in one.unbound if name != "residual")) for one in found.dispatches
    )
    buffers = {name: nbytes for name, nbytes in found.buffers.items() if name != "residual"}
    buffers |= {
        "norm_weight": f32(padded_k(dims)),
        "positions": f32(1),
        "table": f32(dims["positions"] * dims["rotary"]),
        "out": f32(dims["Hq"] * dims["D"]),
        "k_cache": cache_bytes(dims),
        "v_cache": cache_bytes(dims),
    }
    return LaunchList(dispatches, buffers)


def rope_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Rows must come in pairs, also where the weight takes several bindings."""
    return unsupported_reason(dims, caps) or pairs_are_whole(dims, caps)
