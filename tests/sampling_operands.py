"""Operands of the ops of sampling, random, and the results that they must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.graph import formulas, sampling
from shaderlm.graph.batch import NONE, PAGE, make_batch
from shaderlm.graph.sampling import BIAS, MAX_LOGPROBS, OUTPUT, RECENT

SETTINGS = ("temperature", "top_k", "top_p", "min_p")
Arrays = dict[str, NDArray[Any] | None]


def _sample(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Every row has other settings. Its u is in the middle of a likely token, where rounding cannot matter."""
    rows, width, tokens = d["rows"], d["width"], d["tokens"]
    there = rows - rows // 4  # outputs that a step really has
    logits = np.round(rng.standard_normal((rows, width)) * 4, 1).astype(np.float32)  # ties
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[:, width // 2] = 8  # one at least
    outputs = np.zeros(rows, OUTPUT)
    outputs["row"], outputs["slot"] = rng.permutation(tokens)[:rows], rng.permutation(d["slots"])[:rows]
    table = rng.integers(0, 1000, d["pages"]).astype(np.uint32)
    pages = rng.integers(0, max(1, d["pages"] - 8), tokens)
    positions = rng.integers(0, 1000, tokens)
    table[pages[0] + (positions[0] + 1) // PAGE if d["pages"] > 8 else 0] = NONE
    batch = make_batch(positions, positions, pages, rng.integers(0, width, tokens), outputs=there)
    for r, given in enumerate(outputs):
        on = (7, 1, 2, 4, 0)[(r + width) % 5]
        given["temperature"], given["top_k"] = rng.uniform(0.5, 2), 40 if on & 1 else 0
        given["top_p"], given["min_p"] = 0.9 if on & 2 else 1.0, 0.01 if on & 4 else 0.0
        weights = sampling.kept_weights(logits[r], *(given[name].item() for name in SETTINGS))
        running = np.cumsum(weights) / weights.sum()
        token = rng.choice(np.flatnonzero(weights >= min(weights.max(), 1e-3)))
        low, high = running[token] - weights[token] / weights.sum(), running[token]
        seeds = rng.integers(0, 1 << 64, 1 << 16, np.uint64)
        away = np.abs(sampling.uniforms(seeds, positions[given["row"]]) - (low + high) / 2)
        seed = int(seeds[away.argmin()])
        given["seed_low"], given["seed_high"] = seed & 0xFFFFFFFF, seed >> 32
    given_tokens = rng.integers(0, width, d["slots"]).astype(np.uint32)
    counts = rng.integers(0, 3, (d["slots"], width)).astype(np.uint32)
    operands: Arrays = {"logits": logits, "outputs": outputs, "batch": batch, "tokens": given_tokens}
    after = {"tokens": given_tokens.copy(), "batch": batch.copy()}
    if d["counted"]:
        operands["counts"], after["counts"] = counts, counts.copy()
    if d["advance"] and d["paged"]:
        operands["page_table"] = table
    sampling.sample(logits, outputs, batch, after["tokens"], greedy=d["greedy"], counts=after.get("counts"))
    if d["advance"]:
        sampling.advance(outputs, after["batch"], table if d["paged"] else None)
    return operands, {**after}


def _outputs(rng: np.random.Generator, d: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Logits, outputs and the batch; a quarter of the rows pads the shape."""
    outputs = np.zeros(d["rows"], OUTPUT)
    outputs["slot"] = rng.permutation(d["slots"])[: d["rows"]]
    positions = np.arange(d["tokens"])
    batch = make_batch(positions, positions, outputs=d["rows"] - d["rows"] // 4)
    logits = rng.standard_normal((d["rows"], d["width"])).astype(np.float32) * 5
    return {"logits": logits, "outputs": outputs, "batch": batch}


def _adjust_logits(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Every row has other adjustments, the first one all of them."""
    rows, width = d["rows"], d["width"]
    x = _outputs(rng, d)
    x["logits"][rng.random((rows, width)) < 0.05] = -np.inf
    counts = rng.integers(0, 4, (d["slots"], width)) * (rng.random((d["slots"], width)) < 0.3)
    biases = np.zeros(d["biases"], BIAS)
    biases["token"], biases["bias"] = rng.permutation(width)[: d["biases"]], rng.uniform(-9, 9, d["biases"])
    biases["bias"][::5] = -np.inf
    recent = np.arange(d["biases"]) % 4 == 1
    biases["token"][recent] |= np.uint32(RECENT)
    biases["bias"][recent] = rng.integers(1, 4, recent.sum())
    masks = rng.integers(0, 1 << 32, (d["masks"], -(-width // 32)), np.uint32)
    records = sampling.adjustments(rows)
    for r, given in enumerate(records):
        on = 15 if r == 0 else rng.integers(16)
        given["repetition"] = rng.uniform(0.5, 2) if on & 1 else 1
        given["presence"], given["frequency"] = rng.uniform(-1, 1, 2) if on & 2 else (0, 0)
        if on & 4:
            given["bias_first"] = rng.integers(d["biases"])
            given["bias_count"] = rng.integers(d["biases"] - given["bias_first"]) + 1
        given["mask"] = rng.integers(d["masks"]) if on & 8 else NONE
        given["history"] = rng.integers(d["slots"])
    del x["outputs"]
    x |= {"adjustments": records, "counts": counts.astype(np.uint32), "biases": biases, "masks": masks}
    return {**x}, {**formulas.adjust_logits(d, x)}


def numbers(words: NDArray[Any], rows: int) -> NDArray[np.float64]:
    """The results of logprobs as numbers: [rows, 1 + 20, 2] of a token and its log-probability."""
    pairs = words.reshape(-1).view(np.uint32)[: rows * 2 * (1 + MAX_LOGPROBS)].reshape(rows, -1, 2)
    return np.stack([pairs[..., 0], np.ascontiguousarray(pairs[..., 1]).view(np.float32)], axis=-1).astype(np.float64)


def _logprobs(rng: np.random.Generator, d: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """From nothing to 20 of the most likely tokens; whole numbers, so that there are ties."""
    x = _outputs(rng, d)
    np.round(x["logits"], out=x["logits"])
    records = sampling.adjustments(d["rows"])
    records["logprobs"] = [(MAX_LOGPROBS, NONE, 0, 1, 7)[r % 5] for r in range(d["rows"])]
    tokens = rng.integers(0, d["width"], d["slots"]).astype(np.uint32)
    x |= {"adjustments": records, "tokens": tokens}
    return {**x}, {"out": numbers(formulas.logprobs(d, x)["out"], d["rows"])}


MAKERS: dict[str, Callable[..., tuple[Arrays, Arrays]]] = {
    "sample": _sample,
    "adjust_logits": _adjust_logits,
    "logprobs": _logprobs,
}
