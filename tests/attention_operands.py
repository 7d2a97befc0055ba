"""Token batches for tests, and operands of the ops that read them: rope, kv_write, rope_kv_write and attention.

What no row may read is NaN: rows of the pool that hold no key, keys past the end of a sequence and before a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.graph import reference
from shaderlm.graph.batch import NONE, PAGE, U32, make_batch

Made = dict[str, NDArray[Any]]
Rng = np.random.Generator
# Rows of a batch: which sequence, the position of the first, how many.
Stretch = tuple[int, int, int]


def slots_of(positions: Any, page_table: Any, pages: Any = 0) -> U32:
    """The rows of the pool where positions of a sequence (or one sequence each) lie."""
    positions = np.asarray(positions, np.uint32)
    page = np.asarray(page_table, np.uint32)[np.asarray(pages, np.uint32) + positions // PAGE]
    return np.asarray(page * np.uint32(PAGE) + positions % PAGE, np.uint32)


def weighted_norm(x: Any, weight: Any, eps: float) -> Any:
    """[..., width], [width] → [..., width]."""
    return reference.rms_norm(x, eps) * np.asarray(weight, np.float64)


def _normal(rng: Rng, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _dtype(d: Mapping[str, Any]) -> Any:
    return np.float16 if d["cache"] == "f16" else np.float32


def paged_batch(rng: Rng, stretches: Iterable[Stretch], tokens: int) -> tuple[U32, U32, int]:
    """A batch, its page table and the pages of the pool: every sequence has pages of its own, in no order."""
    lengths: dict[int, int] = {}
    for sequence, position, rows in stretches:
        lengths[sequence] = max(lengths.get(sequence, 0), position + rows)
    counts = {sequence: -(-length // PAGE) for sequence, length in lengths.items()}
    pool = sum(counts.values()) + 2
    free = iter(rng.permutation(pool).astype(np.uint32).tolist())
    table: list[int] = [pool + 7]  # nobody's entry
    pages = {}
    for sequence in rng.permutation(sorted(counts)).tolist():
        pages[sequence] = len(table)
        table += [next(free) for _ in range(counts[sequence])]
    positions = np.concatenate([np.arange(first, first + rows) for _, first, rows in stretches])
    starts = np.concatenate([np.full(rows, pages[sequence]) for sequence, _, rows in stretches])
    page_table = np.array(table, np.uint32)
    return make_batch(positions, slots_of(positions, page_table, starts), starts, tokens=tokens), page_table, pool


def _stretches(d: Mapping[str, Any]) -> tuple[Stretch, ...]:
    """Those of the case, or as many rows of one sequence as there is room for, at its end."""
    given: tuple[Stretch, ...] = d.get("stretches", ())
    return given or ((0, max(d["keys"] - d["tokens"], 0), d["tokens"]),)


def attention(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    stretches = _stretches(d)
    if d["paged"]:
        batch, page_table, pages = paged_batch(rng, stretches, d["tokens"])
        size = pages * PAGE
    else:
        positions = np.concatenate([np.arange(first, first + rows) for _, first, rows in stretches])
        batch, page_table = make_batch(positions, positions, tokens=d["tokens"]), None
        size = int(positions.max()) + 1
    caches = np.full((2, size, d["Hkv"], d["D"]), np.nan, _dtype(d))
    for _, position, _, pages_of in {tuple(row): row for row in batch[1 : 1 + batch[0, 0]].tolist()}:
        rows = reference.pool_rows(position + 1, page_table, pages_of & 0x7FFF_FFFF)
        seen = np.arange(size)[rows][-d["window"] :]  # all, if there is no window
        filled = seen[np.isnan(caches[0, seen, 0, 0])]
        caches[:, filled] = _normal(rng, 2, len(filled), d["Hkv"], d["D"])
    q = _normal(rng, d["tokens"], d["Hq"], d["D"])
    operands: Made = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "batch": batch}
    if page_table is not None:
        operands["page_table"] = page_table
    # Some sinks are above all scores and some below. The formula multiplies keys before a window by 0.
    sinks = np.linspace(6, -2, d["Hq"]).astype(np.float32) if d["sinks"] else None
    if sinks is not None:
        operands["sinks"] = sinks
    scores = reference.Scores(d["scale"], d["window"], d["softcap"], sinks)
    known = np.nan_to_num(caches)
    return operands, {"out": reference.attention(q, known[0], known[1], batch, page_table, scores)}


def slots_batch(rng: Rng, tokens: int, positions: int, pool: int) -> U32:
    """Rows at any positions and slots. One slot is outside the pool, one is none, and the last rows are padding."""
    rows = tokens if tokens < 4 else tokens - tokens // 4
    slots = rng.permutation(pool)[:rows].astype(np.uint32)
    if rows > 2:
        slots[1:3] = (pool, NONE)
    return make_batch(rng.integers(0, positions, rows), slots, tokens=tokens)


def kv_write(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    pool = d["tokens"] + 3
    batch = slots_batch(rng, d["tokens"], pool, pool)
    k, v = (_normal(rng, d["tokens"], d["Hkv"], d["D"]) for _ in range(2))
    caches = [_normal(rng, pool, d["Hkv"], d["D"]).astype(_dtype(d)) for _ in range(2)]
    after = [cache.copy() for cache in caches]
    reference.kv_write(k, v, after[0], after[1], batch)
    operands: Made = {"k": k, "v": v, "batch": batch, "k_cache": caches[0], "v_cache": caches[1]}
    return operands, {"k_cache": after[0], "v_cache": after[1]}


def _table(d: Mapping[str, Any], rows: int) -> NDArray[np.float32]:
    return reference.rope_table(np.arange(rows) * 37, d["rotary"]).astype(np.float32)


def _without_padding(out: NDArray[Any], batch: U32) -> NDArray[Any]:
    out = out.copy()
    out[batch[0, 0] :] = 0
    return out


def rope_kv_write(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    tokens, pool = d["tokens"], d["tokens"] + 3
    wide = {name: _normal(rng, tokens, d[f"{name}_stride"]) for name in "qkv"}
    heads: Made = {}
    for name, count in (("q", d["Hq"]), ("k", d["Hkv"]), ("v", d["Hkv"])):
        columns = wide[name][:, d[f"{name}_first"] : d[f"{name}_first"] + count * d["D"]]
        heads[name] = columns.reshape(tokens, count, d["D"])
    norms: Made = {}
    if "eps" in d:  # heads are normed first
        norms = {f"{name}_norm": _normal(rng, d["D"]) for name in "qk"}
        heads |= {name: weighted_norm(heads[name], norms[f"{name}_norm"], d["eps"]) for name in "qk"}
    batch = slots_batch(rng, tokens, 2 * pool, pool)
    table = _table(d, 2 * pool)
    turns = table[batch[1:, 1]]
    caches = [_normal(rng, pool, d["Hkv"], d["D"]).astype(_dtype(d)) for _ in range(2)]
    after = [cache.copy() for cache in caches]
    reference.kv_write(reference.rope(heads["k"], turns, d["interleaved"]), heads["v"], after[0], after[1], batch)
    out = _without_padding(reference.rope(heads["q"], turns, d["interleaved"]), batch)
    operands: Made = {**wide, **norms, "batch": batch, "table": table, "k_cache": caches[0], "v_cache": caches[1]}
    return operands, {"out": out, "k_cache": after[0], "v_cache": after[1]}


def rms_norm_rope_attention(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """What attention and rms_norm_rope_kv_write read and give, for one row at the end of its sequence."""
    seen, _ = attention(rng, d)
    rotated, _ = rope_kv_write(rng, d)
    operands: Made = {**rotated, **{name: seen[name] for name in ("batch", "k_cache", "v_cache")}}
    operands["table"] = _table(d, d["keys"])
    for name in ("k_cache", "v_cache"):
        operands[name] = np.nan_to_num(operands[name], nan=3e4)  # before a window: it would show in the result
        operands[name][d["keys"] - 1] = np.nan  # the row's own are not there yet
    heads: Made = {}
    for name, count in (("q", d["Hq"]), ("k", d["Hkv"]), ("v", d["Hkv"])):
        columns = operands[name][:, d[f"{name}_first"] : d[f"{name}_first"] + count * d["D"]]
        heads[name] = columns.reshape(1, count, d["D"])
    turns = operands["table"][-1:]
    for name in "qk":
        normed = weighted_norm(heads[name], operands[f"{name}_norm"], d["eps"])
        heads[name] = reference.rope(normed, turns, d["interleaved"])
    after = [operands[name].copy() for name in ("k_cache", "v_cache")]
    reference.kv_write(heads["k"], heads["v"], after[0], after[1], operands["batch"])
    known, scores = np.nan_to_num(after), reference.Scores(d["scale"], d["window"], d["softcap"], None)
    out = reference.attention(heads["q"], known[0], known[1], operands["batch"], None, scores)
    return operands, {"out": out, "k_cache": after[0], "v_cache": after[1]}


def rope(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    x = _normal(rng, d["tokens"], d["H"], d["D"])
    positions = 2 * d["tokens"] + 3
    batch, table = slots_batch(rng, d["tokens"], positions, positions), _table(d, positions)
    out = reference.rope(x, table[batch[1:, 1]], d["interleaved"])
    return {"x": x, "batch": batch, "table": table}, {"out": _without_padding(out, batch)}


def rms_norm_rope(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    wide, weight = _normal(rng, d["tokens"], d["stride"]), _normal(rng, d["D"])
    heads = wide[:, d["first"] :][:, : d["H"] * d["D"]].reshape(d["tokens"], d["H"], d["D"])
    positions = 2 * d["tokens"] + 3
    batch, table = slots_batch(rng, d["tokens"], positions, positions), _table(d, positions)
    out = reference.rope(weighted_norm(heads, weight, d["eps"]), table[batch[1:, 1]], d["interleaved"])
    return {"x": wide, "weight": weight, "batch": batch, "table": table}, {"out": _without_padding(out, batch)}


MAKERS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "kv_write": kv_write,
    "rope_kv_write": rope_kv_write,
    "rms_norm_rope_kv_write": rope_kv_write,
    "rms_norm_rope_attention": rms_norm_rope_attention,
    "rope": rope,
    "rms_norm_rope": rms_norm_rope,
}
