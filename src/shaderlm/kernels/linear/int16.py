"""The GEMV over inputs rounded to 16 bits, with and without a norm before it: configurations and preconditions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, ceil_div, f32, row_count
from ..wgsl import Kernel, compose
from .formats import FORMATS
from .packed import LEAST_GROUPS, epilogue_files, layout, one_row, over_ranges, padded_k, pairs_are_whole

_IN_PAIRS = ("silu_mul", "gelu_mul", "rope_kv_write")  # epilogues that take rows of the weight in pairs


@dataclass(frozen=True)
class LaunchConfig:
    """Threads per workgroup, lanes that share a row's K, rows per team, blocks of inputs staged at a time."""

    threads: int
    team: int
    rows: int
    stage: int

    def __str__(self) -> str:
        return f"{self.threads}x{self.team}x{self.rows}"


def config_for(dims: Dims, caps: DeviceCaps) -> LaunchConfig:
    """The config for a shape; the steps were measured on an H200."""
    k, n, whole = dims["K"], dims["N"], max(8, min(64, _round_up(padded_k(dims) // BLOCK)))
    in_pairs = dims["epilogue"] in _IN_PAIRS
    threads = 512 if k >= 4096 else 256 if k > 1024 else 128
    if n >= 8192:
        team, rows = 16 if k > 1024 else 8, 4 if n >= 16384 else 2
        if n >= 32768:
            threads, team = 256, 8 if in_pairs else team
    elif k > 8192:
        team, rows = whole, 4
    elif (k == 8192 and n > 2048) or (4096 <= k < 8192 and n <= 2048):
        team, rows = whole, 2
    elif 3072 <= k < 4096 and 1024 < n <= 4096 and not in_pairs:
        threads, team, rows = 512, 32, 1
    else:
        team = 32 if 4096 <= k < 8192 or 1024 < k < 4096 < n else whole
        rows = 1 if n <= (4096 if k >= 4096 else 1024) and not in_pairs else 2
    threads = min(threads, caps.max_invocations)
    return _config(threads, min(team, threads), rows, dims, caps)


def _config(threads: int, team: int, rows: int, dims: Dims, caps: DeviceCaps) -> LaunchConfig:
    """With as many blocks staged at a time as there is memory for."""
    blocks = padded_k(dims) // BLOCK
    each = _memory(threads, 2) - _memory(threads, 1)
    fitting = (caps.max_workgroup_memory - _memory(threads, 0)) // each
    return LaunchConfig(threads, team, rows, blocks if blocks <= fitting else fitting // team * team)


def _memory(threads: int, stage: int) -> int:
    """Bytes of workgroup memory with so many blocks staged."""
    return compose(Kernel("linear/linear_gemv_int16"), {"WG": threads, "STAGE": stage}).workgroup_memory


def _round_up(count: int) -> int:
    """To a power of two."""
    return 1 << (count - 1).bit_length()


def candidate_configs(dims: Dims, caps: DeviceCaps) -> list[LaunchConfig]:
    """Cuts that may be the fastest: no team is longer than a row, and the card is not left half empty."""
    found = []
    for threads, team, rows in itertools.product((128, 256, 512), (8, 16, 32, 64, 128), (1, 2, 4)):
        if team > 64 and (rows == 1 or padded_k(dims) // BLOCK < 3 * team // 2):
            continue  # of long rows alone: lanes without a second block, or with one row, wait more than they load
        groups = dims["N"] // (rows * threads // team)
        fits = threads <= caps.max_invocations and team <= max(8, _round_up(padded_k(dims) // BLOCK))
        if fits and groups >= LEAST_GROUPS and not (dims["epilogue"] in _IN_PAIRS and rows == 1):
            found.append(_config(threads, team, rows, dims, caps))
    return found


def large_enough(dims: Dims, caps: DeviceCaps) -> bool:
    """Below about this size rounding the inputs takes longer than it saves (H200)."""
    return bool(dims["K"] * dims["N"] >= (1_100_000 if dims["K"] >= 1024 else 3_000_000))


def integers_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why inputs of 16 bits are not multiplied with weights of this format here."""
    if not FORMATS[dims["format"]].int16:
        return f"weights of format {dims['format']} are not multiplied as integers"
    if not caps.dot4:
        return "this device has no instruction for dot products of bytes"
    needed = _memory(512, 64)
    if caps.max_workgroup_memory < needed:
        return f"it needs {needed:,} bytes of workgroup memory, the limit is {caps.max_workgroup_memory:,}"
    return None


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why the GEMV over 16 bits does not run a shape."""
    if dims["prologue"] == "rms_norm_add_rms_norm" and dims["epilogue"] == "rope_kv_write":
        return "the prologue rms_norm_add_rms_norm and the epilogue rope_kv_write together bind too many buffers"
    pairs = pairs_are_whole(dims, caps) if dims["epilogue"] in _IN_PAIRS else None
    return integers_unsupported_reason(dims, caps) or one_row(dims) or pairs


def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """One row: teams of lanes share the K of their rows."""
    return launch_list_with(config_for(dims, caps), dims, caps)


def candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with every configuration that may be the fastest, by name."""
    return {str(config): partial(launch_list_with, config, dims, caps) for config in candidate_configs(dims, caps)}


def launch_list_with(config: LaunchConfig, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The same with a given configuration."""
    rope = dims["epilogue"] == "rope_kv_write"
    if rope:
        epilogue: tuple[str, ...] = ("linear/epilogue_rope_kv_write", f"shared/cache_{dims['cache']}")
    else:
        epilogue = ("linear/store_rows", *epilogue_files(dims), row_count(dims))
    sums = ("shared/int16_round", "shared/int16", "shared/team_sums")
    before = {
        "none": ("linear/skip_none", "linear/prologue_none"),
        "rms_norm": ("linear/skip_none", "linear/prologue_rms_norm"),
        "rms_norm_add_rms_norm": ("linear/skip_rms_norm", "linear/prologue_rms_norm_early"),
    }
    include = (*before[dims["prologue"]], *sums, layout(dims).file, FORMATS[dims["format"]].int16, *epilogue)
    kernel = Kernel("linear/linear_gemv_int16", include, frozenset({"subgroups"}))
    constants = {"WG": config.threads, "TEAM": config.team, "ROWS": config.rows, "STAGE": config.stage}
    per_group = config.rows * config.threads // config.team
    params = {
        "eps": float(dims["eps"]) if dims["prologue"] != "none" else 0.0,
        "queries": dims["Hq"] * dims["D"],
        "keys": dims["Hkv"] * dims["D"],
        "width": dims["D"],
        "rotary": dims["rotary"],
    }
    found = over_ranges(kernel, constants, lambda rows: ceil_div(rows, per_group), dims, caps, params, True)
    buffers = dict(found.buffers)
    if dims["prologue"] != "none":
        buffers["norm_weight"] = f32(padded_k(dims))
    if dims["prologue"] == "rms_norm_add_rms_norm":
        buffers |= dict.fromkeys(("skip", "post_weight", "sum"), f32(padded_k(dims)))
    if rope:
        row = (4 if dims["cache"] == "f32" else 2) * dims["Hkv"] * dims["D"]
        buffers |= {"batch": 32, "table": f32(dims["rotary"]), "k_cache": row, "v_cache": row}
        buffers["out"] = f32(dims["Hq"] * dims["D"])
    return LaunchList(found.dispatches, buffers)
