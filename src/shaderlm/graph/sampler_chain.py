"""Samplers in an order that a request names, in NumPy: for rows whose tokens the host draws.

A sampler takes the candidates that those before it left, with their logits, and leaves fewer of them, or other logits.
Names, formulas and defaults are llama.cpp's. Filters are thresholds, as on the device: equals stay together.

The first filters have the whole vocabulary, while all sequences of the step wait: logits stay f32 until a sampler
changes them, weights are f32, sums are f64, and no filter sorts everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .sampling import penalised, uniform

F64 = NDArray[np.float64]
Logits = NDArray[np.floating[Any]]

_BINS = 4096
_SPAN = 128.0  # of logits: what is further below the largest one has no weight

_XTC_STREAM = 0x78746378746378  # changes the seed: whether XTC acts does not depend on which token is drawn


class ChainSettings(NamedTuple):
    """Which samplers act, in their order, and by which numbers. `mirostat_tau`: the token is drawn by Mirostat 2."""

    order: tuple[str, ...]
    seed: int = 0
    temperature: float = 1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    mirostat_tau: float | None = None
    mirostat_eta: float = 0.1


class ChainRow(NamedTuple):
    """What a row of logits comes from: the position of its token, and what samplers read of the tokens so far."""

    position: int = 0
    counts: NDArray[np.uint32] | None = None  # [width]: how often each token is there; for penalties
    dry: Mapping[int, float] = {}  # what DRY subtracts, by token
    mu: float = math.inf  # Mirostat's largest surprise, in bits


class Candidates(NamedTuple):
    """Tokens that may still be drawn, in the order of their ids, and their logits, which are finite."""

    ids: NDArray[np.int64]
    logits: Logits

    def keep(self, mask: NDArray[np.bool_]) -> Candidates:
        """Those of the mask."""
        return Candidates(self.ids[mask], self.logits[mask])


def probabilities(logits: Logits) -> F64:
    """Softmax."""
    weights = np.exp((logits - logits.max()).astype(np.float32))
    return np.asarray(weights / weights.sum(dtype=np.float64))


def entropy(probs: F64) -> float:
    """In nats."""
    some = probs[probs > 0]
    return float(-(some * np.log(some)).sum())


def _threshold(keys: Logits, probs: F64, goal: float, side: Literal["left", "right"]) -> float:
    """The key with which the probabilities of the largest keys reach a goal; "right": exceed it."""
    high = float(keys.max())
    # Of the bins, the first are those of the largest keys. Only the one in which the goal is reached is sorted.
    scale = (_BINS - 1) / max(min(high - float(keys.min()), _SPAN), 1e-30)
    bins = np.minimum((high - keys) * scale, _BINS - 1).astype(np.int64)
    reached = np.cumsum(np.bincount(bins, probs, _BINS))
    place = min(int(np.searchsorted(reached, goal, side)), int(bins.max()))
    places = np.flatnonzero(bins == place)
    order = places[np.argsort(-keys[places], kind="stable")]
    below = reached[place] - float(probs[order].sum())
    inside = below + np.cumsum(probs[order])
    return float(keys[order[min(int(np.searchsorted(inside, goal, side)), len(order) - 1)]])


def _penalties(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    assert row.counts is not None
    counts, logits = row.counts[found.ids], found.logits.astype(np.float64)
    there = counts > 0
    penalties = (how.repetition_penalty, how.presence_penalty, how.frequency_penalty)
    logits[there] = penalised(logits[there], counts[there], *penalties)
    return Candidates(found.ids, logits)


def _dry(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    tokens = np.fromiter(row.dry, np.int64, len(row.dry))
    penalties = np.fromiter(row.dry.values(), np.float64, len(row.dry))
    places = np.minimum(np.searchsorted(found.ids, tokens), len(found.ids) - 1)
    there, logits = found.ids[places] == tokens, found.logits.astype(np.float64)
    logits[places[there]] -= penalties[there]
    return Candidates(found.ids, logits)


def _top_k(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    if not 0 < how.top_k < len(found.ids):
        return found
    return found.keep(found.logits >= np.partition(found.logits, -how.top_k)[-how.top_k])


def _top_p(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    return found.keep(found.logits >= _threshold(found.logits, probabilities(found.logits), how.top_p, "left"))


def _min_p(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    return found.keep(found.logits >= float(found.logits.max()) + math.log(how.min_p))


def _typical_p(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    """Those whose surprise is nearest to the entropy, until their probabilities exceed p."""
    probs = probabilities(found.logits)
    top = found.logits.argmax()
    surprises = float(found.logits[top]) - found.logits.astype(np.float64) - math.log(probs[top])
    nearness = -np.abs(surprises - entropy(probs))
    return found.keep(nearness >= _threshold(nearness, probs, how.typical_p, "right"))


def _top_n_sigma(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    sigma = float(found.logits.std(dtype=np.float64))
    return found.keep(found.logits >= float(found.logits.max()) - how.top_n_sigma * sigma)


def _xtc(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    """With its probability: of the tokens that reach the threshold, the least likely one alone stays."""
    if uniform(how.seed ^ _XTC_STREAM, row.position) > how.xtc_probability:
        return found
    likely = found.logits[probabilities(found.logits) >= how.xtc_threshold]
    return found if len(likely) < 2 else found.keep(found.logits <= likely.min())


def _temperature(found: Candidates, how: ChainSettings, row: ChainRow) -> Candidates:
    """Divides by the temperature; with a range, by one within it that grows with the entropy. 0: the largest alone."""
    temperature = how.temperature
    if how.dynatemp_range > 0 and len(found.ids) > 1:
        low, high = max(0.0, temperature - how.dynatemp_range), temperature + how.dynatemp_range
        share = entropy(probabilities(found.logits)) / math.log(len(found.ids))
        temperature = low + (high - low) * share**how.dynatemp_exponent
    if temperature == 0:
        first = int(found.logits.argmax())
        return Candidates(found.ids[first : first + 1], found.logits[first : first + 1])
    return Candidates(found.ids, found.logits.astype(np.float64) / max(temperature, 1e-30))


def _mirostat(found: Candidates, mu: float) -> Candidates:
    """Those that surprise by `mu` bits at most; the largest ones at least."""
    with np.errstate(divide="ignore"):
        surprises = -np.log2(probabilities(found.logits))
    return found.keep(surprises <= max(mu, float(surprises.min())))


SAMPLERS: Mapping[str, Callable[[Candidates, ChainSettings, ChainRow], Candidates]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": _typical_p,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
}  # in llama.cpp's order


def candidates(logits: NDArray[np.float32], how: ChainSettings, row: ChainRow) -> Candidates:
    """[width] → the tokens that the samplers leave. −inf and NaN are no candidates."""
    ids = np.flatnonzero(logits > -np.inf)
    found = Candidates(ids, np.minimum(logits[ids] if len(ids) < len(logits) else logits, np.finfo(np.float32).max))
    for name in how.order:
        if len(found.ids) > 1:
            found = SAMPLERS[name](found, how, row)
    return found if how.mirostat_tau is None or not len(found.ids) else _mirostat(found, row.mu)


def draw_token(logits: NDArray[np.float32], how: ChainSettings, row: ChainRow) -> tuple[int, float]:
    """The token of a row of logits, and how much it surprises among those that are left, in bits.

    Draws in the order of ids by the number of seed and position, as the device does; 0 if no token can be drawn.
    """
    found = candidates(logits, how, row)
    if not len(found.ids):
        return 0, 0.0
    probs = probabilities(found.logits)
    reached = np.cumsum(probs)
    place = int(np.searchsorted(reached, uniform(how.seed, row.position) * reached[-1], side="right"))
    return int(found.ids[place]), -math.log2(probs[place])


def remaining_logprobs(logits: NDArray[np.float32], how: ChainSettings, row: ChainRow) -> F64:
    """[width] → log probabilities among the tokens that the samplers leave; −inf elsewhere."""
    found, values = candidates(logits, how, row), np.full(len(logits), -np.inf)
    if len(found.ids):
        with np.errstate(divide="ignore"):
            values[found.ids] = np.log(probabilities(found.logits))
    return values


def next_mu(mu: float, surprise: float, how: ChainSettings) -> float:
    """Mirostat's largest surprise for the next token: less where this one surprised by more than tau."""
    assert how.mirostat_tau is not None
    return mu - how.mirostat_eta * (surprise - how.mirostat_tau)
