"""The formula of each op in NumPy: slow and obvious. What every kernel is compared with.

In float64, unless the caller is inside `single()`: the interpreter runs whole models with the same formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ops import CHOICE

F64 = NDArray[np.float64]


_dtype: ContextVar[Any] = ContextVar("dtype of the formulas", default=np.float64)


@contextmanager
def single() -> Iterator[None]:
    """Inside, the formulas compute in float32, as kernels do."""
    before = _dtype.set(np.float32)
    try:
        yield
    finally:
        _dtype.reset(before)


def _floats(array: Any) -> F64:
    return np.asarray(array, _dtype.get())


def rms_norm(x: Any, eps: float = 1e-6) -> F64:
    """[..., width] → same."""
    x = _floats(x)
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps))


def rms_norm_mul(x: Any, weight: Any, eps: float = 1e-6) -> F64:
    """[..., width], [width] → [..., width]."""
    return rms_norm(x, eps) * _floats(weight)


def add_rms_norm(a: Any, b: Any, weight: Any, eps: float = 1e-6) -> tuple[F64, F64]:
    """The sum and its weighted norm."""
    total = _floats(a) + _floats(b)
    return total, rms_norm_mul(total, weight, eps)


def linear(x: Any, weight: Any, bias: Any = None) -> F64:
    """[M, K], dequantised [N, K], [N] → [M, N]."""
    x, weight = _floats(x), _floats(weight)
    # One row: a matrix times a vector, which BLAS does 3 times as fast as a row times a transposed matrix.
    out: F64 = (weight @ x[0])[None] if len(x) == 1 else x @ weight.T
    return out if bias is None else out + _floats(bias)


def linear_add(x: Any, weight: Any, residual: Any, bias: Any = None) -> F64:
    """[M, K], dequantised [N, K], [M, N], [N] → [M, N]."""
    return _floats(residual) + linear(x, weight, bias)


def linear_silu_mul(x: Any, weight: Any, bias: Any = None) -> F64:
    """[M, K], dequantised [N, K] with gate and up rows in turns, [N] → [M, N/2]."""
    both = linear(x, weight, bias)
    return silu_mul(both[:, 0::2], both[:, 1::2])


def rms_norm_linear(x: Any, norm_weight: Any, weight: Any, bias: Any = None, eps: float = 1e-6) -> F64:
    """[M, K], [K], dequantised [N, K], [N] → [M, N]."""
    return linear(rms_norm_mul(x, norm_weight, eps), weight, bias)


def rms_norm_linear_silu_mul(x: Any, norm_weight: Any, weight: Any, bias: Any = None, eps: float = 1e-6) -> F64:
    """[M, K], [K], dequantised [N, K] with gate and up in turns, [N] → [M, N / 2]."""
    return linear_silu_mul(rms_norm_mul(x, norm_weight, eps), weight, bias)


def embedding(ids: Any, weight: Any) -> F64:
    """[T], dequantised [N, K] → [T, K]."""
    rows: F64 = _floats(weight)[np.asarray(ids)]
    return rows


def sdpa_kv(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, pos: int, scale: float | None = None) -> F64:
    """[S, Hq, D], [S, Hkv, D] ×2, [C, Hkv, D] ×2 → [S, Hq, D]. Writes k and v into the caches in place."""
    kv_write(k, v, k_cache, v_cache, pos)
    return attention(q, k_cache, v_cache, pos, scale)


def kv_write(k: Any, v: Any, k_cache: Any, v_cache: Any, pos: int) -> None:
    """[S, Hkv, D] ×2 into [C, Hkv, D] ×2 at pos, in place."""
    k_cache[pos : pos + len(k)] = k
    v_cache[pos : pos + len(v)] = v


def attention(q: Any, k_cache: Any, v_cache: Any, pos: int, scale: float | None = None) -> F64:
    """[S, Hq, D], [C, Hkv, D] ×2 → [S, Hq, D]: query s sees the keys up to pos + s."""
    S, Hq, D = q.shape
    context, kv_heads = pos + S, k_cache.shape[1]
    # Query heads by the kv head that they share: [Hkv, group · S, D].
    queries = _floats(q).reshape(S, kv_heads, -1, D).transpose(1, 2, 0, 3).reshape(kv_heads, -1, D)
    keys = _floats(k_cache[:context]).transpose(1, 2, 0)
    scores = queries @ keys * (1 / float(np.sqrt(D)) if scale is None else scale)
    hidden = np.arange(context) > pos + np.arange(S)[:, None]
    scores = np.where(hidden, -np.inf, scores.reshape(kv_heads, -1, S, context))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights.reshape(kv_heads, -1, context) @ _floats(v_cache[:context]).transpose(1, 0, 2)
    return np.asarray(out.reshape(kv_heads, -1, S, D).transpose(2, 0, 1, 3).reshape(S, Hq, D))


def rope_table(positions: Any, rotary: int, theta: float = 10000.0, factors: Any = None) -> F64:
    """(cos, sin) [positions, rotary / 2, 2] of the angles pos · theta^(−2i / rotary) / factors[i]."""
    frequencies = theta ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary)
    if factors is not None:
        frequencies = frequencies / np.asarray(factors, np.float64)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def rope(x: Any, table: Any, interleaved: bool = False) -> F64:
    """[T, H, D] rotated by the rows of a table [T, rotary / 2, 2]."""
    out = _floats(x).copy()
    half = table.shape[1]
    cos, sin = _floats(table)[:, None, :, 0], _floats(table)[:, None, :, 1]
    first = np.s_[..., 0 : 2 * half : 2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1 : 2 * half : 2] if interleaved else np.s_[..., half : 2 * half]
    u, v = out[first].copy(), out[second].copy()
    out[first] = u * cos - v * sin
    out[second] = u * sin + v * cos
    return out


def silu_mul(a: Any, b: Any) -> F64:
    """silu(a) · b."""
    a = _floats(a)
    with np.errstate(over="ignore"):
        return np.asarray(a / (1 + np.exp(-a)) * _floats(b))


def add(a: Any, b: Any) -> F64:
    """a + b."""
    return np.asarray(_floats(a) + _floats(b))


def mul(a: Any, b: Any) -> F64:
    """a · b."""
    return np.asarray(_floats(a) * _floats(b))


def argmax(x: Any) -> NDArray[np.int64]:
    """Index of the largest value of the last axis, the lowest of equals."""
    return np.asarray(np.argmax(x, axis=-1))


def next_position(positions: Any, by: int = 1) -> None:
    """The first of the positions is `by` further on, in place."""
    positions[0] += by


def usable(logits: Any) -> F64:
    """Logits in float64 without what has no order: NaN is as −inf, never drawn; +inf is the highest f32."""
    x = np.asarray(logits, np.float64)
    return np.asarray(np.where(np.isnan(x), -np.inf, np.minimum(x, np.finfo(np.float32).max)))


def sample_weights(logits: Any, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> F64:
    """[width] → [width]: probabilities of the tokens that the filters keep, relative to the largest; 0 elsewhere.

    Every filter is a threshold, so equals stay together: the top_k-th largest logit; where the largest
    probabilities reach top_p of what top_k left; min_p of the largest probability.
    """
    x = usable(logits)
    top = x.max()
    if top == -np.inf:
        return np.zeros_like(x)
    temperature = max(temperature, 1e-30)  # a smaller one could not be told from 0 in f32
    weights = np.exp((x - top) / temperature)
    if 0 < top_k < x.size:
        weights[x < np.partition(x, -top_k)[-top_k]] = 0
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        reached = np.cumsum(weights[order])
        last = min(int(np.searchsorted(reached, top_p * reached[-1])), x.size - 1)
        weights[x < x[order[last]]] = 0
    if min_p > 0:
        weights[x < top + temperature * np.log(min_p)] = 0
    return np.asarray(weights)


def sample(logits: Any, choice: Any) -> NDArray[np.int64]:
    """[width], 8 words (`CHOICE`) → [1]. Draws in order of index; 0 if no token can be drawn."""
    given = np.ascontiguousarray(choice).view(CHOICE)[0]
    names = ("temperature", "top_k", "top_p", "min_p")
    weights = sample_weights(logits, *(given[name].item() for name in names))
    running = np.cumsum(weights)
    index = int(np.searchsorted(running, float(given["u"]) * running[-1], side="right"))
    possible = np.flatnonzero(weights)
    return np.array([min(index, possible[-1]) if possible.size else 0])
