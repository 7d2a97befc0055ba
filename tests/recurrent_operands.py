"""Operands of ops whose layers keep a state for each sequence, with what they give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.graph.batch import NONE, make_batch

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
    count, spares = slots[-1] + 1, {slot: max(0, slots.count(slot) - 1) for slot in (0, 2, 3)}  # these verify drafts
    states = count + 2 + sum(spares.values())
    table = rng.permutation(count + 2)[:count]
    # Of each sequence its first spare row and its row, and a page that nobody reads.
    page_table = np.zeros((count, 3), np.uint32)
    page_table[:, 0], page_table[:, 1], first = NONE, table, count + 2
    for slot, more in spares.items():
        if more:
            page_table[slot, 0], first = first, first + more
    batch = make_batch(positions, 0, 3 * np.array(slots) + 2, tokens=tokens)
    return batch, page_table.reshape(-1), states


def leave(
    after: NDArray[Any], batch: U32, page_table: U32, t: int, state: NDArray[Any], entries: Any = slice(None)
) -> None:
    """The state after row t goes to its spare row, if it has one: another row of its sequence follows."""
    pages = batch[1:, 3] & np.uint32(0x7FFF_FFFF)
    spare = int(page_table[int(pages[t]) - 2])
    if spare != NONE and t + 1 < batch[0, 0] and pages[t + 1] == pages[t]:
        after[spare + t - int(np.flatnonzero(pages == pages[t])[0]), entries] = state[entries]


def short_conv(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    batch, page_table, states = sequences(rng, d["tokens"], single=d["single"])
    x, weight = _normal(rng, d["tokens"], d["width"]), _normal(rng, d["width"], d["kernel"])
    state = _normal(rng, states, d["kernel"], d["width"])
    after, out = state.copy(), np.zeros(x.shape)
    for t, (_, position, _, pages) in enumerate(batch[1 : 1 + batch[0, 0]].astype(np.int64)):
        ring = after[page_table[(pages & 0x7FFF_FFFF) - 1]]
        ring[position % d["kernel"]] = x[t]
        for back in range(min(d["kernel"], position + 1)):
            out[t] += weight[:, -1 - back].astype(np.float64) * ring[(position - back) % d["kernel"]]
        entries = (position - np.arange(min(d["kernel"], position + 1))) % d["kernel"]  # others are left as they are
        leave(after, batch, page_table, t, ring, entries)
    out = out / (1 + np.exp(-out)) if d.get("silu") else out
    operands: Made = {"x": x, "weight": weight, "batch": batch, "page_table": page_table, "state": state}
    return operands, {"out": out, "state": after}


def _columns(rng: Rng, tokens: int, stride: int, **parts: tuple[int, NDArray[Any]]) -> NDArray[np.float32]:
    """Rows that have some columns from one on, and random numbers elsewhere."""
    wide = _normal(rng, tokens, stride)
    for first, values in parts.values():
        wide[:, first : first + values.shape[1]] = values
    return wide


def slice_short_conv(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    operands, expected = short_conv(rng, d)
    x = operands["x"]
    assert x is not None
    return {**operands, "x": _columns(rng, d["tokens"], d["stride"], x=(d["first"], x))}, expected


def mul_short_conv_mul(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """Factors before it that are powers of two: their quotients are exact."""
    operands, expected = short_conv(rng, d)
    x, out = operands["x"], expected["out"]
    assert x is not None
    assert out is not None
    before = 2.0 ** rng.integers(-2, 3, x.shape)
    after = _normal(rng, *x.shape)
    parts = {"before": (d["before_first"], before), "values": (d["values_first"], x / before)}
    wide = _columns(rng, d["tokens"], d["stride"], after=(d["after_first"], after), **parts)
    return {**operands, "x": wide}, {**expected, "out": out * after}


def gated_delta_rule(
    rng: Rng, d: Mapping[str, Any], x: NDArray[Any] | None = None, rows: Made | None = None
) -> tuple[Made, Made]:
    """Worked out with matrices of each head, in f64. `x` and `rows`, a batch and its page table, if they are there."""
    batch, page_table, states = sequences(rng, d["tokens"], single=d["single"])
    if rows is not None and rows["batch"] is not None and rows["page_table"] is not None:
        batch, page_table = rows["batch"], rows["page_table"]
    tokens, Hk, Hv, Dk, Dv = (d[name] for name in ("tokens", "Hk", "Hv", "Dk", "Dv"))
    x = _normal(rng, tokens, (2 * Hk * Dk + Hv * Dv)) if x is None else x
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
        leave(after, batch, page_table, t, after[row])
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
        leave(after, batch, page_table, t, after[row])
    operands: Made = {"x": x, "bias": bias, "deltas": deltas}
    operands["factors"] = np.stack([rate, shift, skip]).astype(np.float32)
    return {**operands, "batch": batch, "page_table": page_table, "state": state}, {"out": out, "state": after}


def slice_gated_delta_rule(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    operands, expected = gated_delta_rule(rng, d)
    factors = _factors(rng, d, operands, d["stride"])
    return {**operands, "factors": factors}, expected


def _factors(rng: Rng, d: Mapping[str, Any], operands: Made, stride: int) -> NDArray[np.float32]:
    """Rows that have alpha and beta, which are taken out of the operands."""
    parts = {}
    for name in ("alpha", "beta"):
        values = operands.pop(name)
        assert values is not None
        parts[name] = (d[f"{name}_first"], values)
    return _columns(rng, d["tokens"], stride, **parts)


def short_conv_gated_delta_rule(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """The two ops, then a norm of each head, times silu of a gate."""
    tokens, heads, values = d["tokens"], d["Hv"], d["Dv"]
    width = 2 * d["Hk"] * d["Dk"] + heads * values
    before, mixed = short_conv(rng, {**d, "width": width, "silu": True})
    operands, expected = gated_delta_rule(rng, d, mixed["out"], before)
    x, y = before["x"], expected["out"]
    assert x is not None
    assert y is not None
    gate, weight = _normal(rng, tokens, heads * values), _normal(rng, values)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + d["eps"]) * weight
    y = y * (gate / (1 + np.exp(-gate.astype(np.float64)))).reshape(y.shape)
    gates = _factors(rng, d, operands, d["gates_stride"])
    gates[:, d["gate_first"] :][:, : heads * values] = gate
    operands |= {"x": _columns(rng, tokens, d["stride"], x=(d["first"], x)), "gates": gates}
    operands |= {"conv_weight": before["weight"], "norm_weight": weight, "conv_state": before["state"]}
    return operands, {**expected, "out": y, "conv_state": mixed["state"]}


def mamba2_scan_silu_mul(rng: Rng, d: Mapping[str, Any]) -> tuple[Made, Made]:
    """Steps and gates are columns of one tensor."""
    operands, results = mamba2_scan(rng, d)
    out, deltas = results["out"], operands.pop("deltas")
    assert out is not None
    assert deltas is not None
    projected = _normal(rng, d["tokens"], d["stride"])
    projected[:, d["deltas_first"] : d["deltas_first"] + d["H"]] = deltas
    gate = projected[:, d["gate_first"] :][:, : d["H"] * d["P"]].astype(np.float64)
    gated = out * (gate / (1 + np.exp(-gate))).reshape(out.shape)
    return {"projected": projected, **operands}, {**results, "out": gated}
