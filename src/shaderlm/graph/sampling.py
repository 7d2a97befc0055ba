"""Sampling in NumPy: what the kernels are compared with, and how a host that has the logits draws a token.

A row of logits is sampled by a record of `OUTPUT`. Its random number depends on the seed and the position alone, so
that neither the rest of the batch nor the step that a row runs in changes what is drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import LAST, NONE, PAGE, RUN

F64 = NDArray[np.float64]

# Which row of the batch gives a row of logits, which sequence slot gets the token, and how it is sampled.
OUTPUT = np.dtype(
    [
        ("row", "u4"),
        ("slot", "u4"),
        ("temperature", "f4"),  # 0: the largest logit
        ("top_k", "u4"),  # keep the k largest; 0: all
        ("top_p", "f4"),  # keep the largest whose probabilities reach p; 1: all
        ("min_p", "f4"),  # keep what has at least this part of the largest probability; 0: all
        ("seed_low", "u4"),
        ("seed_high", "u4"),
    ]
)

_STREAM = 0x73616D70  # as in uniform.wgsl


def uniforms(seeds: Any, positions: Any) -> F64:
    """A number in (0, 1) for each pair of a seed (taken modulo 2^64) and a position.

    pcg4d (Jarzynski and Olano, "Hash Functions for GPU Rendering", 2020) of the seed's two words, the position and a
    constant. An odd multiple of 2^−24: exact in float32 and never 0, which would draw a first token however unlikely.
    """
    seeds, positions = np.broadcast_arrays(np.asarray(seeds, np.uint64), np.asarray(positions, np.uint32))
    words = [seeds & 0xFFFFFFFF, seeds >> np.uint64(32), positions, np.full_like(positions, _STREAM)]
    with np.errstate(over="ignore"):
        x, y, z, w = (word.astype(np.uint32) * np.uint32(1664525) + np.uint32(1013904223) for word in words)
        for again in (True, False):
            x = x + y * w
            y = y + z * x
            z = z + x * y
            w = w + y * z
            if again:
                x, y, z, w = (word ^ (word >> np.uint32(16)) for word in (x, y, z, w))
    return np.asarray(((x >> np.uint32(9)) + 0.5) * 2.0**-23)


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) that depends on the seed and the position alone."""
    return float(uniforms(seed % (1 << 64), position))


def ordered(logits: Any) -> F64:
    """Values that have an order, in float64: NaN counts as −inf and is never drawn."""
    with np.errstate(invalid="ignore"):  # NaN of any kind
        x = np.asarray(logits, np.float64)
    return np.asarray(np.where(np.isnan(x), -np.inf, x))


def finite(logits: Any) -> F64:
    """Values to compute with: NaN is as −inf, +inf as the highest f32."""
    return np.asarray(np.minimum(ordered(logits), np.finfo(np.float32).max))


def argmax(x: Any) -> NDArray[np.int64]:
    """Index of the largest value of the last axis, the lowest of equals. NaN counts as −inf."""
    x = np.asarray(x)
    first = np.asarray(np.argmax(x, axis=-1))
    if np.isnan(np.take_along_axis(x, first[..., None], -1)).any():  # NumPy takes NaN for the largest
        return np.asarray(np.argmax(ordered(x), axis=-1))
    return first


def kept_weights(logits: Any, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> F64:
    """[width] → [width]: probabilities of the tokens that the filters keep, relative to the largest; 0 elsewhere.

    Every filter is a threshold, so equals stay together: the top_k-th largest logit; where the largest
    probabilities reach top_p of what top_k left; min_p of the largest probability.
    """
    x, values = ordered(logits), finite(logits)
    top = values.max()
    if top == -np.inf:
        return np.zeros_like(x)
    temperature = max(temperature, 1e-30)  # a smaller one could not be told from 0 in f32
    weights = np.exp((values - top) / temperature)
    if 0 < top_k < x.size:
        weights[x < np.partition(x, -top_k)[-top_k]] = 0
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        reached = np.cumsum(weights[order])
        last = min(int(np.searchsorted(reached, top_p * reached[-1])), x.size - 1)
        weights[x < x[order[last]]] = 0
    if min_p > 0:
        weights[values < top + temperature * np.log(min_p)] = 0
    return np.asarray(weights)


def draw(logits: Any, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """The token of a row of logits for a number u in [0, 1). Draws in order of index; 0 if no token can be drawn."""
    if temperature == 0:
        return int(argmax(logits))
    weights = kept_weights(logits, temperature, top_k, top_p, min_p)
    running = np.cumsum(weights)
    index = int(np.searchsorted(running, u * running[-1], side="right"))
    possible = np.flatnonzero(weights)
    return int(min(index, possible[-1])) if possible.size else 0


def sample(logits: Any, outputs: Any, batch: Any, tokens: Any, *, greedy: bool = False, counts: Any = None) -> None:
    """[R, width], R records of OUTPUT: the token of each output goes to tokens[its slot], in place, and is counted.

    batch[0, 1] says how many of the R rows there are.
    """
    for x, output in zip(logits[: int(batch[0, 1])], outputs.view(OUTPUT).reshape(-1), strict=False):
        slot = output["slot"]
        if greedy or output["temperature"] == 0:
            tokens[slot] = argmax(x)
        else:
            seed = int(output["seed_high"]) << 32 | int(output["seed_low"])
            u = uniform(seed, int(batch[1 + output["row"], 1]))
            temperature, top_k, top_p, min_p = (output[n].item() for n in ("temperature", "top_k", "top_p", "min_p"))
            tokens[slot] = draw(x, temperature, top_k, top_p, min_p, u)
        if counts is not None:
            counts[slot, tokens[slot]] += 1


def advance(outputs: Any, batch: Any, page_table: Any = None) -> None:
    """The rows of the batch that gave a token become those of the next decode step, in place.

    Without a page table a sequence is in the rows of the pool from 0 on.
    """
    for output in outputs.view(OUTPUT).reshape(-1)[: int(batch[0, 1])]:
        _, position, _, pages = (int(word) for word in batch[1 + output["row"]])
        pages, position = pages & ~RUN, position + 1
        place = position
        if page_table is not None:
            page = int(page_table[min(pages + position // PAGE, len(page_table) - 1)])
            place = NONE if page == NONE else page * PAGE + position % PAGE
        batch[1 + output["row"]] = (LAST | int(output["slot"]), position, place, pages)


# What is done with a row of logits beside sampling -------------------------------------------------------------

MAX_LOGPROBS = 20
# Penalties need counts[history, token]. Biases are `bias_count` pairs of `BIAS` from `bias_first` on. A pair whose
# token has the bit RECENT is none: it says how often the token came beside what counts have.
ADJUSTMENT = np.dtype(
    [
        ("repetition", "f4"),  # 1: off
        ("presence", "f4"),  # 0: off
        ("frequency", "f4"),  # 0: off
        ("bias_first", "u4"),
        ("bias_count", "u4"),
        ("mask", "u4"),  # row of masks, NONE: off. A mask has a bit per token, the lowest first; 1: allowed
        ("logprobs", "u4"),  # how many of the most likely tokens to report, NONE: not even the chosen one's
        ("history", "u4"),  # row of counts: the slot of its sequence
    ]
)
BIAS = np.dtype([("token", "u4"), ("bias", "f4")])
RECENT = 0x8000_0000


def adjustments(rows: int) -> NDArray[Any]:
    """Records that change nothing and report nothing."""
    records = np.zeros(rows, ADJUSTMENT)
    records["repetition"], records["mask"], records["logprobs"] = 1, NONE, NONE
    return records


def penalised(x: Any, counts: Any, repetition: float, presence: float, frequency: float) -> F64:
    """Logits of tokens that are in a sequence so many times.

    Repetition divides positive logits and multiplies negative ones, presence subtracts once per token, frequency once
    per occurrence.
    """
    x = np.asarray(x, np.float64)
    x = np.where(x > 0, x / repetition, x * repetition)
    return np.asarray(x - presence - frequency * np.asarray(counts, np.float64))


def adjust_logits(logits: Any, records: Any, counts: Any, biases: Any, masks: Any) -> NDArray[np.float32]:
    """[R, width] → the same after penalties, biases and masks. counts: [slots, width], masks: rows of words."""
    out = np.array(logits, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for x, record in zip(out, np.asarray(records).view(ADJUSTMENT).reshape(-1), strict=True):
            pairs = np.asarray(biases).view(BIAS).reshape(-1)[record["bias_first"] :][: record["bias_count"]]
            recent = pairs["token"] >= RECENT
            if (record["repetition"], record["presence"], record["frequency"]) != (1, 0, 0):
                often = counts[record["history"]].copy()
                often[pairs["token"][recent] ^ RECENT] += pairs["bias"][recent].astype(often.dtype)
                there = np.flatnonzero(often)
                penalties = (record[name].item() for name in ("repetition", "presence", "frequency"))
                x[there] = penalised(x[there], often[there], *penalties)
            for token, bias in pairs[~recent]:
                x[token] = bias if np.isinf(bias) else x[token] + bias
            if record["mask"] != NONE:
                bits = np.unpackbits(np.asarray(masks)[record["mask"]].view(np.uint8), bitorder="little")
                x[bits[: x.size] == 0] = -np.inf
    return out


def log_softmax(logits: Any) -> F64:
    """[width] → [width]. −inf throughout where there is no other logit."""
    x = finite(logits)
    if x.max() == -np.inf:
        return x
    x = x - x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


def most_likely(logits: Any, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest of [width], best first, the lowest of equals first."""
    x = finite(logits)
    count = min(count, x.size)
    if count == 0:
        return np.zeros(0, np.int64)
    candidates = np.flatnonzero(x >= np.partition(x, -count)[-count])
    return np.asarray(candidates[np.argsort(-x[candidates], kind="stable")][:count])


def logprobs(logits: Any, outputs: Any, records: Any, tokens: Any, out: Any) -> None:
    """out[r, 0] = (token of output r, its log-probability), then the most likely ones, in place: [R, 1 + 20, 2] words.

    What a row does not want stays as it is.
    """
    slots = np.asarray(outputs).view(OUTPUT).reshape(-1)["slot"]
    for x, slot, record, row in zip(logits, slots, np.asarray(records).view(ADJUSTMENT).reshape(-1), out, strict=True):
        if record["logprobs"] != NONE:
            values, count = log_softmax(x), min(int(record["logprobs"]), MAX_LOGPROBS)
            ids = np.concatenate([tokens[slot : slot + 1], most_likely(x, count)])
            row[: len(ids), 0] = ids
            row[: len(ids), 1] = values[ids].astype(np.float32).view(np.uint32)
