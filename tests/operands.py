"""Operands of every op, random, and the results that they must give: one maker per op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.formats import blocks
from shaderlm.graph import reference, sampling
from shaderlm.graph.batch import LAST, contiguous_batch, make_batch

from . import attention_operands, recurrent_operands, sampling_operands, vision_operands
from .attention_operands import weighted_norm
from .weights import make_weight, unpack_q4gsw

Arrays = dict[str, NDArray[Any] | None]


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _rows(rng: np.random.Generator, d: Mapping[str, Any]) -> NDArray[np.float32]:
    """Rows whose magnitudes run from 1e-2 to 1e6."""
    rows = d["tokens"] * d["heads"]
    magnitudes = 10.0 ** (np.arange(rows) % 9 - 2)
    return (rng.standard_normal((rows, d["width"])) * magnitudes[:, None]).astype(np.float32)


def _with_batch(d: Mapping[str, Any], operands: Arrays, expected: Arrays) -> tuple[Arrays, Arrays]:
    """The same with a batch of which the last row is padding: its results stay as they were, 0."""
    if not d["batched"]:
        return operands, expected
    rows = d["tokens"] - 1
    assert rows > 0
    padded: Arrays = {}
    for name, array in expected.items():
        assert array is not None
        kept = array.reshape(d["tokens"], -1).copy()
        kept[rows:] = 0
        padded[name] = kept.reshape(array.shape)
    return {**operands, "batch": contiguous_batch(0, rows, tokens=d["tokens"])}, padded


def _norm(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _rows(rng, d)
    return _with_batch(d, {"x": x}, {"out": reference.rms_norm(x, d["eps"])})


def _norm_mul(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x, weight = _rows(rng, d), _normal(rng, d["width"])
    operands: Arrays = {"x": x, "weight": weight}
    out = weighted_norm(x, weight, d["eps"])
    if d["residual"]:
        operands["residual"] = residual = _normal(rng, *x.shape)
        out = reference.add(residual, out)
    if d["scaled"]:
        operands["scale"] = scale = np.array([0.375], np.float32)
        out = out * scale
    return _with_batch(d, operands, {"out": out})


def _gated_norm(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x, weight, gate = _rows(rng, d), _normal(rng, d["width"]), _normal(rng, d["tokens"], d["stride"])
    columns = gate[:, d["first"] :][:, : d["heads"] * d["width"]].reshape(x.shape)
    out = reference.silu_mul(columns, weighted_norm(x, weight, d["eps"]))
    return _with_batch(d, {"x": x, "weight": weight, "gate": gate}, {"out": out})


def _gated(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    gate, b = _normal(rng, d["tokens"], d["stride"]) * 8, _normal(rng, d["tokens"], d["width"])
    return _with_batch(
        d, {"gate": gate, "b": b}, {"out": reference.sigmoid_mul(gate[:, d["first"] :][:, : d["width"]], b)}
    )


def _add_norm(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    a, b, weight = _rows(rng, d), _rows(rng, d), _normal(rng, d["width"])
    total = reference.add(a, b)
    expected: Arrays = {"sum": total, "out": weighted_norm(total, weight, d["eps"])}
    return _with_batch(d, {"a": a, "b": b, "weight": weight}, expected)


def _norm_add_norm(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    a, b, weight, following = _rows(rng, d), _rows(rng, d), _normal(rng, d["width"]), _normal(rng, d["width"])
    total = reference.add(a, weighted_norm(b, weight, d["eps"]))
    operands: Arrays = {"a": a, "b": b, "weight": weight, "next_weight": following}
    return _with_batch(d, operands, {"sum": total, "out": weighted_norm(total, following, d["eps"])})


def _layer_norm(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x, weight = _rows(rng, d), _normal(rng, d["width"])
    x += x.std(axis=-1, keepdims=True) * 3  # a mean that counts
    bias = _normal(rng, d["width"]) if d["bias"] else None
    operands: Arrays = {"x": x, "weight": weight, **({"bias": bias} if d["bias"] else {})}
    return _with_batch(d, operands, {"out": reference.layer_norm(x, weight, bias, d["eps"])})


def _linear_q4gsw(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _normal(rng, d["tokens"], d["K"]) / 8
    weight, scales = blocks.pack_q4gsw(_normal(rng, d["N"], d["K"]) / np.sqrt(d["K"]), d["group_size"])
    given: NDArray[Any] = scales.astype(np.float16) if d["scales"] == "f16" else scales
    bias = _normal(rng, d["N"]) if d["bias"] else None
    dense = unpack_q4gsw(weight, given, d["group_size"], d["K"])
    operands: Arrays = {"x": x, "weight": weight, "scales": given, "bias": bias}
    return operands, {"out": reference.linear(x, dense, bias)}


def _linear(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """linear with its prologue and epilogue, worked out in the obvious way."""
    norm, N = d["prologue"] in ("rms_norm", "rms_norm_add_rms_norm"), d["N"]
    x = _normal(rng, d["tokens"], d["K"]) * (3 if norm else 1 / 8)
    weight, dense = make_weight(rng, d["format"], N, d["K"])
    bias = _normal(rng, N) / 4 if d["bias"] else None
    operands: Arrays = {"x": x, "weight": weight, "bias": bias}
    inputs: NDArray[Any] = x
    more: Arrays = {}
    if d["prologue"] in ("rms_norm_add_rms_norm", "rms_norm_add"):
        operands |= {"skip": _normal(rng, d["tokens"], d["K"]), "post_weight": _normal(rng, d["K"])}
        x = reference.add(operands["skip"], weighted_norm(x, operands["post_weight"], d["eps"]))
        inputs = more["sum"] = x
    if norm:
        operands["norm_weight"] = norm_weight = _normal(rng, d["K"]) / 8
        root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + d["eps"])
        inputs = x * norm_weight / root
    y = reference.linear(inputs, dense, bias)
    if d["epilogue"] == "add":
        operands["residual"] = residual = _normal(rng, d["tokens"], N)
        y = residual + y
    elif d["epilogue"] == "gelu_residual":
        operands["residual"] = residual = _normal(rng, d["tokens"], N)
        y = reference.gelu_mul(y, residual)
    elif d["epilogue"] == "silu_mul":
        y = reference.silu_mul(y[:, 0::2], y[:, 1::2])
    elif d["epilogue"] == "gelu_mul":
        y = reference.gelu_mul(y[:, 0::2], y[:, 1::2])
    elif d["epilogue"] in ("gelu", "gelu_erf"):
        y = reference.gelu(y) if d["epilogue"] == "gelu" else reference.gelu_erf(y)
    elif d["epilogue"] == "rope_kv_write":
        return _rotated_and_written(rng, d, operands, y)
    return _with_batch(d, operands, {"out": y, **more})


def _attention_linear(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    given, wanted = attention_operands.rms_norm_rope_attention(rng, d)
    operands: Arrays = dict(given)
    weight, dense = make_weight(rng, d["format"], d["N"], d["K"])
    bias = _normal(rng, d["N"]) / 4 if d["bias"] else None
    y = reference.linear(wanted["out"].reshape(1, d["K"]), dense, bias)
    operands |= {"weight": weight, "bias": bias}
    if d["epilogue"] == "add":
        operands["residual"] = residual = _normal(rng, 1, d["N"])
        y = residual + y
    results: Arrays = dict(wanted)
    return operands, {**results, "out": y}


def _route_experts(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Worked out row by row. Logits are multiples of 1/8, so that some are equal."""
    logits = np.round(_normal(rng, d["tokens"], d["experts"]) * 16) / 8
    bias = np.round(_normal(rng, d["experts"]) * 4) / 8 if d["bias"] else None
    ids, factors = np.zeros((d["tokens"], d["used"]), np.uint32), np.zeros((d["tokens"], d["used"]))
    for t, row in enumerate(logits.astype(np.float64)):
        powers = 1 / (1 + np.exp(-row)) if d["gating"] == "sigmoid" else np.exp(row - row.max())
        scores = powers / powers.sum() if d["gating"] == "softmax" else powers
        ranked = (row if d["gating"] == "softmax_used" else scores) + (0 if bias is None else bias)
        chosen = np.lexsort((np.arange(d["experts"]), -ranked))[: d["used"]]
        whole = d["normalise"] or d["gating"] == "softmax_used"
        ids[t], factors[t] = chosen, scores[chosen] * d["scale"] / (scores[chosen].sum() if whole else 1)
    own = rng.uniform(0.5, 2, d["experts"]).astype(np.float32) if d["scaled"] else None
    factors = factors if own is None else factors * own[ids]
    if d["shared"]:
        gate = _normal(rng, d["tokens"], 1) * 4
        logits = np.concatenate([logits, gate], axis=1)
        ids = np.concatenate([ids, np.full((d["tokens"], 1), d["experts"], np.uint32)], axis=1)
        factors = np.concatenate([factors, 1 / (1 + np.exp(-gate.astype(np.float64)))], axis=1)
    return _with_batch(d, {"logits": logits, "bias": bias, "expert_scale": own}, {"ids": ids, "factors": factors})


def _linear_experts(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Rows choose their experts at random; every second row those of the first."""
    tokens, used, N = d["tokens"], d["used"], d["N"]
    weight, dense = make_weight(rng, d["format"], d["experts"] * N, d["K"])
    ids = np.stack([rng.permutation(d["experts"])[:used] for _ in range(tokens)]).astype(np.uint32)
    ids[::2] = ids[0]
    x = _normal(rng, tokens, *([used] if d["combine"] == "sum" else []), d["K"]) / 8
    factors = rng.uniform(0.1, 1, (tokens, used)).astype(np.float32) if d["combine"] == "sum" else None
    bias = _normal(rng, d["experts"] * N) if d["bias"] else None
    residual = _normal(rng, tokens, N) if d["residual"] else None
    operands: Arrays = {"x": x.reshape(tokens, -1), "weight": weight, "ids": ids, "factors": factors}
    operands |= {"bias": bias, "residual": residual}
    inputs = x.astype(np.float64)
    if d["prologue"] == "rms_norm":
        operands["norm_weight"] = norm_weight = _normal(rng, d["K"])
        inputs = norm_weight * inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + d["eps"])
    matrices = dense.reshape(d["experts"], N, d["K"])[ids]  # [tokens, used, N, K]
    y = np.einsum("tjnk,tjk->tjn", matrices, inputs.reshape(tokens, -1, d["K"]) + np.zeros((1, used, 1)))
    if bias is not None:
        y = y + bias.reshape(d["experts"], N)[ids]
    if factors is not None:
        total = (y * factors[:, :, None]).sum(1)
        return _with_batch(d, operands, {"out": total if residual is None else total + residual})
    gated = {"silu_mul": reference.silu_mul, "gelu_mul": reference.gelu_mul, "swiglu_clamped": _swiglu_clamped}.get(
        d["combine"]
    )
    return _with_batch(d, operands, {"out": gated(y[..., 0::2], y[..., 1::2]) if gated else y})


def _swiglu_clamped(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """As the published code of gpt-oss has it: out-of-place clamps, a sigmoid of 1.702 times the gate, up plus one."""
    gate, up = np.where(a > 7, 7.0, a.astype(np.float64)), np.maximum(np.minimum(b.astype(np.float64), 7), -7)
    return np.asarray((up + 1) * (gate / (1 + np.exp(-1.702 * gate))))


def _add_gated(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    a, b = _normal(rng, d["tokens"], d["width"]), _normal(rng, d["tokens"], d["width"])
    x, gate = _normal(rng, d["tokens"], d["K"]), _normal(rng, d["K"]) * 3
    factor = 1 / (1 + np.exp(-(x.astype(np.float64) @ gate)))
    return _with_batch(d, {"a": a, "b": b, "x": x, "gate": gate}, {"out": a + factor[:, None] * b})


def _rotated_and_written(
    rng: np.random.Generator, d: Mapping[str, Any], operands: Arrays, y: NDArray[Any]
) -> tuple[Arrays, Arrays]:
    """Rows whose queries are rotated, and whose keys and values go to other rows of the pool than their positions.

    Of several rows, the last ones are padding: their results stay as they were, 0.
    """
    tokens, heads, pool = d["tokens"], (d["Hq"], d["Hkv"], d["Hkv"]), d["tokens"] + 6
    batch = make_batch([11], [5]) if tokens == 1 else attention_operands.slots_batch(rng, tokens, pool + 9, pool)
    parts = np.split(y, [heads[0] * d["D"], (heads[0] + heads[1]) * d["D"]], axis=1)
    q, k, v = (part.reshape(tokens, count, d["D"]) for part, count in zip(parts, heads, strict=True))
    dtype = np.float16 if d["cache"] == "f16" else np.float32
    caches = [_normal(rng, pool, d["Hkv"], d["D"]).astype(dtype) for _ in range(2)]
    after = [cache.copy() for cache in caches]
    table = reference.rope_table(np.arange(pool + 9), d["rotary"]).astype(np.float32)
    turns = table[batch[1:, 1]]
    reference.kv_write(reference.rope(k, turns, True), v, after[0], after[1], batch)
    out = reference.rope(q, turns, True)
    out[batch[0, 0] :] = 0
    operands |= {"batch": batch, "table": table, "k_cache": caches[0], "v_cache": caches[1]}
    return operands, {"out": out, "k_cache": after[0], "v_cache": after[1]}


def _embedding(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    weight, dense = make_weight(rng, d["format"], d["N"], d["K"])
    ids = rng.integers(0, d["N"], d["tokens"]).astype(np.uint32)
    # Every third row takes the token that was sampled last for a sequence.
    last = rng.integers(0, d["N"], 5).astype(np.uint32)
    slots = rng.integers(0, 5, d["tokens"]).astype(np.uint32)
    named = np.arange(d["tokens"]) % 3 == 2
    batch = contiguous_batch(0, d["tokens"], np.where(named, np.uint32(LAST) | slots, ids))
    wanted = np.where(named, last[slots], ids)
    # The kernel multiplies two exact numbers once, in f32.
    return {"batch": batch, "tokens": last, "weight": weight}, {
        "out": reference.mul(reference.embedding(wanted, dense), d["factor"]).astype(np.float32)
    }


def _add_positions(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Of several rows, the last is padding: its results stay as they were, 0."""
    weight, dense = make_weight(rng, d["format"], d["N"], d["K"])
    x, positions = _normal(rng, d["tokens"], d["K"]), rng.integers(0, d["N"], max(1, d["tokens"] - 1))
    out = np.zeros((d["tokens"], d["K"]))
    out[: len(positions)] = x[: len(positions)] + dense[positions]
    batch = make_batch(positions, positions, tokens=d["tokens"])
    return {"x": x, "batch": batch, "weight": weight}, {"out": out}


def _each(formula: Callable[..., Any], *names: str) -> Callable[..., tuple[Arrays, Arrays]]:
    """Values of which many are beyond where a function is flat."""

    def make(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        x = _normal(rng, d["count"]) * 10.0 ** rng.integers(-1, 3, d["count"]).astype(np.float32)
        return _with_batch(d, {"x": x}, {"out": formula(x, *(d[name] for name in names))})

    return make


def _slice(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = _normal(rng, d["tokens"], d["width"])
    return _with_batch(d, {"x": x}, {"out": x[:, d["first"] : d["first"] + d["count"]]})


def _take_rows(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x, count = _normal(rng, d["tokens"], d["width"]), max(1, d["rows"] - 1)  # the last row of out is padding
    outputs = np.zeros((d["rows"], 8), np.uint32)
    outputs[:, 0] = rng.integers(0, d["tokens"], d["rows"])
    out = np.zeros((d["rows"], d["width"]), np.float32)
    out[:count] = x[outputs[:count, 0]]
    batch = contiguous_batch(0, d["tokens"], outputs=count)
    return {"x": x, "outputs": outputs, "batch": batch}, {"out": out}


def _pointwise(formula: Callable[[Any, Any], Any], width: float = 1) -> Callable[..., tuple[Arrays, Arrays]]:
    def make(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        a, b = _normal(rng, d["count"]) * 30, _normal(rng, d["period"]) * np.float32(width)
        expected = formula(a.reshape(-1, d["period"]), b).reshape(-1)
        return _with_batch(d, {"a": a, "b": b}, {"out": expected})

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


def _matrix_chain(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = np.round(_normal(rng, d["rows"] + d["columns"], d["K"]) * 8) / 8  # f16 holds these
    product = d["rounds"] * x[: d["rows"]].astype(np.float64) @ x[d["rows"] :].T
    return {"x": x}, {"out": np.stack([product] * d["count"])}


def _argmax(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    x = np.round(_normal(rng, d["rows"], d["width"]) * 2)  # whole numbers: ties everywhere
    x[rng.random(x.shape) < 0.1] = np.nan
    return {"x": x}, {"out": sampling.argmax(x)}


MAKERS: dict[str, Callable[..., tuple[Arrays, Arrays]]] = {
    **attention_operands.MAKERS,
    **sampling_operands.MAKERS,
    **vision_operands.MAKERS,
    "rms_norm": _norm,
    "rms_norm_mul": _norm_mul,
    "add_rms_norm": _add_norm,
    "rms_norm_add_rms_norm": _norm_add_norm,
    "layer_norm": _layer_norm,
    "linear_q4gsw": _linear_q4gsw,
    "linear": _linear,
    "rms_norm_rope_attention_linear": _attention_linear,
    "route_experts": _route_experts,
    "linear_experts": _linear_experts,
    "add_gated": _add_gated,
    "embedding": _embedding,
    "add_positions": _add_positions,
    "slice": _slice,
    **{
        op: getattr(recurrent_operands, op)
        for op in (
            *("short_conv", "slice_short_conv", "mul_short_conv_mul", "gated_delta_rule", "slice_gated_delta_rule"),
            *("short_conv_gated_delta_rule", "mamba2_scan", "mamba2_scan_silu_mul"),
        )
    },
    "rms_norm_silu_mul": _gated_norm,
    "slice_sigmoid_mul": _gated,
    "take_rows": _take_rows,
    "add": _pointwise(reference.add),
    "mul": _pointwise(reference.mul),
    "silu_mul": _pointwise(reference.silu_mul),
    "sigmoid_mul": _pointwise(reference.sigmoid_mul),
    "gelu_mul": _pointwise(reference.gelu_mul),
    "swiglu_clamped": _pointwise(_swiglu_clamped, 6),
    "gelu": _each(reference.gelu),
    "gelu_erf": _each(reference.gelu_erf),
    "relu_squared": _each(reference.relu_squared),
    "scale": _each(reference.mul, "factor"),
    "softcap": _each(reference.softcap, "cap"),
    "copy": _copy,
    "fma_chain": _fma_chain,
    "matrix_chain": _matrix_chain,
    "argmax": _argmax,
}
