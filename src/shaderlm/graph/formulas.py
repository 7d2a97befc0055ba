"""What each op computes, in NumPy: from its dims and operands by name to its outputs by name.

A state (the cache, the tokens of a sampler) is changed in place and is no output. Weights are dense arrays. `ops` has
one of these for every op; arithmetic that takes more than a line is in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import reference, sampling
from .batch import ids_of

Array = NDArray[Any]
Dims = Mapping[str, Any]
Operands = Mapping[str, Array]
Compute = Callable[[Dims, Operands], dict[str, Array]]


def _positions(x: Operands) -> Array:
    """Of the rows, [tokens]; 0 for padding."""
    return np.asarray(x["batch"][1:, 1])


def _heads(array: Array, heads: int, width: int) -> Array:
    return array.reshape(len(array), heads, width)


def linear(d: Dims, x: Operands) -> dict[str, Array]:
    """Prologue, product and epilogue."""
    if d["prologue"] != "rms_norm_add_rms_norm":
        return _linear(d, x)
    total = reference.add(x["skip"], reference.rms_norm_mul(x["x"], x["post_weight"], d["eps"]))
    return {**_linear({**d, "prologue": "rms_norm"}, {**x, "x": total}), "sum": total}


def _linear(d: Dims, x: Operands) -> dict[str, Array]:
    inputs = x["x"]
    if d["prologue"] == "rms_norm":
        inputs = reference.rms_norm_mul(inputs, x["norm_weight"], d["eps"])
    y = reference.linear(inputs, x["weight"], x.get("bias"))
    if d["epilogue"] == "add":
        return {"out": reference.add(x["residual"], y)}
    if d["epilogue"] == "silu_mul":
        return {"out": reference.silu_mul(y[:, 0::2], y[:, 1::2])}
    if d["epilogue"] == "gelu_mul":
        return {"out": reference.gelu_mul(y[:, 0::2], y[:, 1::2])}
    if d["epilogue"] in ("gelu", "gelu_erf"):
        return {"out": reference.gelu(y) if d["epilogue"] == "gelu" else reference.gelu_erf(y)}
    if d["epilogue"] == "rope_kv_write":
        starts = {"q_first": 0, "k_first": d["Hq"] * d["D"], "v_first": (d["Hq"] + d["Hkv"]) * d["D"]}
        return rope_kv_write({**d, **starts, "interleaved": True}, {**x, "q": y, "k": y, "v": y})
    return {"out": y}


def route_experts(d: Dims, x: Operands) -> dict[str, Array]:
    """The experts of each row, and what their results count."""
    bias = x["bias"] if d["bias"] else None
    how = (d["used"], d["gating"], d["normalise"], d["scale"])
    ids, factors = reference.route_experts(x["logits"], bias, *how)
    return {"ids": ids, "factors": factors}


def linear_experts(d: Dims, x: Operands) -> dict[str, Array]:
    """The products of each row with the matrices of its experts, side by side or summed."""
    weight = x["weight"].reshape(d["experts"], d["N"], d["K"])
    inputs = x["x"].reshape(d["tokens"], -1, d["K"])
    if d["prologue"] == "rms_norm":
        inputs = reference.rms_norm_mul(inputs, x["norm_weight"], d["eps"])
    ids = x["ids"].reshape(d["tokens"], d["used"])
    bias = x["bias"].reshape(d["experts"], d["N"]) if d["bias"] else None
    if d["combine"] == "sum":
        factors = x["factors"].reshape(ids.shape)
        total = reference.sum_experts(reference.linear_experts(inputs, weight, ids, bias), factors)
        return {"out": reference.add(x["residual"].reshape(total.shape), total) if d["residual"] else total}
    y = reference.linear_experts(np.repeat(inputs, d["used"], axis=1), weight, ids, bias)
    gated = {"silu_mul": reference.silu_mul, "swiglu_clamped": reference.swiglu_clamped}.get(d["combine"])
    return {"out": gated(y[..., 0::2], y[..., 1::2]) if gated else y}


def add_gated(d: Dims, x: Operands) -> dict[str, Array]:
    """What a shared expert gives, times the sigmoid of a dot product."""
    return {"out": reference.add_gated(x["a"], x["b"], x["x"], x["gate"])}


def add_rms_norm(d: Dims, x: Operands) -> dict[str, Array]:
    """The sum and its weighted norm."""
    total, out = reference.add_rms_norm(x["a"], x["b"], x["weight"], d["eps"])
    return {"sum": total, "out": out}


def rms_norm_add_rms_norm(d: Dims, x: Operands) -> dict[str, Array]:
    """The sum of one operand and the other's weighted norm, and the weighted norm of the sum."""
    total = reference.add(x["a"], reference.rms_norm_mul(x["b"], x["weight"], d["eps"]))
    return {"sum": total, "out": reference.rms_norm_mul(total, x["next_weight"], d["eps"])}


def rope(d: Dims, x: Operands) -> dict[str, Array]:
    """Heads rotated by the positions of their rows."""
    heads = _heads(x["x"], d["H"], d["D"])
    return {"out": reference.rope(heads, x["table"][_positions(x)], d["interleaved"])}


def kv_write(d: Dims, x: Operands) -> dict[str, Array]:
    """Keys and values into the pool."""
    k, v = (_heads(x[name], d["Hkv"], d["D"]) for name in "kv")
    reference.kv_write(k, v, x["k_cache"], x["v_cache"], x["batch"])
    return {}


def attention(d: Dims, x: Operands) -> dict[str, Array]:
    """Over the keys that each row sees."""
    q = _heads(x["q"], d["Hq"], d["D"])
    page_table = x["page_table"] if d["paged"] else None
    scores = reference.Scores(d["scale"], d["window"], d["softcap"], x["sinks"] if d["sinks"] else None)
    return {"out": reference.attention(q, x["k_cache"], x["v_cache"], x["batch"], page_table, scores)}


def _columns(d: Dims, x: Operands, name: str, heads: int) -> Array:
    """q, k or v, which may be columns of wider rows."""
    columns: Array = x[name].reshape(d["tokens"], -1)[:, d[f"{name}_first"] :][:, : heads * d["D"]]
    return columns


def rope_kv_write(d: Dims, x: Operands) -> dict[str, Array]:
    """q, k and v, columns of wider rows or not: rotated by the position of their row, k and v written at its slot."""
    table = x["table"][_positions(x)]
    part = {}
    for name, heads in (("q", d["Hq"]), ("k", d["Hkv"]), ("v", d["Hkv"])):
        part[name] = _heads(_columns(d, x, name, heads), heads, d["D"])
    turned = reference.rope(part["k"], table, d["interleaved"])
    reference.kv_write(turned, part["v"], x["k_cache"], x["v_cache"], x["batch"])
    return {"out": reference.rope(part["q"], table, d["interleaved"])}


def rms_norm_rope_kv_write(d: Dims, x: Operands) -> dict[str, Array]:
    """The same with every head of q and of k normalised before it is rotated."""
    normed: dict[str, Array] = {}
    for name, heads in (("q", d["Hq"]), ("k", d["Hkv"])):
        part = _heads(_columns(d, x, name, heads), heads, d["D"])
        normed[name] = reference.rms_norm_mul(part, x[f"{name}_norm"], d["eps"])
    return rope_kv_write({**d, "q_first": 0, "k_first": 0}, {**x, **normed})


def rms_norm_rope_attention(d: Dims, x: Operands) -> dict[str, Array]:
    """The same, and attention over what is in the caches then."""
    return attention(d, {**x, "q": rms_norm_rope_kv_write(d, x)["out"]})


def rms_norm_rope_attention_linear(d: Dims, x: Operands) -> dict[str, Array]:
    """The same, and the product with what it gives."""
    attended = rms_norm_rope_attention(d, x)["out"].reshape(d["tokens"], d["K"])
    return linear({**d, "prologue": "none"}, {**x, "x": attended})


def slice_columns(d: Dims, x: Operands) -> dict[str, Array]:
    """Some columns of every row."""
    return {"out": x["x"].reshape(d["tokens"], d["width"])[:, d["first"] : d["first"] + d["count"]]}


def embedding(d: Dims, x: Operands) -> dict[str, Array]:
    """The rows of a table that the batch names."""
    rows = reference.embedding(ids_of(x["batch"], x["tokens"]), x["weight"])
    return {"out": reference.mul(rows, d["factor"])}


def add_positions(d: Dims, x: Operands) -> dict[str, Array]:
    """Learned positions: each row gets the vector of its position."""
    rows = x["x"].reshape(d["tokens"], d["K"])
    return {"out": reference.add(rows, reference.embedding(_positions(x), x["weight"]))}


def sample(d: Dims, x: Operands) -> dict[str, Array]:
    """A token for every output; with `advance` its row becomes that of the next step."""
    counts = x["counts"] if d["counted"] else None
    sampling.sample(x["logits"], x["outputs"], x["batch"], x["tokens"], greedy=d["greedy"], counts=counts)
    if d["advance"]:
        sampling.advance(x["outputs"], x["batch"], x["page_table"] if d["paged"] else None)
    return {}


def adjust_logits(d: Dims, x: Operands) -> dict[str, Array]:
    """Penalties, biases and masks of every output; zeros in the rows that pad the shape."""
    there, out = slice(int(x["batch"][0, 1])), np.zeros_like(x["logits"])
    logits, outputs, records = (x[name][there] for name in ("logits", "outputs", "adjustments"))
    out[there] = sampling.adjust_logits(logits, outputs, records, x["counts"], x["biases"], x["masks"])
    return {"out": out}


def logprobs(d: Dims, x: Operands) -> dict[str, Array]:
    """Log-probabilities that the outputs want; zeros where they want none."""
    out = np.zeros((d["rows"], 1 + sampling.MAX_LOGPROBS, 2), np.uint32)
    there = slice(int(x["batch"][0, 1]))
    logits, outputs, records = (x[name][there] for name in ("logits", "outputs", "adjustments"))
    sampling.logprobs(logits, outputs, records, x["tokens"], out[there])
    return {"out": out}


def rms_norm(d: Dims, x: Operands) -> dict[str, Array]:
    """Without a weight."""
    return {"out": reference.rms_norm(x["x"], d["eps"])}


def rms_norm_mul(d: Dims, x: Operands) -> dict[str, Array]:
    """With one."""
    normed = reference.rms_norm_mul(x["x"], x["weight"], d["eps"])
    return {"out": reference.add(x["residual"].reshape(normed.shape), normed) if d["residual"] else normed}


def layer_norm(d: Dims, x: Operands) -> dict[str, Array]:
    """With a weight, and with a bias or not."""
    return {"out": reference.layer_norm(x["x"], x["weight"], x["bias"] if d["bias"] else None, d["eps"])}


def gelu(d: Dims, x: Operands) -> dict[str, Array]:
    """By the hyperbolic tangent."""
    return {"out": reference.gelu(x["x"])}


def relu_squared(d: Dims, x: Operands) -> dict[str, Array]:
    """Negative values become 0, others their square."""
    return {"out": reference.relu_squared(x["x"])}


def gelu_erf(d: Dims, x: Operands) -> dict[str, Array]:
    """By the error function."""
    return {"out": reference.gelu_erf(x["x"])}


def scale(d: Dims, x: Operands) -> dict[str, Array]:
    """Times a constant."""
    return {"out": reference.mul(x["x"], d["factor"])}


def softcap(d: Dims, x: Operands) -> dict[str, Array]:
    """Between −cap and cap."""
    return {"out": reference.softcap(x["x"], d["cap"])}


def linear_q4gsw(d: Dims, x: Operands) -> dict[str, Array]:
    """The weight is given as whole numbers [N, K], nibble − 8."""
    scales = np.repeat(x["scales"], d["group_size"], axis=0)[: d["K"]].T
    return {"out": reference.linear(x["x"], x["weight"] * scales, x.get("bias"))}


def pairwise(formula: Callable[[Any, Any], Array]) -> Compute:
    """Of a and b, value by value; b repeats."""
    return lambda d, x: {"out": formula(x["a"], x["b"])}


def take_rows(d: Dims, x: Operands) -> dict[str, Array]:
    """The rows of the step that give outputs."""
    return {"out": x["x"][x["outputs"].view(sampling.OUTPUT).reshape(-1)["row"]]}


def copy(d: Dims, x: Operands) -> dict[str, Array]:
    """x as it is."""
    return {"out": x["x"]}


def fma_chain(d: Dims, x: Operands) -> dict[str, Array]:
    """8 · rounds times 0.75 v + 0.25."""
    out = x["x"]
    for _ in range(8 * d["rounds"]):
        out = out * out.dtype.type(0.75) + out.dtype.type(0.25)
    return {"out": out}


def matrix_chain(d: Dims, x: Operands) -> dict[str, Array]:
    """rounds times the same product of matrices, added up; equal for each of count."""
    product = d["rounds"] * (x["x"][: d["rows"]] @ x["x"][d["rows"] :].T)
    return {"out": np.repeat(product[None], d["count"], 0)}


def argmax(d: Dims, x: Operands) -> dict[str, Array]:
    """The index of the largest value of each row."""
    return {"out": np.asarray(reference.argmax(x["x"]))}
