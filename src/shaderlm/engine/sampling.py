"""What a user may ask of sampling, and how the host chooses a token. Knows no GPU, no text and no HTTP.

Plain settings run on the device (`Sampling.on_device`: the ops argmax and sample); penalties, biases and log
probabilities need the logits here. Both draw by the one formula in `graph.reference`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..graph import reference
from ..graph.ops import CHOICE

Logits = NDArray[np.float32]

MOST_LOGPROBS = 20
_WORDS = (1 << 32) - 1


def _number(name: str, value: Any, least: float, most: float, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return float(value)


def _whole(name: str, value: Any, least: int, most: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return int(value)


def _biases(given: Any) -> Mapping[int, float]:
    if not isinstance(given, Mapping):
        raise InputError(f"logit_bias must be a mapping from token ids to numbers, got {type(given).__name__}")
    checked = {}
    for token, value in given.items():
        key = _whole("a token id of logit_bias", token, 0, _WORDS, "a whole number of at least 0")
        banned = isinstance(value, Real) and float(value) == -math.inf
        name, expected = f"logit_bias[{key}]", "a number in −100 … 100, or −inf"
        checked[key] = -math.inf if banned else _number(name, value, -100, 100, expected)
    return MappingProxyType(checked)


# Per field: the least, the most, and the expectation in words. NaN is in no range.
_NUMBERS = {
    "temperature": (0.0, 1e6, "0 (greedy) or a positive number, at most 1e6"),
    "top_p": (0.0, 1.0, "a number in 0 … 1 (1: off)"),
    "min_p": (0.0, 1.0, "a number in 0 … 1 (0: off)"),
    "repetition_penalty": (1e-3, 1e3, "a number in 0.001 … 1000 (1: off)"),
    "presence_penalty": (-100.0, 100.0, "a number in −100 … 100 (0: off)"),
    "frequency_penalty": (-100.0, 100.0, "a number in −100 … 100 (0: off)"),
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy: the largest logit.

    In this order: penalties on tokens of the history (prompt and answer), biases, temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_k: int = 0  # keep the k largest; 0: all
    top_p: float = 1.0  # keep the largest whose probabilities reach p; 1: all
    min_p: float = 0.0  # keep what has at least this part of the largest probability; 0: all
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None  # None: another one each time
    logprobs: int | None = None  # how many alternatives to report per token; 0: only the chosen one's; None: nothing

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            name: _number(name, getattr(self, name), *bounds) for name, bounds in _NUMBERS.items()
        }
        checked["top_k"] = _whole("top_k", self.top_k, 0, _WORDS, "a whole number of at least 0 (0: off)")
        checked["logit_bias"] = _biases(self.logit_bias)
        if self.seed is not None:
            expected = "None or a whole number in −2^63 … 2^64 − 1"
            checked["seed"] = _whole("seed", self.seed, -(1 << 63), (1 << 64) - 1, expected)
        if self.logprobs is not None:
            expected = f"None or a whole number in 0 … {MOST_LOGPROBS}"
            checked["logprobs"] = _whole("logprobs", self.logprobs, 0, MOST_LOGPROBS, expected)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # plain numbers, whatever was given

    @property
    def greedy(self) -> bool:
        """Takes the largest logit; no randomness."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Do the tokens so far matter?"""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def on_device(self) -> bool:
        """May run in the kernels argmax and sample, with the logits staying on the device."""
        return not self.penalizes and not self.logit_bias and self.logprobs is None


def uniforms(seed: int | None) -> Iterator[float]:
    """Numbers in (0, 1), one per token: the same on every machine and NumPy for the same seed.

    Odd multiples of 2^−24: exact in float32 and never 0, which would draw a first token however unlikely.
    """
    bits = np.random.Philox(None if seed is None else seed % (1 << 64))
    while True:
        yield ((int(bits.random_raw()) >> 41) + 0.5) * 2.0**-23


def choose(logits: Logits, sampling: Sampling, history: Sequence[int] | Counter[int], u: float) -> int:
    """The next token from the logits [V], the tokens so far and a number of `uniforms`."""
    changed = adjusted(logits, sampling, history)
    if sampling.greedy:
        return int(np.argmax(reference.usable(changed)))
    return int(reference.sample(changed, device_choice(sampling, u))[0])


def adjusted(logits: Logits, sampling: Sampling, history: Sequence[int] | Counter[int]) -> Logits:
    """Logits [V] after penalties and biases. The given array is left as it is.

    Tokens of the history: repetition divides positive logits and multiplies negative ones, presence subtracts once
    per token, frequency once per occurrence. Then biases are added.
    """
    if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.ndim != 1 or not logits.size:
        given = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, np.ndarray) else type(logits).__name__
        raise InputError(f"logits must be a float32 array [vocabulary], got {given}")
    if not sampling.penalizes and not sampling.logit_bias:
        return logits
    out = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):  # −inf stays −inf, and NaN is never drawn
        if sampling.penalizes:
            counts = history if isinstance(history, Counter) else Counter(history)
            tokens = _tokens("the history", counts, out.size)
            x = out[tokens].astype(np.float64)
            x = np.where(x > 0, x / sampling.repetition_penalty, x * sampling.repetition_penalty)
            occurrences = np.fromiter(counts.values(), np.float64, len(counts))
            out[tokens] = x - sampling.presence_penalty - sampling.frequency_penalty * occurrences
        tokens = _tokens("logit_bias", sampling.logit_bias, out.size)
        out[tokens] += np.fromiter(sampling.logit_bias.values(), np.float32, tokens.size)
    return out


def _tokens(where: str, found: Mapping[int, Any], vocabulary: int) -> NDArray[np.int64]:
    tokens = np.fromiter(found, np.int64, len(found))
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if outside.size:
        raise InputError(f"{where} has token {outside[0]}; the vocabulary has the tokens 0 … {vocabulary - 1}")
    return tokens


def log_probabilities(logits: Logits, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-softmax of the raw logits [V]: of one token, and of the `count` likeliest, best first."""
    x = reference.usable(logits)
    if not 0 <= token < x.size:
        raise InputError(f"token must lie in 0 … {x.size - 1}, got {token}")
    top = x.max()
    if top > -np.inf:
        x = x - top
        x -= np.log(np.exp(x).sum())
    best: list[tuple[int, float]] = []
    count = min(count, x.size)
    if count > 0:
        candidates = np.flatnonzero(x >= np.partition(x, -count)[-count])
        order = candidates[np.argsort(-x[candidates], kind="stable")][:count]
        best = [(int(i), float(x[i])) for i in order]
    return float(x[token]), best


def device_choice(sampling: Sampling, u: float) -> NDArray[np.uint32]:
    """The eight words of the operand `choice` of the op sample."""
    row = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u, 0)
    words: NDArray[np.uint32] = np.array([row], CHOICE).view(np.uint32)
    return words
