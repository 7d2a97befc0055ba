"""Keys and values in pages, and attention over them: few keys in NumPy, more in a session that uses all cores.

Of each layer a pool of keys [pages, Hkv, D, PAGE] and one of values [pages, Hkv, PAGE, D]: each page of a head is a
matrix that a product reads as it lies. (Keys beside each other, as other runners have them, took 5 times as long.)
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...graph.batch import PAGE, RUN, stretches
from .onnx_model import node
from .sessions import Session

F32 = NDArray[np.float32]
NUMPY_PAGES = 4  # of one row: up to here, the calls of a session take longer than one core needs


def pool_shape(name: str, pages: int, heads: int, width: int) -> tuple[int, int, int, int]:
    """Of the state `name` of a layer, which ends in k_cache or v_cache."""
    return (pages, heads, width, PAGE) if name.endswith("k_cache") else (pages, heads, PAGE, width)


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of one sequence in the batch, and the pages of their keys: `together`, one after the other."""

    rows: slice
    count: int
    position: int  # of the first row
    pages: NDArray[np.int64]
    together: bool

    def from_page(self, first: int) -> _Rows:
        """The same without the first pages."""
        return replace(self, pages=self.pages[first:], position=self.position - first * PAGE) if first else self


class BatchAttention:
    """Of one step: what all layers share is found once."""

    def __init__(self, batch: NDArray[np.uint32], page_table: NDArray[np.uint32]) -> None:
        self._sequences = []
        for first, count in stretches(batch) if len(batch) > 2 else ((0, 1),):
            _, position, _, table = batch[1 + first].tolist()
            table &= ~RUN
            pages = page_table[table : table - (-(position + count) // PAGE)].astype(np.int64)
            together = len(pages) == 1 or bool((np.diff(pages) == 1).all())
            self._sequences.append(_Rows(slice(first, first + count), count, position, pages, together))
        self._pages, self._places = (each.astype(np.int64) for each in divmod(batch[1:, 2], np.uint32(PAGE)))
        self._first_of_page = self._pages[self._places == 0]
        self._masks: dict[tuple[int, int, int], F32] = {}

    def write(self, k: F32, v: F32, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """The op `kv_write`. What earlier sequences left in a page that begins is wiped: it might be no number."""
        if len(self._first_of_page):
            keys[self._first_of_page] = values[self._first_of_page] = 0
        if len(k) == 1:
            page, place = self._pages[0], self._places[0]
            keys[page, :, :, place], values[page, :, place] = k[0], v[0]
        else:
            keys[self._pages, :, :, self._places], values[self._pages, :, self._places] = k, v

    def attend(self, node: AttentionNode, q: F32, keys: NDArray[Any], values: NDArray[Any], sinks: Any) -> F32:
        """The op `attention`: [rows, Hq · D]."""
        if len(self._sequences) == 1:
            return self._attend(self._sequences[0], node, q, keys, values, sinks)
        each = [self._attend(rows, node, q[rows.rows], keys, values, sinks) for rows in self._sequences]
        return np.concatenate(each)

    def _attend(
        self, rows: _Rows, node: AttentionNode, q: F32, keys: NDArray[Any], values: NDArray[Any], sinks: Any
    ) -> F32:
        window = node.window
        if window:  # pages that no row sees
            rows = rows.from_page(max(0, rows.position - window + 1) // PAGE)
        first, count = rows.pages[0], len(rows.pages)
        which = slice(first, first + count) if rows.together else rows.pages
        keys, values = keys[which], values[which]
        if keys.dtype != np.float32:
            keys, values = keys.astype(np.float32), values.astype(np.float32)
        if rows.count == 1 and count <= NUMPY_PAGES:
            return _one_row(node, q, keys, values, rows.position, sinks)
        mask = self._mask(rows.count, rows.position, count, window)
        inputs = {"q": q, "k": keys, "v": values, "mask": np.concatenate([mask] * node.group)}
        if sinks is not None:
            inputs["sinks"] = np.repeat(sinks, rows.count).astype(np.float32).reshape(node.heads, -1, 1)
        joined = rows.count * node.group > node.width
        return _session(node, sinks is not None, joined, os.getpid()).run(inputs)[0]

    def _mask(self, rows: int, position: int, pages: int, window: int) -> F32:
        """[rows, keys]: 0 where a row sees a key, elsewhere a number so small that its exponential is 0."""
        if (rows, position, window) not in self._masks:
            query, key = position + np.arange(rows)[:, None], np.arange(pages * PAGE)
            hidden = (key > query) | (key <= query - window) if window else key > query
            self._masks[rows, position, window] = np.where(hidden, np.float32(-1e30), np.float32(0))
        return self._masks[rows, position, window]


class AttentionNode(NamedTuple):
    """What the dims of the op say. Layers that are alike have equal ones."""

    heads: int  # of keys
    group: int  # heads of queries that share one
    width: int
    scale: float
    window: int
    cap: float

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> AttentionNode:
        """From the dims of the op `attention`."""
        scale = 1 / math.sqrt(d["D"]) if d["scale"] is None else float(d["scale"])
        return cls(d["Hkv"], d["Hq"] // d["Hkv"], d["D"], scale, d["window"], float(d["softcap"]))


def _one_row(node: AttentionNode, q: F32, keys: F32, values: F32, position: int, sinks: Any) -> F32:
    """A row at a position, over pages of keys and values; scores are [pages, Hkv, group, PAGE]."""
    if len(keys) == 1:  # no more keys than there are
        keys, values = keys[..., : position + 1], values[:, :, : position + 1]
    scores = np.matmul(q.reshape(node.heads, node.group, node.width), keys)
    scores *= node.scale
    if node.cap:
        scores = np.tanh(scores / np.float32(node.cap)) * np.float32(node.cap)
    if len(keys) > 1:
        scores[-1, :, :, position % PAGE + 1 :] = -np.inf
    if node.window and position >= node.window:
        scores[0, :, :, : position - node.window + 1] = -np.inf
    most = scores.max(axis=(0, 3), keepdims=True)
    if sinks is not None:
        own = np.asarray(sinks, np.float32).reshape(1, node.heads, -1, 1)
        most = np.maximum(most, own)
    scores -= most
    np.exp(scores, out=scores)
    total = scores.sum(axis=(0, 3))[..., None]
    if sinks is not None:
        total += np.exp(own - most)[0]
    sums = np.matmul(scores, values).sum(axis=0) if len(keys) > 1 else np.matmul(scores[0], values[0])
    sums /= total
    out: F32 = sums.reshape(1, -1)
    return out


@functools.cache
def _session(kind: AttentionNode, sinks: bool, joined_pages: bool, process: int) -> Session:
    """q [rows, Hq · D], keys and values in pages → [rows, Hq · D]. Queries that share a kv head are one matrix.

    Pages of a head are joined for the products, where keys are fewer numbers than scores. Otherwise products go page by
    page, so that no key and no value is copied, and scores are turned for softmax, and back. A process that was forked
    has none of its parent's threads, and needs sessions of its own.
    """
    heads, group, D, cap = kind.heads, kind.group, kind.width, kind.cap
    q_width = heads * group * D
    shapes = {
        "split_q": [0, heads, group, D],
        "by_head": [heads, -1, D],
        "all_keys": [heads, 0, -1],
        "in_pages": [heads, 0, -1, PAGE],
        "split_out": [heads, group, -1, D],
        "flat": [-1, q_width],
        "first": [0],
        "no_sink": [-1],
        "last_axis": [2],
        "joined_k": [heads, D, -1],
        "joined_v": [heads, -1, D],
    }
    constants: dict[str, Any] = {name: np.array(shape, np.int64) for name, shape in shapes.items()}
    constants |= {"scale": np.array([kind.scale], np.float32), "cap": np.array([cap], np.float32)}
    capped = [
        node("Div", ["scores", "cap"], ["scores.small"]),
        node("Tanh", ["scores.small"], ["scores.tanh"]),
        node("Mul", ["scores.tanh", "cap"], ["scores.capped"]),
    ]
    with_sinks = [
        node("Concat", ["masked", "sinks"], ["masked.sinks"], axis=2),
        node("Softmax", ["masked.sinks"], ["shares.sinks"], axis=-1),
        node("Slice", ["shares.sinks", "first", "no_sink", "last_axis"], ["shares"]),
    ]
    products = [node("MatMul", ["queries", "k"], ["scores"])]  # [pages, Hkv, group · rows, PAGE]
    to_keys = [
        node("Transpose", ["scores.capped" if cap else "scores"], ["scores.heads"], perm=[1, 2, 0, 3]),
        node("Reshape", ["scores.heads", "all_keys"], ["scores.keys"]),
    ]
    sums = [
        node("Reshape", ["shares", "in_pages"], ["shares.split"]),
        node("Transpose", ["shares.split"], ["shares.pages"], perm=[2, 0, 1, 3]),
        node("MatMul", ["shares.pages", "v"], ["sums.pages"]),
        node("ReduceSum", ["sums.pages", "first"], ["sums"], keepdims=0),
    ]
    if joined_pages:
        products = [
            node("Transpose", ["k"], ["k.heads"], perm=[1, 2, 0, 3]),
            node("Reshape", ["k.heads", "joined_k"], ["k.joined"]),
            node("MatMul", ["queries", "k.joined"], ["scores"]),  # [Hkv, group · rows, keys]
        ]
        to_keys = [node("Identity", ["scores.capped" if cap else "scores"], ["scores.keys"])]
        sums = [
            node("Transpose", ["v"], ["v.heads"], perm=[1, 0, 2, 3]),
            node("Reshape", ["v.heads", "joined_v"], ["v.joined"]),
            node("MatMul", ["shares", "v.joined"], ["sums"]),
        ]
    nodes = [
        node("Mul", ["q", "scale"], ["q.scaled"]),
        node("Reshape", ["q.scaled", "split_q"], ["q.split"]),
        node("Transpose", ["q.split"], ["q.heads"], perm=[1, 2, 0, 3]),
        node("Reshape", ["q.heads", "by_head"], ["queries"]),  # [Hkv, group · rows, D]
        *products,
        *(capped if cap else []),
        *to_keys,
        node("Add", ["scores.keys", "mask"], ["masked"]),
        *(with_sinks if sinks else [node("Softmax", ["masked"], ["shares"], axis=-1)]),
        *sums,
        node("Reshape", ["sums", "split_out"], ["out.split"]),
        node("Transpose", ["out.split"], ["out.rows"], perm=[2, 0, 1, 3]),
        node("Reshape", ["out.rows", "flat"], ["out"]),
    ]
    inputs: dict[str, tuple[Any, ...]] = {
        "q": ("rows", q_width),
        "k": ("pages", heads, D, PAGE),
        "v": ("pages", heads, PAGE, D),
        "mask": ("queries", "keys"),
    }
    if sinks:
        inputs["sinks"] = (heads, "queries", 1)
    return Session(nodes, constants, {}, inputs, {"out": ("rows", q_width)})
