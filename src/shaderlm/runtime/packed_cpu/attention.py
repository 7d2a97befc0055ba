"""Attention over the pages of the cache: one row in NumPy, many rows of a sequence in a session that uses all cores."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...graph import reference
from ...graph.batch import RUN, stretches
from .onnx_model import node
from .sessions import Session

F32 = NDArray[np.float32]
FEW_ROWS = 2  # up to which NumPy is as fast


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of one sequence in the batch, and where its keys lie in the pool."""

    first: int
    count: int
    position: int
    keys: Any  # an index of the pool


class BatchAttention:
    """Of one step: what all layers share is found once."""

    def __init__(self, batch: NDArray[np.uint32], page_table: NDArray[np.uint32]) -> None:
        self._rows = []
        for first, count in stretches(batch):
            _, position, _, pages = (int(word) for word in batch[1 + first])
            keys = reference.pool_rows(position + count, page_table, pages & ~RUN)
            self._rows.append(_Rows(first, count, position, keys))
        self._slots = batch[1:, 2]
        self._masks: dict[tuple[int, int, int], F32] = {}

    def write(self, x: Mapping[str, Any], heads: int, width: int) -> None:
        """Keys and values of all rows into the pool."""
        for name in "kv":
            x[f"{name}_cache"][self._slots] = x[name].reshape(-1, heads, width)

    def attend(self, d: Mapping[str, Any], x: Mapping[str, Any]) -> F32:
        """The op `attention`: [rows, Hq · D]."""
        q = x["q"]
        if len(self._rows) == 1 and self._rows[0].count == len(q):
            return self._of_sequence(self._rows[0], d, q, x)
        out = np.empty((len(q), d["Hq"] * d["D"]), np.float32)
        for rows in self._rows:
            which = slice(rows.first, rows.first + rows.count)
            out[which] = self._of_sequence(rows, d, q[which], x)
        return out

    def _of_sequence(self, rows: _Rows, d: Mapping[str, Any], q: F32, x: Mapping[str, Any]) -> F32:
        keys, values, window = x["k_cache"][rows.keys], x["v_cache"][rows.keys], d["window"]
        first = max(0, rows.position - window + 1) if window else 0  # the first key that any row sees
        keys, values = keys[first:], values[first:]
        if rows.count == 1:
            return _one_row(d, q, keys, values, x.get("sinks") if d["sinks"] else None)
        if rows.count <= FEW_ROWS or d["sinks"]:
            scores = reference.Scores(d["scale"], window, d["softcap"], x["sinks"] if d["sinks"] else None)
            heads = q.reshape(rows.count, d["Hq"], d["D"])
            out: F32 = reference.attend(heads, keys, values, rows.position - first, scores)
            return out.reshape(rows.count, -1)
        session = _session(d["Hq"], d["Hkv"], d["D"], _scale(d), float(d["softcap"]))
        mask = self._mask(rows.count, len(keys), window, d["Hq"] // d["Hkv"])
        flat = (len(keys), d["Hkv"] * d["D"])
        keys, values = (np.asarray(each, np.float32).reshape(flat) for each in (keys, values))
        return session.run({"q": q, "k": keys, "v": values, "mask": mask})[0]

    def _mask(self, rows: int, keys: int, window: int, group: int) -> F32:
        """[group · rows, keys]: 0 where a row sees a key, and a large negative number."""
        if (rows, keys, window) not in self._masks:
            query, key = keys - rows + np.arange(rows)[:, None], np.arange(keys)
            hidden = (key > query) | (key <= query - window) if window else key > query
            self._masks[rows, keys, window] = np.tile(np.where(hidden, np.float32(-1e30), np.float32(0)), (group, 1))
        return self._masks[rows, keys, window]


def _scale(d: Mapping[str, Any]) -> float:
    return 1 / math.sqrt(d["D"]) if d["scale"] is None else float(d["scale"])


def _one_row(d: Mapping[str, Any], q: F32, keys: Any, values: Any, sinks: Any) -> F32:
    """A row that sees all of the keys [keys, Hkv, D]."""
    heads, D = d["Hkv"], d["D"]
    if keys.dtype != np.float32:
        keys, values = keys.astype(np.float32), values.astype(np.float32)
    scores = (q * np.float32(_scale(d))).reshape(heads, -1, D) @ keys.transpose(1, 2, 0)
    if d["softcap"]:
        scores = np.tanh(scores / np.float32(d["softcap"])) * np.float32(d["softcap"])
    most = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        own = np.asarray(sinks, np.float32).reshape(heads, -1, 1)
        most = np.maximum(most, own)
    scores -= most
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(own - most)
    out: F32 = scores @ values.transpose(1, 0, 2)
    out /= total
    return out.reshape(1, -1)


@functools.cache
def _session(q_heads: int, heads: int, D: int, scale: float, cap: float) -> Session:
    """q [rows, Hq · D], k and v [keys, Hkv · D] → [rows, Hq · D]. Queries that share a kv head are one matrix."""
    group = q_heads // heads
    shapes = {
        "by_group": [0, heads, group, D],
        "by_head": [heads, -1, D],
        "keys": [0, heads, D],
        "grouped": [heads, group, -1, D],
        "flat": [-1, q_heads * D],
    }
    constants: dict[str, Any] = {name: np.array(shape, np.int64) for name, shape in shapes.items()}
    constants |= {"scale": np.array([scale], np.float32), "cap": np.array([cap], np.float32)}
    capped = [
        node("Div", ["scores", "cap"], ["scores.small"]),
        node("Tanh", ["scores.small"], ["scores.tanh"]),
        node("Mul", ["scores.tanh", "cap"], ["scores.capped"]),
    ]
    nodes = [
        node("Mul", ["q", "scale"], ["q.scaled"]),
        node("Reshape", ["q.scaled", "by_group"], ["q.groups"]),
        node("Transpose", ["q.groups"], ["q.turned"], perm=[1, 2, 0, 3]),
        node("Reshape", ["q.turned", "by_head"], ["queries"]),
        node("Reshape", ["k", "keys"], ["k.heads"]),
        node("Transpose", ["k.heads"], ["k.turned"], perm=[1, 2, 0]),
        node("Reshape", ["v", "keys"], ["v.heads"]),
        node("Transpose", ["v.heads"], ["v.turned"], perm=[1, 0, 2]),
        node("MatMul", ["queries", "k.turned"], ["scores"]),
        *(capped if cap else []),
        node("Add", ["scores.capped" if cap else "scores", "mask"], ["scores.masked"]),
        node("Softmax", ["scores.masked"], ["shares"], axis=-1),
        node("MatMul", ["shares", "v.turned"], ["sums"]),
        node("Reshape", ["sums", "grouped"], ["sums.groups"]),
        node("Transpose", ["sums.groups"], ["sums.turned"], perm=[2, 0, 1, 3]),
        node("Reshape", ["sums.turned", "flat"], ["out"]),
    ]
    kv = ("keys", heads * D)
    inputs = {"q": ("rows", q_heads * D), "k": kv, "v": kv, "mask": ("queries", "keys")}
    return Session(nodes, constants, {}, inputs, {"out": ("rows", q_heads * D)})
