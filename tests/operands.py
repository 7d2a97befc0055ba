"""Operands of every op, random, and the results that they must give: one maker per op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.formats import blocks
from shaderlm.graph import reference
from shaderlm.graph.ops import CHOICE

from .weights import make_weight

Arrays = dict[str, NDArray[Any] | None]


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _rows(rng: np.random.Generator, d: Mapping[str, Any]) -> NDArray[np.float32]:
    """Rows whose magnitudes run from 1e-2 to 1e6."""
    magnitudes = 10.0 ** (np.arange(d["rows"]) % 9 - 2)
    return (rng.standard_normal((d["rows"], d["width"])) * magnitudes[:, None]).astype(np.float32)


def _norm(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _rows(rng, d)
    return {"x": x}, {"out": reference.rms_norm(x, d["eps"])}


def _norm_mul(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x, weight = _rows(rng, d), _normal(rng, d["width"])
    return {"x": x, "weight": weight}, {"out": reference.rms_norm_mul(x, weight, d["eps"])}


def _add_norm(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    a, b, weight = _rows(rng, d), _rows(rng, d), _normal(rng, d["width"])
    total, out = reference.add_rms_norm(a, b, weight, d["eps"])
    return {"a": a, "b": b, "weight": weight}, {"sum": total, "out": out}


def _linear_q4gsw(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _normal(rng, d["M"], d["K"]) / 8
    weight, scales = blocks.pack_q4gsw(_normal(rng, d["N"], d["K"]) / np.sqrt(d["K"]), d["group_size"])
    given: NDArray[Any] = scales.astype(np.float16) if d["scales"] == "f16" else scales
    bias = _normal(rng, d["N"]) if d["bias"] else None
    dense = blocks.unpack_q4gsw(weight, given, d["group_size"], d["K"])
    operands: Arrays = {"x": x, "weight": weight, "scales": given, "bias": bias}
    return operands, {"out": reference.linear(x, dense, bias)}


def _linear(fused: str = "") -> Callable[..., tuple[Arrays, Arrays]]:
    """linear, or linear_add or linear_silu_mul."""

    def make(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        x = _normal(rng, d["M"], d["K"]) / 8
        weight, dense = make_weight(rng, d["format"], d["N"], d["K"])
        bias = _normal(rng, d["N"]) / 4 if d["bias"] else None
        operands: Arrays = {"x": x, "weight": weight, "bias": bias}
        if fused == "add":
            operands["residual"] = residual = _normal(rng, d["M"], d["N"])
            return operands, {"out": reference.linear_add(x, dense, residual, bias)}
        formula = reference.linear_silu_mul if fused == "silu_mul" else reference.linear
        return operands, {"out": formula(x, dense, bias)}

    return make


def _rms_norm_linear(formula: Callable[..., NDArray[Any]]) -> Callable[..., tuple[Arrays, Arrays]]:
    def make(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        x = _normal(rng, d["M"], d["K"]) * 3
        norm_weight = _normal(rng, d["K"]) / 8
        weight, dense = make_weight(rng, d["format"], d["N"], d["K"])
        bias = _normal(rng, d["N"]) / 4 if d["bias"] else None
        root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + d["eps"])
        operands: Arrays = {"x": x, "norm_weight": norm_weight, "weight": weight, "bias": bias}
        return operands, {"out": formula(x * norm_weight / root, dense, bias)}

    return make


def _embedding(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    weight, dense = make_weight(rng, d["format"], d["N"], d["K"])
    ids = rng.integers(0, d["N"], d["T"]).astype(np.uint32)
    # The kernel multiplies two exact numbers once, in f32.
    return {"ids": ids, "weight": weight}, {"out": reference.embedding(ids, dense).astype(np.float32)}


def _sdpa_kv(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    dtype = np.float16 if d["cache"] == "f16" else np.float32
    q, k, v = (_normal(rng, d["S"], d[heads], d["D"]) for heads in ("Hq", "Hkv", "Hkv"))
    caches = [_normal(rng, d["C"], d["Hkv"], d["D"]).astype(dtype) for _ in range(2)]
    after = [cache.copy() for cache in caches]
    out = reference.sdpa_kv(q, k, v, after[0], after[1], d["pos"], d["scale"])
    positions = np.arange(d["pos"], d["pos"] + d["S"], dtype=np.uint32)
    operands: Arrays = {"q": q, "k": k, "v": v, "positions": positions, "k_cache": caches[0], "v_cache": caches[1]}
    return operands, {"out": out, "k_cache": after[0], "v_cache": after[1]}


def _attention(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    operands, expected = _sdpa_kv(rng, d)
    caches = {"k_cache": expected["k_cache"], "v_cache": expected["v_cache"]}
    return {"q": operands["q"], "positions": operands["positions"], **caches}, {"out": expected["out"]}


def _kv_write(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    operands, expected = _sdpa_kv(rng, d)
    del operands["q"], expected["out"]
    return operands, expected


def _rope_kv_write(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    dtype = np.float16 if d["cache"] == "f16" else np.float32
    tokens, pos = d["T"], d["C"] - d["T"]
    wide = {name: _normal(rng, tokens, d[f"{name}_stride"]) for name in "qkv"}
    heads = {}
    for name, count in (("q", d["Hq"]), ("k", d["Hkv"]), ("v", d["Hkv"])):
        columns = wide[name][:, d[f"{name}_first"] : d[f"{name}_first"] + count * d["D"]]
        heads[name] = columns.reshape(tokens, count, d["D"])
    positions = np.arange(pos, pos + tokens, dtype=np.uint32)
    table = reference.rope_table(np.arange(d["positions"]), d["rotary"]).astype(np.float32)
    caches = [_normal(rng, d["C"], d["Hkv"], d["D"]).astype(dtype) for _ in range(2)]
    after = [cache.copy() for cache in caches]
    turned = reference.rope(heads["k"], table[positions], d["interleaved"])
    reference.kv_write(turned, heads["v"], after[0], after[1], pos)
    out = reference.rope(heads["q"], table[positions], d["interleaved"])
    operands: Arrays = {**wide, "positions": positions, "table": table, "k_cache": caches[0], "v_cache": caches[1]}
    return operands, {"out": out, "k_cache": after[0], "v_cache": after[1]}


def _rms_norm_linear_rope_kv_write(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    operands, made = _rms_norm_linear(reference.linear)(rng, d)
    heads, y = (d["Hq"], d["Hkv"], d["Hkv"]), made["out"]
    assert y is not None
    parts = np.split(y, [heads[0] * d["D"], (heads[0] + heads[1]) * d["D"]], axis=1)
    q, k, v = (part.reshape(1, count, d["D"]) for part, count in zip(parts, heads, strict=True))
    dtype = np.float16 if d["cache"] == "f16" else np.float32
    caches = [_normal(rng, d["C"], d["Hkv"], d["D"]).astype(dtype) for _ in range(2)]
    after, pos = [cache.copy() for cache in caches], d["C"] - 1
    table = reference.rope_table(np.arange(d["positions"]), d["rotary"]).astype(np.float32)
    reference.kv_write(reference.rope(k, table[[pos]], True), v, after[0], after[1], pos)
    operands |= {"positions": np.array([pos], np.uint32), "table": table, "k_cache": caches[0], "v_cache": caches[1]}
    return operands, {"out": reference.rope(q, table[[pos]], True), "k_cache": after[0], "v_cache": after[1]}


def _columns(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _normal(rng, d["rows"], d["width"])
    return {"x": x}, {"out": x[:, d["first"] : d["first"] + d["count"]]}


def _rope(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _normal(rng, d["T"], d["H"], d["D"])
    table = reference.rope_table(rng.integers(0, 131_072, d["positions"]), d["rotary"]).astype(np.float32)
    rows = rng.permutation(d["positions"]).astype(np.uint32)[: d["T"]]
    operands: Arrays = {"x": x, "positions": rows, "table": table}
    return operands, {"out": reference.rope(x, table[rows], d["interleaved"])}


def _pointwise(formula: Callable[[Any, Any], Any]) -> Callable[..., tuple[Arrays, Arrays]]:
    def make(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        a, b = _normal(rng, d["count"]) * 30, _normal(rng, d["period"])
        expected = formula(a.reshape(-1, d["period"]), b).reshape(-1)
        return {"a": a, "b": b}, {"out": expected}

    return make


def _copy(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _normal(rng, d["count"])
    return {"x": x}, {"out": x}


def _fma_chain(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _normal(rng, d["count"])
    expected = x.astype(np.float64)
    for _ in range(8 * d["rounds"]):
        expected = expected * 0.75 + 0.25
    return {"x": x}, {"out": expected}


def _argmax(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = np.round(_normal(rng, d["rows"], d["width"]) * 2)  # whole numbers: ties everywhere
    return {"x": x}, {"out": reference.argmax(x)}


def _sample(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Which filters are on depends on the width. u is in the middle of a likely token, where rounding cannot matter."""
    logits = np.round(_normal(rng, d["width"]) * 4, 1)  # ties
    logits[rng.random(d["width"]) < 0.1] = -np.inf
    logits[d["width"] // 2] = 8  # one at least
    on = (7, 1, 2, 4)[d["width"] % 4]
    temperature, top_k = rng.uniform(0.5, 2), 40 if on & 1 else 0
    top_p, min_p = 0.9 if on & 2 else 1.0, 0.01 if on & 4 else 0.0
    weights = reference.sample_weights(logits, temperature, top_k, top_p, min_p)
    weights /= weights.sum()
    token = rng.choice(np.flatnonzero(weights >= min(weights.max(), 1e-3)))
    u = weights[:token].sum() + weights[token] / 2
    choice = np.array([(temperature, top_k, top_p, min_p, u, 0)], CHOICE).view(np.uint32)
    return {"logits": logits, "choice": choice}, {"out": np.array([token])}


def _next_position(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    positions = rng.integers(0, 131_072, 1).astype(np.uint32)
    after = positions.copy()
    reference.next_position(after, d["by"])
    return {"positions": positions}, {"positions": after}


MAKERS: dict[str, Callable[..., tuple[Arrays, Arrays]]] = {
    "rms_norm": _norm,
    "rms_norm_mul": _norm_mul,
    "add_rms_norm": _add_norm,
    "linear_q4gsw": _linear_q4gsw,
    "linear": _linear(),
    "linear_add": _linear("add"),
    "linear_silu_mul": _linear("silu_mul"),
    "rms_norm_linear": _rms_norm_linear(reference.linear),
    "rms_norm_linear_silu_mul": _rms_norm_linear(reference.linear_silu_mul),
    "embedding": _embedding,
    "sdpa_kv": _sdpa_kv,
    "attention": _attention,
    "kv_write": _kv_write,
    "rope_kv_write": _rope_kv_write,
    "rms_norm_linear_rope_kv_write": _rms_norm_linear_rope_kv_write,
    "columns": _columns,
    "rope": _rope,
    "add": _pointwise(reference.add),
    "mul": _pointwise(reference.mul),
    "silu_mul": _pointwise(reference.silu_mul),
    "copy": _copy,
    "fma_chain": _fma_chain,
    "argmax": _argmax,
    "sample": _sample,
    "next_position": _next_position,
}
