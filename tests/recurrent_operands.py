"""Operands of ops whose layers keep a state for each sequence, with what they give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.graph import reference
from shaderlm.graph.batch import make_batch

Rng = np.random.Generator
U32 = NDArray[np.uint32]
Made = dict[str, NDArray[Any] | None]
# Of sequences in turn, as far as the rows reach: positions before them, and rows.
_STRETCHES = ((0, 5), (3, 1), (1, 3), (200, 17), (0, 1), (2, 40), (130, 9), (7, 64))


def _normal(rng: Rng, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)


def sequences(rng: Rng, tokens: int, *, single: bool) -> tuple[U32, U32, int]:
    """A batch whose last row is padding, if it has several, a page table, and how many rows the states have."""
    rows, positions, slots = max(1, tokens - 1), list[int](), list[int]()
    for slot in range(rows):
        first, count = _STRETCHES[slot % len(_STRETCHES)]
        count = 1 if single else min(count, rows - len(positions))
        positions += range(first, first + count)
        slots += [slot] * count
        if len(positions) == rows:
            break
    count = slots[-1] + 1
    table = rng.permutation(count + 2)[:count].astype(
        np.uint32
    )  # of each sequence its row, and a page that nobody reads
    page_table = np.stack([table, np.zeros_like(table)], axis=1).reshape(-1)
    batch = make_batch(positions, 0, 2 * np.array(slots) + 1, tokens=tokens)
    return batch, page_table, count + 2


def short_conv(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    batch, page_table, states = sequences(rng, d["tokens"], single=d["single"])
    x, weight = _normal(rng, d["tokens"], d["width"]), _normal(rng, d["width"], d["kernel"])
    state = _normal(rng, states, d["kernel"] - 1, d["width"])
    for position, _, pages in batch[1 : 1 + batch[0, 0], 1:].astype(np.int64):
        if 0 < position < d["kernel"] - 1:  # zeros before the text
            state[page_table[(pages & 0x7FFF_FFFF) - 1], : d["kernel"] - 1 - position] = 0
    after = state.copy()
    out = reference.short_conv(x, weight, batch, page_table, after, silu=d["silu"])
    operands: Made = {"x": x, "weight": weight, "batch": batch, "page_table": page_table, "state": state}
    return operands, {"out": out, "state": after}


def gated_delta_rule(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """Worked out with matrices of each head, in f64."""
    batch, page_table, states = sequences(rng, d["tokens"], single=d["single"])
    tokens, Hk, Hv, Dk, Dv = (d[name] for name in ("tokens", "Hk", "Hv", "Dk", "Dv"))
    x = _normal(rng, tokens, (2 * Hk * Dk + Hv * Dv))
    alpha, beta = _normal(rng, tokens, Hv), _normal(rng, tokens, Hv)
    rate, shift = -np.exp(_normal(rng, Hv)), _normal(rng, Hv)
    state = _normal(rng, states, Hv, Dk, Dv)
    after, out = state.astype(np.float64), np.zeros((tokens, Hv, Dv))
    for t, (_, position, _, pages) in enumerate(batch[1 : 1 + batch[0, 0]].astype(np.int64)):
        row = page_table[(pages & 0x7FFF_FFFF) - 1]
        for head in range(Hv):
            key_head = head // (Hv // Hk) if d["grouped"] else head % Hk
            q, k = (x[t, at * Dk : (at + 1) * Dk].astype(np.float64) for at in (key_head, Hk + key_head))
            q, k = q / np.sqrt(q @ q + 1e-6) / np.sqrt(Dk), k / np.sqrt(k @ k + 1e-6)
            v = x[t, 2 * Hk * Dk + head * Dv :][:Dv]
            S = after[row, head] * np.exp(rate[head] * np.log1p(np.exp(alpha[t, head] + shift[head]))) * (position > 0)
            S = S + np.outer(k, (v - k @ S) / (1 + np.exp(-beta[t, head])))
            after[row, head], out[t, head] = S, q @ S
    operands: Made = {"x": x, "alpha": alpha, "beta": beta, "decay": np.stack([rate, shift]).astype(np.float32)}
    return {**operands, "batch": batch, "page_table": page_table, "state": state}, {"out": out, "state": after}


def mamba2_scan(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """Worked out with matrices of each head, in f64."""
    batch, page_table, states = sequences(rng, d["tokens"], single=d["single"])
    tokens, H, P, N, G = (d[name] for name in ("tokens", "H", "P", "N", "G"))
    x, bias = _normal(rng, tokens, H * P + 2 * G * N), _normal(rng, H * P + 2 * G * N)
    deltas, rate, shift, skip = _normal(rng, tokens, H), -np.exp(_normal(rng, H)), _normal(rng, H), _normal(rng, H)
    state = _normal(rng, states, H, N, P)
    after, out = state.astype(np.float64), np.zeros((tokens, H, P))
    rows = x.astype(np.float64) + bias
    rows = rows / (1 + np.exp(-rows))
    for t, (_, position, _, pages) in enumerate(batch[1 : 1 + batch[0, 0]].astype(np.int64)):
        row = page_table[(pages & 0x7FFF_FFFF) - 1]
        for head in range(H):
            group = H * P + head // (H // G) * N
            v, B, C = rows[t, head * P :][:P], rows[t, group:][:N], rows[t, group + G * N :][:N]
            dt = np.clip(np.log1p(np.exp(deltas[t, head] + shift[head])), d["dt_min"], d["dt_max"] or np.inf)
            S = after[row, head] * np.exp(rate[head] * dt) * (position > 0) + np.outer(B, dt * v)
            after[row, head], out[t, head] = S, C @ S + skip[head] * v
    operands: Made = {"x": x, "bias": bias, "deltas": deltas}
    operands["factors"] = np.stack([rate, shift, skip]).astype(np.float32)
    return {**operands, "batch": batch, "page_table": page_table, "state": state}, {"out": out, "state": after}
