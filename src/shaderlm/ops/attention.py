"""Attention over a KV cache, and rope, NumPy in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..compile import run_op
from ..errors import InputError, RouteError
from ..gpu import Array, Device
from ..graph import resolve
from ..graph.batch import contiguous_batch
from ..graph.reference import rope_table
from ..kernels import choose
from . import checks


def _cache(op: str, name: str, value: Any, heads: int, width: int) -> Array:
    cache = checks.array(op, name, value, (np.float32, np.float16), 3, "[C, Hkv, D]")
    if cache.shape[1:] != (heads, width):
        raise InputError(f"{op}: {name} must be [C, {heads}, {width}] to match k, got {list(cache.shape)}")
    if not cache.flags.writeable:
        raise InputError(f"{op}: {name} must be writable, it is a read-only array")
    return cache


def sdpa_kv(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    pos: int,
    scale: float | None = None,
    *,
    route: str | None = None,
    device: Any = None,
) -> Array:
    """Write k and v [S, Hkv, D] into the caches [C, Hkv, D] at `pos`, in place, and attend over them.

    Query s sees the keys up to pos + s. q and the result are float32 [S, Hq, D]; the caches may be float32
    or float16. The scale is 1/sqrt(D) unless given. `route` names one of `attention`.
    """
    op = "sdpa_kv"
    q = checks.floats(op, "q", q, 3, "[S, Hq, D]")
    k = checks.floats(op, "k", k, 3, "[S, Hkv, D]")
    v = checks.floats(op, "v", v, 3, "[S, Hkv, D]")
    S, Hq, D = q.shape
    checks.shape(op, "k", k, (S, k.shape[1], D), "[S, Hkv, D] with S and D of q")
    checks.shape(op, "v", v, k.shape, "the shape of k")
    Hkv = k.shape[1]
    k_cache, v_cache = _cache(op, "k_cache", k_cache, Hkv, D), _cache(op, "v_cache", v_cache, Hkv, D)
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise InputError(
            f"{op}: k_cache and v_cache must be alike, got {k_cache.dtype} {list(k_cache.shape)} and "
            f"{v_cache.dtype} {list(v_cache.shape)}"
        )
    for name, rows in (("k", k), ("v", v)):
        largest = float(np.abs(rows).max())
        if not largest <= float(np.finfo(k_cache.dtype).max):
            raise InputError(f"{op}: {name} must be finite in the cache's {k_cache.dtype}, its largest is {largest:g}")
    if np.shares_memory(k_cache, v_cache):
        raise InputError(f"{op}: k_cache and v_cache must be two arrays, they share memory")
    if Hq % Hkv:
        raise InputError(f"{op}: the query heads must be a multiple of the kv heads, got Hq={Hq}, Hkv={Hkv}")
    pos, C = checks.whole(op, "pos", pos, 0), len(k_cache)
    if pos + S > C:
        raise InputError(f"{op}: the cache holds C={C} positions; pos={pos} + S={S} needs {pos + S}")
    factor = None if scale is None else checks.number(op, "scale", scale)
    shape = {"tokens": S, "Hkv": Hkv, "D": D, "cache": "f16" if k_cache.dtype == np.float16 else "f32"}
    attended = resolve("attention", {**shape, "Hq": Hq, "scale": factor, "keys": pos + S})
    batch, on = contiguous_batch(pos, S), checks.device_of(device)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    try:
        if on is not None:
            chosen = choose("attention", attended, on.caps, route)
            _fits(caches, chosen.launch_list(attended, on.caps).buffers, on)
            route = chosen.name
        raw = run_op(on, "kv_write", resolve("kv_write", shape), {"k": k, "v": v, "batch": batch, **caches}, None)
        written = {name: raw[name].view(cache.dtype).reshape(C, Hkv, -1)[..., :D] for name, cache in caches.items()}
        operands = {"q": q, "batch": batch, **written}
        out = run_op(on, "attention", attended, operands, route)["out"].view(np.float32).reshape(S, Hq, -1)
    except RouteError as problem:
        raise RouteError(f"{op}: {problem}") from problem
    for name, cache in caches.items():
        cache[pos : pos + S] = written[name][pos : pos + S]
    return np.ascontiguousarray(out[..., :D])


def _fits(caches: Mapping[str, Array], least: Mapping[str, int], device: Device) -> None:
    """A launch list says how many bytes of a cache it needs: the caches that were given may be larger."""
    for name, cache in caches.items():
        nbytes, limit = max(cache.nbytes, least[name]), device.caps.max_operand
        if nbytes > limit:
            raise RouteError(f"{name} takes {nbytes:,} bytes, one binding holds {limit:,} on {device.caps.name}")


def rope(
    x: Any,
    positions: Any,
    *,
    theta: float = 10000.0,
    factors: Any = None,
    rotary: int | None = None,
    interleaved: bool = False,
    route: str | None = None,
    device: Any = None,
) -> Array:
    """Rotate the heads of x [T, H, D] by their positions [T].

    half-split (pairs i, i + rotary/2) or interleaved (pairs 2i, 2i + 1); `rotary` values of each head are
    rotated (default: all), the rest copied; `factors` [rotary/2] divide the frequencies (rope scaling).
    """
    op = "rope"
    x = checks.floats(op, "x", x, 3, "[T, H, D]")
    T, H, D = x.shape
    positions = checks.ids(op, "positions", positions, 1, 1 << 31, "[T]")
    checks.shape(op, "positions", positions, (T,), "[T]")
    rotary = D if rotary is None else checks.whole(op, "rotary", rotary, 2)
    dims = resolve(op, {"tokens": T, "H": H, "D": D, "rotary": rotary, "interleaved": interleaved})
    if checks.number(op, "theta", theta) <= 0:
        raise InputError(f"{op}: theta must be above 0, got {theta!r}")
    if factors is not None:
        factors = checks.array(op, "factors", factors, (np.float32, np.float64), 1, "[rotary/2]")
        checks.shape(op, "factors", factors, (rotary // 2,), "[rotary/2]")
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise InputError(f"{op}: factors must be finite and above 0, got {factors.tolist()}")
    table = rope_table(positions, rotary, theta, factors).astype(np.float32)
    # A table of the positions that there are: row t is that of x[t].
    operands = {"x": x, "batch": contiguous_batch(0, T), "table": table}
    return checks.run(op, dims, operands, route, device, x.shape)
