"""Operands of ops for images: what makes features of pixels, and what a step does with rows of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.graph import reference, vision
from shaderlm.graph.batch import FEATURE, IMAGE_WORDS, PAGE, REACH, contiguous_batch

from .attention_operands import paged_batch

Made = dict[str, NDArray[Any]]
Rng = np.random.Generator


def _normal(rng: Rng, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def resize(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """`taps` follows from the sizes: the case has as many as the cubic filter wants."""
    x = rng.integers(0, 256, (d["outer"], d["size"], d["inner"])).astype(np.uint8 if d["bytes"] else np.float32)
    first, weights = vision.resize_weights(d["size"], d["to"], "bicubic")
    assert weights.shape[1] == d["taps"], weights.shape
    return {"x": x, "first": first, "weights": weights}, {"out": vision.resize(x, first, weights)}


def concat(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    a, b = _normal(rng, d["a"]), _normal(rng, d["b"])
    return {"a": a, "b": b}, {"out": np.concatenate([a, b])}


def patches(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """Of a square picture, wherever they begin."""
    side = int((d["count"] // 3) ** 0.5)
    x = rng.integers(0, 256, d["count"]).astype(np.uint8 if d["bytes"] else np.float32)
    corners = rng.integers(0, side - d["patch"] + 1, (d["tokens"], 2)) @ [3 * side, 3]
    corners = np.stack([corners, np.full(d["tokens"], 3 * side)], axis=1).astype(np.uint32)
    factors = _normal(rng, 6)
    rows = vision.patches(x, corners, factors, d["patch"])
    return {"x": x, "corners": corners, "factors": factors}, {"out": vision.pad_columns(rows, d["width"])}


def weighted_rows(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    weight = _normal(rng, d["N"], d["K"])
    rows = rng.integers(0, d["N"], (d["tokens"], d["taps"])).astype(np.uint32)
    factors = _normal(rng, d["tokens"], d["taps"])
    out = vision.weighted_rows(weight, rows, factors)
    return {"weight": weight, "rows": rows, "factors": factors}, {"out": out}


def pad_columns(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    x = _normal(rng, d["tokens"], d["width"])
    return {"x": x}, {"out": vision.pad_columns(x, d["to"])}


def clamp(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    x, low, high = _normal(rng, d["count"]), np.array([-0.5], np.float32), np.array([0.75], np.float32)
    return {"x": x, "low": low, "high": high}, {"out": np.clip(x, -0.5, 0.75)}


def mean_rows(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    x = _normal(rng, d["tokens"] * d["group"], d["width"])
    return {"x": x}, {"out": x.astype(np.float64).reshape(d["tokens"], d["group"], -1).mean(axis=1)}


def attend_spans(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """Spans of any lengths, one after the other, and rows at the end that see nothing."""
    q, k, v = (_normal(rng, d["tokens"], d["H"], d["D"]) for _ in range(3))
    spans, first = np.zeros((d["tokens"], 2), np.uint32), 0
    spans[:] = d["tokens"]
    while first < d["tokens"] - d["tokens"] // 9:
        end = min(d["tokens"], first + int(rng.integers(1, 2 + d["tokens"] // 2)))
        spans[first:end], first = (first, end), end
    out = vision.attend_spans(q, k, v, spans, d["scale"])
    return {"q": q, "k": k, "v": v, "spans": spans}, {"out": out}


def slice_attend_spans(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    made, expected = attend_spans(rng, d)
    return {"x": np.stack([made[name] for name in "qkv"], axis=1), "spans": made["spans"]}, expected


def slice_rope_by_row_attend_spans(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    made, _ = slice_attend_spans(rng, d)
    table = reference.rope_table(rng.integers(0, 999, d["tokens"]), d["rotary"]).astype(np.float32)
    q, k, v = made["x"].swapaxes(0, 1)
    q, k = (reference.rope(each, table, False) for each in (q, k))
    return {**made, "table": table}, {"out": vision.attend_spans(q, k, v, made["spans"], d["scale"])}


def rope_by_row(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    x = _normal(rng, d["tokens"], d["H"], d["D"])
    table = reference.rope_table(rng.integers(0, 999, d["tokens"]), d["rotary"]).astype(np.float32)
    return {"x": x, "table": table}, {"out": reference.rope(x, table, d["interleaved"])}


def _records(rng: Rng, tokens: int, features: int = 0) -> NDArray[np.uint32]:
    records = np.zeros((tokens, IMAGE_WORDS), np.int64)
    records[:, :3] = rng.integers(-9, 9, (tokens, 3))
    records[:, FEATURE] = rng.integers(0, features + 1, tokens)
    return records.astype(np.uint32)


def rope_rows(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """Some places would be before the first position: they are that one."""
    rows, pairs = max(1, d["tokens"] - 1), d["rotary"] // 2
    table = reference.rope_table(np.arange(d["tokens"] + 20), d["rotary"]).astype(np.float32)
    records, batch = _records(rng, d["tokens"]), contiguous_batch(2, rows, tokens=d["tokens"])
    sections = tuple(d[name] for name in ("temporal", "vertical", "horizontal"))
    axes = vision.axes(pairs, sections, grouped=d["grouped"])
    out = np.zeros((d["tokens"], pairs, 2), np.float32)
    for t in range(rows):
        for i, axis in enumerate(axes):
            out[t, i] = table[max(0, 2 + t + int(records[t, axis].view(np.int32))), i]
    return {"table": table, "batch": batch, "image_rows": records}, {"out": out}


def put_features(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    x, features = _normal(rng, d["tokens"], d["K"]), _normal(rng, 5, d["levels"], d["K"])
    records, out = _records(rng, d["tokens"], 5), x.astype(np.float64)
    for t, number in enumerate(records[:, FEATURE].tolist()):
        if number:
            feature = features[number - 1, d["level"]]
            out[t] = out[t] + feature if d["add"] else feature
    return {"x": x, "features": features, "image_rows": records}, {"out": out}


def attention_reach(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """The rows of a sequence that has some keys already; every third to last but one is an image."""
    rows, before = d["tokens"], 5
    if d["paged"]:
        batch, page_table, pages = paged_batch(rng, ((0, before, rows),), rows)
        size = pages * PAGE
    else:
        batch, page_table, size = contiguous_batch(before, rows), None, before + rows
    records = np.zeros((rows, IMAGE_WORDS), np.uint32)
    first, last = rows // 3, max(rows // 3, rows - 2)
    records[first : last + 1, REACH] = last - np.arange(first, last + 1)
    q, caches = _normal(rng, rows, d["Hq"], d["D"]), _normal(rng, 2, size, d["Hkv"], d["D"])
    caches = caches.astype(np.float16 if d["cache"] == "f16" else np.float32)
    operands: Made = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "batch": batch, "image_rows": records}
    if page_table is not None:
        operands["page_table"] = page_table
    scores = reference.Scores(d["scale"], d["window"], d["softcap"])
    out = reference.attention(q, caches[0], caches[1], batch, page_table, scores, records[:, REACH])
    return operands, {"out": out}


MAKERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "resize": resize,
    "concat": concat,
    "patches": patches,
    "weighted_rows": weighted_rows,
    "pad_columns": pad_columns,
    "clamp": clamp,
    "mean_rows": mean_rows,
    "attend_spans": attend_spans,
    "slice_attend_spans": slice_attend_spans,
    "slice_rope_by_row_attend_spans": slice_rope_by_row_attend_spans,
    "rope_by_row": rope_by_row,
    "rope_rows": rope_rows,
    "put_features": put_features,
    "attention_reach": attention_reach,
}
