"""The formula of each op in NumPy, in float64: slow and obvious. What every kernel is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def _f64(array: Any) -> F64:
    return np.asarray(array, np.float64)


def rms_norm(x: Any, eps: float = 1e-6) -> F64:
    """[..., width] → same."""
    x = _f64(x)
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps))


def rms_norm_mul(x: Any, weight: Any, eps: float = 1e-6) -> F64:
    """[..., width], [width] → [..., width]."""
    return rms_norm(x, eps) * _f64(weight)


def add_rms_norm(a: Any, b: Any, weight: Any, eps: float = 1e-6) -> tuple[F64, F64]:
    """The sum and its weighted norm."""
    total = _f64(a) + _f64(b)
    return total, rms_norm_mul(total, weight, eps)


def linear(x: Any, weight: Any, bias: Any = None) -> F64:
    """[M, K], dequantised [N, K], [N] → [M, N]."""
    out: F64 = _f64(x) @ _f64(weight).T
    return out if bias is None else out + _f64(bias)


def embedding(ids: Any, weight: Any) -> F64:
    """[T], dequantised [N, K] → [T, K]."""
    rows: F64 = _f64(weight)[np.asarray(ids)]
    return rows


def sdpa_kv(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, pos: int, scale: float | None = None) -> F64:
    """[S, Hq, D], [S, Hkv, D] ×2, [C, Hkv, D] ×2 → [S, Hq, D]. Writes k and v into the caches in place."""
    S, Hq, D = q.shape
    k_cache[pos : pos + S] = k
    v_cache[pos : pos + S] = v
    group = Hq // k_cache.shape[1]
    out = np.empty((S, Hq, D))
    for s in range(S):
        visible = pos + s + 1
        for h in range(Hq):
            keys = _f64(k_cache[:visible, h // group])
            scores = keys @ _f64(q[s, h]) * (1 / np.sqrt(D) if scale is None else scale)
            weights = np.exp(scores - scores.max())
            out[s, h] = weights @ _f64(v_cache[:visible, h // group]) / weights.sum()
    return out


def rope_table(positions: Any, rotary: int, theta: float = 10000.0, factors: Any = None) -> F64:
    """(cos, sin) [positions, rotary / 2, 2] of the angles pos · theta^(−2i / rotary) / factors[i]."""
    frequencies = theta ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary)
    if factors is not None:
        frequencies = frequencies / _f64(factors)
    angles = _f64(positions)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def rope(x: Any, table: Any, interleaved: bool = False) -> F64:
    """[T, H, D] rotated by the rows of a table [T, rotary / 2, 2]."""
    out = _f64(x).copy()
    half = table.shape[1]
    cos, sin = _f64(table)[:, None, :, 0], _f64(table)[:, None, :, 1]
    first = np.s_[..., 0 : 2 * half : 2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1 : 2 * half : 2] if interleaved else np.s_[..., half : 2 * half]
    u, v = out[first].copy(), out[second].copy()
    out[first] = u * cos - v * sin
    out[second] = u * sin + v * cos
    return out


def silu_mul(a: Any, b: Any) -> F64:
    """silu(a) · b."""
    a = _f64(a)
    with np.errstate(over="ignore"):
        return np.asarray(a / (1 + np.exp(-a)) * _f64(b))


def add(a: Any, b: Any) -> F64:
    """a + b."""
    return np.asarray(_f64(a) + _f64(b))


def mul(a: Any, b: Any) -> F64:
    """a · b."""
    return np.asarray(_f64(a) * _f64(b))


def argmax(x: Any) -> NDArray[np.int64]:
    """Index of the largest value of the last axis, the lowest of equals."""
    return np.asarray(np.argmax(x, axis=-1))
