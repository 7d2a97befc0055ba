"""The formula of each op in NumPy: slow and obvious. What every kernel is compared with.

In float64, unless the caller is inside `single()`: the interpreter runs whole models with the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .batch import NONE, PAGE, RUN, stretches

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


def layer_norm(x: Any, weight: Any, bias: Any = None, eps: float = 1e-6) -> F64:
    """[..., width], [width] ×2 → [..., width]."""
    x = _floats(x)
    centred = x - x.mean(axis=-1, keepdims=True)
    out = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps) * _floats(weight)
    return np.asarray(out if bias is None else out + _floats(bias))


def linear(x: Any, weight: Any, bias: Any = None) -> F64:
    """[M, K], dequantised [N, K], [N] → [M, N]."""
    x, weight = _floats(x), _floats(weight)
    # One row: a matrix times a vector, which BLAS does 3 times as fast as a row times a transposed matrix.
    out: F64 = (weight @ x[0])[None] if len(x) == 1 else x @ weight.T
    return out if bias is None else out + _floats(bias)


GATINGS = ("softmax", "softmax_used", "sigmoid")


def route_experts(
    logits: Any, bias: Any, used: int, gating: str, normalise: bool, scale: float
) -> tuple[NDArray[np.uint32], F64]:
    """[T, experts], [experts] → ids and factors [T, used], the largest first; of equals the lowest id."""
    logits = _floats(logits)
    scores = _softmax(logits) if gating == "softmax" else _sigmoid(logits) if gating == "sigmoid" else logits
    ranked = scores if bias is None else scores + _floats(bias)
    ids = np.argsort(-ranked, axis=-1, kind="stable")[:, :used]
    factors = np.take_along_axis(scores, ids, -1)
    if gating == "softmax_used":
        factors = _softmax(factors)
    if normalise:
        factors = factors / factors.sum(axis=-1, keepdims=True)
    return ids.astype(np.uint32), np.asarray(factors * scale)


def _softmax(x: F64) -> F64:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def linear_experts(x: Any, weight: Any, ids: Any, bias: Any = None) -> F64:
    """[T, used, K], dequantised [experts, N, K], [T, used], [experts, N] → [T, used, N]; experts are read once."""
    out = np.empty((*np.shape(ids), weight.shape[1]), _dtype.get())
    for expert in np.unique(ids):
        rows = np.asarray(ids) == expert
        out[rows] = linear(np.asarray(x)[rows], weight[expert], None if bias is None else bias[expert])
    return out


def sum_experts(y: Any, factors: Any) -> F64:
    """[T, used, N], [T, used] → [T, N]."""
    return np.asarray((_floats(y) * _floats(factors)[:, :, None]).sum(axis=1))


def add_gated(a: Any, b: Any, x: Any, gate: Any) -> F64:
    """[T, width] ×2, [T, K], [K] → a + sigmoid(x · gate) · b."""
    return np.asarray(_floats(a) + _sigmoid(_floats(x) @ _floats(gate))[:, None] * _floats(b))


def embedding(ids: Any, weight: Any) -> F64:
    """[T], dequantised [N, K] → [T, K]."""
    rows: F64 = _floats(weight)[np.asarray(ids)]
    return rows


def kv_write(k: Any, v: Any, k_cache: Any, v_cache: Any, batch: Any) -> None:
    """[tokens, Hkv, D] ×2 into [pool rows, Hkv, D] ×2, each row at its slot, in place. A slot outside takes nothing."""
    rows = int(batch[0, 0])
    slots = np.asarray(batch[1 : rows + 1, 2])
    there = slots < len(k_cache)
    k_cache[slots[there]] = np.asarray(k)[:rows][there]
    v_cache[slots[there]] = np.asarray(v)[:rows][there]


def state_row(record: Any, page_table: Any) -> int:
    """The row of a record's sequence in the states: the word before the entries of the sequence."""
    return int(page_table[int(record[3] & ~np.uint32(RUN)) - 1])


def spare_row(record: Any, page_table: Any) -> int | None:
    """The first row of the states for those after rows that verify drafts; None: they are not wanted."""
    row = int(page_table[int(record[3] & ~np.uint32(RUN)) - 2])
    return None if row == NONE else row


def short_conv(x: Any, weight: Any, batch: Any, page_table: Any, state: Any, *, silu: bool) -> F64:
    """[tokens, width], [width, kernel], states [rows, kernel, width] → [tokens, width]; the states are changed.

    A state is a ring: the row at position p lies at p mod kernel. A sequence begins after zeros, whatever its state
    holds. Padding rows are 0.
    """
    out, kernel = np.zeros(x.shape, _dtype.get()), weight.shape[1]
    for first, count in stretches(batch):
        record = batch[1 + first]
        row, position = state_row(record, page_table), int(record[1])
        before = [state[row, p % kernel] * (p >= 0) for p in range(position - kernel + 1, position)]
        seen = np.concatenate([_floats(before), _floats(x[first : first + count])])
        out[first : first + count] = sum(seen[j : j + count] * _floats(weight)[:, j] for j in range(kernel))
        if (spare := spare_row(record, page_table)) is not None:
            for i in range(count - 1):
                for back in range(min(kernel, position + i + 1)):
                    state[spare + i, (position + i - back) % kernel] = seen[kernel - 1 + i - back]
        for t in range(max(0, count - kernel), count):
            state[row, (position + t) % kernel] = x[first + t]
    return silu_mul(out, 1.0) if silu else out


NORM_EPS = 1e-6  # of the lengths of queries and keys


class DeltaSizes(NamedTuple):
    """Heads of gated_delta_rule and their widths. `grouped`: neighbouring value heads have the same key head."""

    Hk: int
    Hv: int
    Dk: int
    Dv: int
    grouped: bool

    def key_heads(self) -> NDArray[np.int64]:
        """Of each value head."""
        heads = np.arange(self.Hv)
        return heads // (self.Hv // self.Hk) if self.grouped else heads % self.Hk


def gated_delta_rule(x: Any, decay: Any, beta: Any, batch: Any, page_table: Any, state: Any, sizes: DeltaSizes) -> F64:
    """[tokens, channels] (queries, keys, values), [tokens, Hv] ×2, states [rows, Hv, Dk, Dv] → [tokens, Hv, Dv].

    Row by row: S ← decay · S; S ← S + k (beta · (v − Sᵀ k))ᵀ; out = Sᵀ q / √Dk, with q and k of length 1.
    The states are changed; a sequence begins with zeros. Padding rows are 0.
    """
    keys, tokens = sizes.Hk * sizes.Dk, len(x)
    q, k = (
        part.reshape(tokens, sizes.Hk, sizes.Dk)[:, sizes.key_heads()]
        for part in np.split(_floats(x)[:, : 2 * keys], 2, 1)
    )
    q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + NORM_EPS) for part in (q, k))
    q, v = q / float(np.sqrt(sizes.Dk)), _floats(x)[:, 2 * keys :].reshape(tokens, sizes.Hv, sizes.Dv)
    decay, beta, out = _floats(decay), _floats(beta), np.zeros(v.shape, _dtype.get())
    for first, count in stretches(batch):
        record = batch[1 + first]
        row = state_row(record, page_table)
        spare = spare_row(record, page_table)
        S = _floats(state[row]).copy() if record[1] else np.zeros(state[row].shape, _dtype.get())
        for t in range(first, first + count):
            if spare is not None and t > first:
                state[spare + t - first - 1] = S
            S *= decay[t][:, None, None]
            change = beta[t][:, None] * (v[t] - (k[t][:, None] @ S)[:, 0])
            S += k[t][:, :, None] * change[:, None]
            out[t] = (q[t][:, None] @ S)[:, 0]
        state[row] = S
    return out


class ScanSizes(NamedTuple):
    """Heads of mamba2_scan and their width, rows of a state, and groups of neighbouring heads with the same B and C."""

    H: int
    P: int
    N: int
    G: int


def mamba2_scan(
    x: Any, dt: Any, decay: Any, skip: Any, batch: Any, page_table: Any, state: Any, sizes: ScanSizes
) -> F64:
    """[tokens, channels] (v, B, C), [tokens, H] ×2, [H], states [rows, H, N, P] → [tokens, H, P].

    Row by row: S ← decay · S + dt · B vᵀ; out = Sᵀ C + skip · v. The states are changed; a sequence begins with zeros.
    Padding rows are 0.
    """
    H, P, N, G = sizes
    x, dt, decay = _floats(x), _floats(dt), _floats(decay)
    v = x[:, : H * P].reshape(len(x), H, P)
    B, C = (part.reshape(len(x), G, N).repeat(H // G, axis=1) for part in np.split(x[:, H * P :], 2, 1))
    out = np.zeros(v.shape, _dtype.get())
    for first, count in stretches(batch):
        record = batch[1 + first]
        row = state_row(record, page_table)
        spare = spare_row(record, page_table)
        S = _floats(state[row]).copy() if record[1] else np.zeros(state[row].shape, _dtype.get())
        for t in range(first, first + count):
            if spare is not None and t > first:
                state[spare + t - first - 1] = S
            S *= decay[t][:, None, None]
            S += B[t][:, :, None] * (dt[t][:, None] * v[t])[:, None]
            out[t] = (C[t][:, None] @ S)[:, 0] + _floats(skip)[:, None] * v[t]
        state[row] = S
    return out


def softplus(x: Any) -> F64:
    """log(1 + exp(x))."""
    return np.asarray(np.logaddexp(_floats(0), _floats(x)))


class Scores(NamedTuple):
    """What attention does with scores beside softmax, all of it optional."""

    scale: float | None = None  # 1 / sqrt(D)
    window: int = 0  # how many keys a row sees, its own included
    softcap: float = 0.0
    sinks: Any = None  # [Hq]: scores of a key without a value


def attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    batch: Any,
    page_table: Any = None,
    how: Scores | float | None = None,
    reach: Any = None,
) -> F64:
    """[tokens, Hq, D], [pool rows, Hkv, D] ×2 → [tokens, Hq, D]: row t sees the keys up to its position.

    A number as `how` is the scale. `reach` [tokens]: how many keys after its position a row sees, too.

    Without a page table all rows are of one sequence, whose keys lie in the pool from row 0 on. Padding rows are 0.
    """
    scores = how if isinstance(how, Scores) else Scores(how)
    out = np.zeros(q.shape, _dtype.get())
    for first, count in stretches(batch):
        _, position, _, pages = (int(word) for word in batch[1 + first])
        chunk = slice(first, first + count)
        last = position + np.arange(count) + (0 if reach is None else np.asarray(reach[chunk], np.int64))
        rows = pool_rows(int(last.max()) + 1, page_table, pages & ~RUN)
        out[chunk] = attend(q[chunk], k_cache[rows], v_cache[rows], position, scores, last)
    return out


def pool_rows(keys: int, page_table: Any, pages: int) -> Any:
    """An index of the pool that gives the first keys of a sequence; a slice where its pages follow each other."""
    if page_table is None:
        return np.s_[:keys]
    listed = np.asarray(page_table[pages : pages - (-keys // PAGE)], np.int64)
    if (np.diff(listed) == 1).all():
        return np.s_[listed[0] * PAGE : listed[0] * PAGE + keys]
    return (listed[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:keys]


def attend(q: Any, keys: Any, values: Any, position: int, how: Scores, last: Any = None) -> F64:
    """Queries [rows, Hq, D] at consecutive positions, keys and values [position + rows, Hkv, D].

    `last`: the last key that each row sees, if that is not its own.
    """
    rows, _, D = q.shape
    context, kv_heads, _ = keys.shape
    # Query heads by the kv head that they share: [Hkv, group · rows, D].
    queries = _floats(q).reshape(rows, kv_heads, -1, D).transpose(1, 2, 0, 3).reshape(kv_heads, -1, D)
    scores = queries @ _floats(keys).transpose(1, 2, 0) * (1 / float(np.sqrt(D)) if how.scale is None else how.scale)
    if how.softcap:
        scores = softcap(scores, how.softcap)
    query, key = position + np.arange(rows)[:, None], np.arange(context)
    after = key > (query if last is None else np.asarray(last)[:, None])
    hidden = after | (key <= query - how.window) if how.window else after
    scores = np.where(hidden, -np.inf, scores.reshape(kv_heads, -1, rows, context))
    most = scores.max(axis=-1, keepdims=True)
    if how.sinks is not None:
        sinks = _floats(how.sinks).reshape(kv_heads, -1, 1, 1)
        most = np.maximum(most, sinks)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    weights /= total if how.sinks is None else total + np.exp(sinks - most)
    out = weights.reshape(kv_heads, -1, context) @ _floats(values).transpose(1, 0, 2)
    return np.asarray(out.reshape(kv_heads, -1, rows, D).transpose(2, 0, 1, 3).reshape(q.shape))


class Yarn(NamedTuple):
    """Rope for longer contexts: low frequencies are divided by `factor`, high ones stay.

    High are those that turn more than `fast` times within the original context, low those that turn less than `slow`
    times; between them a share of both is taken.
    """

    factor: float
    original_context: int
    fast: float = 32.0
    slow: float = 1.0
    share: float = 1.0  # of the high frequencies that stay
    truncate: bool = True  # the bounds between high and low are whole pairs

    def factors(self, rotary: int, theta: float) -> F64:
        """What frequencies are divided by, [rotary / 2]."""

        def pair(turns: float) -> float:
            return rotary * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self.fast), pair(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        first, last = max(0, low), min(rotary - 1, high)
        beyond = (np.arange(rotary // 2, dtype=np.float64) - first) / max(0.001, last - first)
        unchanged = (1 - np.clip(beyond, 0, 1)) * self.share
        return np.asarray(1 / (unchanged + (1 - unchanged) / self.factor))


def rope_table(
    positions: Any,
    rotary: int,
    theta: float = 10000.0,
    factors: Any = None,
    yarn: Yarn | None = None,
    magnitude: float = 1.0,
) -> F64:
    """magnitude · (cos, sin) [positions, rotary / 2, 2] of the angles pos · frequency."""
    angles = np.asarray(positions, np.float64)[:, None] * rope_frequencies(rotary, theta, factors, yarn)
    return magnitude * np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def rope_frequencies(rotary: int, theta: float = 10000.0, factors: Any = None, yarn: Yarn | None = None) -> F64:
    """theta^(−2i / rotary) / factors[i], [rotary / 2], and what yarn makes of them."""
    frequencies = theta ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary)
    if factors is not None:
        frequencies = frequencies / np.asarray(factors, np.float64)
    if yarn is not None:
        frequencies = frequencies / yarn.factors(rotary, theta)
    return frequencies


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


def sigmoid_mul(a: Any, b: Any) -> F64:
    """sigmoid(a) · b."""
    return np.asarray(_sigmoid(_floats(a)) * _floats(b))


# Of gpt-oss: what gate and up are clamped to, and the factor inside the sigmoid.
SWIGLU_LIMIT, SWIGLU_FACTOR = 7.0, 1.702


def swiglu_clamped(a: Any, b: Any) -> F64:
    """g · sigmoid(1.702 g) · (u + 1): g is at most 7, u between −7 and 7."""
    gate, up = np.minimum(_floats(a), SWIGLU_LIMIT), np.clip(_floats(b), -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return np.asarray(gate * _sigmoid(SWIGLU_FACTOR * gate) * (up + 1))


def gelu(x: Any) -> F64:
    """The tanh form."""
    x = _floats(x)
    return np.asarray(x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def gelu_mul(a: Any, b: Any) -> F64:
    """gelu(a) · b, of the tanh form."""
    return np.asarray(gelu(a) * _floats(b))


_erf = np.vectorize(math.erf, otypes=[np.float64])


def relu_squared(x: Any) -> F64:
    """max(x, 0)²."""
    return np.asarray(np.maximum(_floats(x), 0) ** 2)


def gelu_erf(x: Any) -> F64:
    """The exact form."""
    x = _floats(x)
    return np.asarray(x / 2 * (1 + _floats(_erf(x / math.sqrt(2)))))


def softcap(x: Any, cap: float) -> F64:
    """cap · tanh(x / cap)."""
    return np.asarray(np.tanh(_floats(x) / cap) * cap)


def add(a: Any, b: Any) -> F64:
    """a + b."""
    return np.asarray(_floats(a) + _floats(b))


def mul(a: Any, b: Any) -> F64:
    """a · b."""
    return np.asarray(_floats(a) * _floats(b))
