"""What each op computes, in NumPy: from its dims and operands by name to its outputs by name.

A state (the cache, the tokens of a sampler) is changed in place and is no output. Weights are dense arrays. Each row
of `primitives` has one of these; arithmetic that takes more than a line is in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import reference, sampling, vision
from .batch import FEATURE, IMAGE_WORDS, REACH, ids_of

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
    """Rows times the rows of a matrix."""
    return {"out": reference.linear(x["x"].reshape(d["tokens"], d["K"]), x["weight"], x.get("bias"))}


def route_experts(d: Dims, x: Operands) -> dict[str, Array]:
    """The experts of each row, and what their results count."""
    bias = x["bias"] if d["bias"] else None
    how = (d["used"], d["gating"], d["normalise"], d["scale"])
    logits = x["logits"].reshape(d["tokens"], -1)
    ids, factors = reference.route_experts(logits[:, : d["experts"]], bias, *how)
    if d["scaled"]:
        factors = reference.mul(factors, x["expert_scale"][ids])
    if d["shared"]:
        ids = np.insert(ids, d["used"], d["experts"], axis=1)
        factors = np.insert(factors, d["used"], reference.sigmoid_mul(logits[:, -1], 1.0), axis=1)
    return {"ids": ids, "factors": factors}


def linear_experts(d: Dims, x: Operands) -> dict[str, Array]:
    """The products of each row with the matrices of its experts, side by side or summed."""
    weight = x["weight"].reshape(d["experts"], d["N"], d["K"])
    inputs = x["x"].reshape(d["tokens"], -1, d["K"])
    ids = x["ids"].reshape(d["tokens"], d["used"])
    bias = x["bias"].reshape(d["experts"], d["N"]) if d["bias"] else None
    if d["combine"] == "sum":
        y = reference.linear_experts(inputs, weight, ids, bias)
        return {"out": reference.sum_experts(y, x["factors"].reshape(ids.shape))}
    return {"out": reference.linear_experts(np.repeat(inputs, d["used"], axis=1), weight, ids, bias)}


def add_gated(d: Dims, x: Operands) -> dict[str, Array]:
    """What a shared expert gives, times the sigmoid of a dot product."""
    return {"out": reference.add_gated(x["a"], x["b"], x["x"], x["gate"])}


def rope(d: Dims, x: Operands) -> dict[str, Array]:
    """Heads rotated by the positions of their rows."""
    heads = _heads(x["x"], d["H"], d["D"])
    return {"out": reference.rope(heads, x["table"][_positions(x)], d["interleaved"])}


def rope_by_row(d: Dims, x: Operands) -> dict[str, Array]:
    """Heads rotated by a table that has a row for each row of the step."""
    heads = _heads(x["x"], d["H"], d["D"])
    return {"out": reference.rope(heads, x["table"].reshape(len(heads), -1, 2), d["interleaved"])}


def rope_rows(d: Dims, x: Operands) -> dict[str, Array]:
    """For each row of the step its angles: each pair takes them from the row of the position on its axis."""
    rows = x["image_rows"].reshape(-1, IMAGE_WORDS)[: d["tokens"], :3].view(np.int32)
    axes = vision.axes(d["rotary"] // 2, (d["temporal"], d["vertical"], d["horizontal"]), grouped=d["grouped"])
    places = np.maximum(_positions(x).astype(np.int64)[:, None] + rows, 0)
    return {"out": x["table"][places[:, axes], np.arange(d["rotary"] // 2)]}


def put_features(d: Dims, x: Operands) -> dict[str, Array]:
    """The features of images in the rows that have some, in place of what is there or added to it."""
    out = np.array(x["x"].reshape(d["tokens"], d["K"]))
    numbers = x["image_rows"].reshape(-1, IMAGE_WORDS)[: d["tokens"], FEATURE]
    there = np.flatnonzero(numbers)
    features = x["features"].reshape(-1, d["levels"], d["K"])[numbers[there] - 1, d["level"]]
    out[there] = out[there] + features if d["add"] else features
    return {"out": out}


def clamp(d: Dims, x: Operands) -> dict[str, Array]:
    """Values between two bounds."""
    return {"out": np.minimum(np.maximum(x["x"], x["low"]), x["high"])}


def resize(d: Dims, x: Operands) -> dict[str, Array]:
    """One axis of a picture."""
    pixels = x["x"].reshape(d["outer"], d["size"], d["inner"])
    return {"out": vision.resize(pixels, x["first"], x["weights"].reshape(d["to"], d["taps"]))}


def concat(d: Dims, x: Operands) -> dict[str, Array]:
    """One after the other."""
    return {"out": np.concatenate([x["a"].reshape(-1), x["b"].reshape(-1)])}


def patches(d: Dims, x: Operands) -> dict[str, Array]:
    """Patches of pictures, channel by channel."""
    rows = vision.patches(x["x"].reshape(-1), x["corners"].reshape(-1, 2), x["factors"], d["patch"])
    return {"out": vision.pad_columns(rows, d["width"])}


def weighted_rows(d: Dims, x: Operands) -> dict[str, Array]:
    """Sums of rows of a table."""
    shape = (d["tokens"], d["taps"])
    table = x["weight"].reshape(d["N"], d["K"])
    return {"out": vision.weighted_rows(table, x["rows"].reshape(shape), x["factors"].reshape(shape))}


def attend_spans(d: Dims, x: Operands) -> dict[str, Array]:
    """Over the rows of a span, in both directions."""
    q, k, v = (x[name].reshape(d["tokens"], d["H"], d["D"]) for name in "qkv")
    return {"out": vision.attend_spans(q, k, v, x["spans"].reshape(-1, 2), d["scale"])}


def pad_columns(d: Dims, x: Operands) -> dict[str, Array]:
    """Wider rows."""
    return {"out": vision.pad_columns(x["x"].reshape(d["tokens"], d["width"]), d["to"])}


def mean_rows(d: Dims, x: Operands) -> dict[str, Array]:
    """Of so many rows, one."""
    return {"out": x["x"].reshape(d["tokens"], d["group"], d["width"]).mean(axis=1)}


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


def attention_reach(d: Dims, x: Operands) -> dict[str, Array]:
    """The same, where rows of an image see all of it."""
    q = _heads(x["q"], d["Hq"], d["D"])
    page_table = x["page_table"] if d["paged"] else None
    scores = reference.Scores(d["scale"], d["window"], d["softcap"])
    reach = x["image_rows"].reshape(-1, IMAGE_WORDS)[:, REACH]
    return {"out": reference.attention(q, x["k_cache"], x["v_cache"], x["batch"], page_table, scores, reach)}


def short_conv(d: Dims, x: Operands) -> dict[str, Array]:
    """Over the last rows of each sequence, those of earlier steps from its state."""
    rows, weight = x["x"].reshape(d["tokens"], d["width"]), x["weight"].reshape(d["width"], d["kernel"])
    return {"out": reference.short_conv(rows, weight, x["batch"], x["page_table"], x["state"], silu=d["silu"])}


def gated_delta_rule(d: Dims, x: Operands) -> dict[str, Array]:
    """Row by row, with the state of each sequence."""
    sizes = reference.DeltaSizes(*(d[name] for name in ("Hk", "Hv", "Dk", "Dv", "grouped")))
    rows = x["x"].reshape(d["tokens"], -1)
    alpha, beta = (x[name].reshape(d["tokens"], d["Hv"]) for name in ("alpha", "beta"))
    rate, shift = x["decay"].reshape(2, d["Hv"])
    decay = np.exp(reference.mul(rate, reference.softplus(reference.add(alpha, shift))))
    learned = reference.sigmoid_mul(beta, 1.0)
    return {"out": reference.gated_delta_rule(rows, decay, learned, x["batch"], x["page_table"], x["state"], sizes)}


def mamba2_scan(d: Dims, x: Operands) -> dict[str, Array]:
    """Row by row, with the state of each sequence."""
    sizes = reference.ScanSizes(*(d[name] for name in "HPNG"))
    rate, shift, skip = x["factors"].reshape(3, d["H"])
    dt = reference.softplus(reference.add(x["deltas"].reshape(d["tokens"], d["H"]), shift))
    dt = np.clip(dt, d["dt_min"], d["dt_max"] or None)
    decay = np.exp(reference.mul(rate, dt))
    rows = reference.silu_mul(reference.add(x["x"].reshape(d["tokens"], -1), x["bias"]), 1.0)
    return {"out": reference.mamba2_scan(rows, dt, decay, skip, x["batch"], x["page_table"], x["state"], sizes)}


def slice_columns(d: Dims, x: Operands) -> dict[str, Array]:
    """Some columns of every row."""
    end = d["first"] + d["step"] * d["count"]
    return {"out": x["x"].reshape(d["tokens"], d["width"])[:, d["first"] : end : d["step"]]}


def embedding(d: Dims, x: Operands) -> dict[str, Array]:
    """The rows of a table that the batch names."""
    return {"out": reference.embedding(ids_of(x["batch"], x["tokens"]), x["weight"])}


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
    logits, records = x["logits"][there], x["adjustments"][there]
    out[there] = sampling.adjust_logits(logits, records, x["counts"], x["biases"], x["masks"])
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
    return {"out": reference.rms_norm(x["x"].reshape(d["tokens"], d["heads"], d["width"]), d["eps"])}


def layer_norm(d: Dims, x: Operands) -> dict[str, Array]:
    """With a weight, and with a bias or not."""
    rows = x["x"].reshape(-1, d["width"])
    return {"out": reference.layer_norm(rows, x["weight"], x["bias"] if d["bias"] else None, d["eps"])}


def unary(formula: Callable[..., Array], *names: str) -> Compute:
    """Of x alone, with dims by these names as further arguments."""

    def compute(d: Dims, x: Operands) -> dict[str, Array]:
        return {"out": formula(x["x"], *(d[name] for name in names))}

    return compute


def linear_q4gsw(d: Dims, x: Operands) -> dict[str, Array]:
    """The weight is given as whole numbers [N, K], nibble − 8."""
    scales = np.repeat(x["scales"], d["group_size"], axis=0)[: d["K"]].T
    return {"out": reference.linear(x["x"], x["weight"] * scales, x.get("bias"))}


def pairwise(formula: Callable[[Any, Any], Array]) -> Compute:
    """Of a and b, value by value; b repeats after `period` values."""

    def compute(d: Dims, x: Operands) -> dict[str, Array]:
        a, b = (x[name].reshape(-1, d["period"]) for name in "ab")
        return {"out": formula(a, b).reshape(x["a"].shape)}

    return compute


def take_rows(d: Dims, x: Operands) -> dict[str, Array]:
    """The rows of the step that give outputs."""
    return {"out": x["x"][x["outputs"].view(sampling.OUTPUT).reshape(-1)["row"]]}


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
