"""The GEMV over inputs rounded to 16 bits, with and without a norm before it: how it is cut, and where it applies."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.blocks import BLOCK
from ...gpu.facts import Facts
from ..attention.attention import cache_bytes
from ..route import Dims, Recipe, ceil_div, f32
from ..wgsl import Kernel
from .formats import FORMATS
from .packed import PLAIN, Epilogue, layout, one_row, over_ranges, padded_k, pairs_are_whole

_BLOCK_BYTES = 80  # of workgroup memory: 64 bytes, their unit and sums
_LANE_BYTES = 5  # for sums of subgroups of four


@dataclass(frozen=True)
class Cut:
    """Threads per workgroup, lanes that share a row's K, rows per team, blocks of inputs staged at a time."""

    threads: int
    team: int
    rows: int
    stage: int


def cut_of(dims: Dims, facts: Facts, epilogue: Epilogue) -> Cut:
    """The cut for a shape; the steps were measured on an H200."""
    k, n, blocks = dims["K"], dims["N"], padded_k(dims) // BLOCK
    threads = min(512 if k > 4096 else 256 if k > 1024 else 128, facts.max_invocations)
    if n >= 16384:
        team, rows = 16, 4
    elif k > 4096:
        team, rows = (64, 2) if n < 4096 else (32, 2)
    else:
        team, rows = 32, 1 if n <= 2048 and not epilogue.gated else 2
    team = min(team, threads)
    room = (facts.max_workgroup_memory - _LANE_BYTES * threads) // _BLOCK_BYTES
    return Cut(threads, team, rows, blocks if blocks <= room else room // team * team)


def large_enough(dims: Dims, facts: Facts) -> bool:
    """Below about this size rounding the inputs takes longer than it saves (H200)."""
    return bool(dims["K"] * dims["N"] >= 3_000_000)


def why_not(dims: Dims, facts: Facts) -> str | None:
    """Where the GEMV over 16 bits does not apply."""
    if not FORMATS[dims["format"]].int16:
        return f"weights of format {dims['format']} are not multiplied as integers"
    if facts.backend == "Metal":
        return "Metal has no instruction for dot products of bytes"
    if facts.max_workgroup_memory < _LANE_BYTES * 128 + _BLOCK_BYTES * 64:
        return f"{facts.max_workgroup_memory:,} bytes of workgroup memory are too few"
    return one_row(dims)


def recipe(dims: Dims, facts: Facts, epilogue: Epilogue, norm: bool = False) -> Recipe:
    """M = 1: teams of lanes share the K of their rows."""
    return recipe_with(cut_of(dims, facts, epilogue), dims, facts, epilogue, norm)


def recipe_with(cut: Cut, dims: Dims, facts: Facts, epilogue: Epilogue, norm: bool = False) -> Recipe:
    """The same with a given cut."""
    multiply = FORMATS[dims["format"]].int16
    include = ("linear/gemv_int16", "linear/store_rows", layout(dims).file, multiply, "linear/epilogue")
    kernel = Kernel(f"linear/{'rms_norm_' if norm else ''}linear_gemv_int16", include, frozenset({"subgroups"}))
    constants = {"WG": cut.threads, "TEAM": cut.team, "ROWS": cut.rows, "STAGE": cut.stage}
    per_group = cut.rows * cut.threads // cut.team
    more = {"eps": float(dims["eps"])} if norm else None
    found = over_ranges(kernel, constants, lambda rows: ceil_div(rows, per_group), dims, facts, epilogue, more)
    return Recipe(found.dispatches, {**found.buffers, "norm_weight": f32(padded_k(dims))}) if norm else found


def rope_recipe(dims: Dims, facts: Facts) -> Recipe:
    """With queries and keys rotated, and keys and values written to the cache, on the way out."""
    pairs = Epilogue(gated=True)  # rows two by two
    cut = cut_of(dims, facts, pairs)
    multiply = FORMATS[dims["format"]].int16
    include = ("linear/gemv_int16", layout(dims).file, multiply, f"shared/cache_{dims['cache']}")
    kernel = Kernel("linear/rms_norm_linear_rope_kv_write_gemv_int16", include, frozenset({"subgroups"}))
    constants = {"WG": cut.threads, "TEAM": cut.team, "ROWS": cut.rows, "STAGE": cut.stage}
    per_group = cut.rows * cut.threads // cut.team
    more = {
        "eps": float(dims["eps"]),
        "queries": dims["Hq"] * dims["D"],
        "keys": dims["Hkv"] * dims["D"],
        "width": dims["D"],
        "rotary": dims["rotary"],
    }
    found = over_ranges(kernel, constants, lambda rows: ceil_div(rows, per_group), dims, facts, PLAIN, more)
    buffers = {name: nbytes for name, nbytes in found.buffers.items() if name != "residual"}
    buffers |= {
        "norm_weight": f32(padded_k(dims)),
        "positions": f32(1),
        "table": f32(dims["positions"] * dims["rotary"]),
        "out": f32(dims["Hq"] * dims["D"]),
        "k_cache": cache_bytes(dims),
        "v_cache": cache_bytes(dims),
    }
    return Recipe(found.dispatches, buffers)


def rope_why_not(dims: Dims, facts: Facts) -> str | None:
    """Rows must come in pairs, also where the weight takes several bindings."""
    return why_not(dims, facts) or pairs_are_whole(dims, facts)
