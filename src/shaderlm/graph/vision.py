"""The formulas of ops for images in NumPy: slow and obvious. In the float type of `reference`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reference import F64, _floats

_BLOCK = 1 << 26  # bytes of scores at once


def _cubic(x: F64) -> F64:
    """Keys' cubic with a = −½."""
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.asarray(np.where(x < 1, near, np.where(x < 2, far, 0.0)))


def _lanczos(x: F64) -> F64:
    """sinc(x) · sinc(x / 3), up to 3."""
    return np.asarray(np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0))


def _triangle(x: F64) -> F64:
    return np.asarray(np.maximum(0, 1 - np.abs(x)))


# By name: the filter, and how far it reaches.
FILTERS: Mapping[str, tuple[Callable[[F64], F64], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


_WEIGHT_BITS = 15  # a weight is a whole number of less than so many bits, divided by a power of two
_MOST_PRECISION = 22


def resize_weights(size: int, to: int, kind: str) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """First input [to] and weights [to, taps] of every output of an axis; weights past the border are 0.

    Weights are rounded as torchvision rounds those of pictures of 8 bits. So sums of f32 are exact, and all devices
    agree.
    """
    function, reach = FILTERS[kind]
    step = size / to
    scale = max(1.0, step)
    centre = (np.arange(to) + 0.5) * step
    first = np.maximum((centre - reach * scale + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + reach * scale + 0.5).astype(np.int64), size)
    taps = np.arange(max(1, int((end - first).max())))
    weights = function((first[:, None] + taps + 0.5 - centre[:, None]) / scale)
    weights = np.where(taps < (end - first)[:, None], weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    precision, most = 0, float(weights.max())
    while precision < _MOST_PRECISION and int(0.5 + most * 2 ** (precision + 1)) < 1 << _WEIGHT_BITS:
        precision += 1
    rounded = np.trunc(weights * 2.0**precision + np.copysign(0.5, weights)) / 2.0**precision
    return first.astype(np.uint32), rounded.astype(np.float32)


def resize(x: Any, first: Any, weights: Any) -> F64:
    """[outer, size, inner], [to], [to, taps] → [outer, to, inner]: whole numbers from 0 to 255."""
    size = x.shape[1]
    pixels = np.asarray(x, np.float32)
    out = np.zeros((x.shape[0], len(first), x.shape[2]), np.float32)
    for tap in range(weights.shape[1]):
        taken = np.minimum(np.asarray(first, np.int64) + tap, size - 1)
        out += pixels[:, taken] * np.asarray(weights, np.float32)[None, :, tap, None]
    return _floats(np.clip(np.floor(out + np.float32(0.5)), 0, 255))


def patches(x: Any, corners: Any, factors: Any, patch: int) -> F64:
    """Pixels one after the other, corners [patches, 2] (the first value, values of a row) → [patches, 3 · patch²]."""
    y, i, c = np.meshgrid(np.arange(patch), np.arange(patch), np.arange(3), indexing="ij")
    corners = np.asarray(corners, np.int64)
    where = corners[:, 0, None, None, None] + y * corners[:, 1, None, None, None] + 3 * i + c
    factors = _floats(factors)
    values = _floats(x)[where] * factors[:3] + factors[3:6]
    return np.asarray(values.transpose(0, 3, 1, 2).reshape(len(corners), -1))


def pad_columns(x: Any, to: int) -> F64:
    """[tokens, width] → [tokens, to]."""
    return np.asarray(np.pad(_floats(x), ((0, 0), (0, to - x.shape[1]))))


def weighted_rows(weight: Any, rows: Any, factors: Any) -> F64:
    """[N, K], [tokens, taps] ×2 → [tokens, K]."""
    return np.asarray((_floats(weight)[np.asarray(rows)] * _floats(factors)[:, :, None]).sum(axis=1))


def attend_spans(q: Any, k: Any, v: Any, spans: Any, scale: float) -> F64:
    """[tokens, H, D] ×3, spans [tokens, 2] → [tokens, H, D]. Rows of one span follow each other. An empty one: 0."""
    q, k, v = _floats(q), _floats(k), _floats(v)
    out: F64 = np.zeros_like(q)
    row = 0
    spans = np.asarray(spans, np.int64)
    while row < len(q):
        first, end = (int(number) for number in spans[row])
        same = row + 1
        while same < len(q) and tuple(spans[same]) == (first, end):
            same += 1
        step = max(1, _BLOCK // max(1, q.shape[1] * (end - first) * q.itemsize))
        for a in range(row, same if end > first else row, step):
            b = min(a + step, same)
            scores = q[a:b].transpose(1, 0, 2) @ k[first:end].transpose(1, 2, 0) * scale
            powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
            powers /= powers.sum(axis=-1, keepdims=True)
            out[a:b] = (powers @ v[first:end].transpose(1, 0, 2)).transpose(1, 0, 2)
        row = same
    return out


def axes(pairs: int, sections: tuple[int, int, int], *, grouped: bool) -> NDArray[np.int64]:
    """The axis that each pair of a head is rotated by: 0, 1 or 2.

    grouped: so many pairs of the first axis, then of the second and of the third; else in turns, as long as an axis has
    some left, and the rest is of the first.
    """
    if grouped:
        ends = np.cumsum(sections)
        return np.minimum(np.searchsorted(ends, np.arange(pairs), side="right"), 2)
    pair = np.arange(pairs)
    axis = np.zeros(pairs, np.int64)
    for number in (1, 2):
        axis[(pair % 3 == number) & (pair < 3 * sections[number])] = number
    return axis


def interpolation(side: int, rows: int, columns: int, places: Any) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Four rows of a table of side · side and their factors, for places [n, 2] of a grid, corners on corners."""
    taps, factors = [], []
    for axis, size in enumerate((rows, columns)):
        at = np.asarray(places)[:, axis] * ((side - 1) / (size - 1) if size > 1 else 0.0)
        low = np.minimum(np.floor(at).astype(np.int64), side - 1)
        taps.append((low, np.minimum(low + 1, side - 1)))
        factors.append((1 - (at - low), at - low))
    index = np.stack([a * side + b for a in taps[0] for b in taps[1]], axis=1)
    weight = np.stack([a * b for a in factors[0] for b in factors[1]], axis=1)
    return index.astype(np.uint32), weight.astype(np.float32)


def turns(places: Any, width: int, theta: float, *, between: bool = False) -> NDArray[np.float32]:
    """(cos, sin) [n, width / 2, 2] of heads whose first half of pairs turns by rows, and the second by columns.

    between: the frequencies of columns lie between those of rows; else they are the same.
    """
    quarter, places = width // 4, np.asarray(places, np.int64)
    powers = np.arange(quarter, dtype=np.float64) + np.array([[0.0], [0.5 if between else 0.0]])
    every = np.arange(places.max(initial=0) + 1, dtype=np.float64)[:, None, None]  # place, of which there are few
    angles = every * theta ** (-powers / quarter)
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    return np.asarray(table[places, [0, 1]].reshape(len(places), -1, 2))
