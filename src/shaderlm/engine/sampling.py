"""Sampling parameters and their checks. Knows no GPU, no text and no HTTP. The formulas are in `graph.sampling`."""

from __future__ import annotations

import copy
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from ..errors import InputError
from ..formats.sampling_keys import SAMPLING_KEYS
from ..graph.sampling import MAX_LOGPROBS
from ..runtime.sampler_settings import SamplerSettings

MAX_U32 = (1 << 32) - 1
_log = logging.getLogger("shaderlm")


def _number(name: str, value: Any, minimum: float, maximum: float, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not minimum <= float(value) <= maximum:
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return float(value)


def _whole(name: str, value: Any, minimum: int, maximum: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not minimum <= int(value) <= maximum:
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return int(value)


def _biases(logit_bias: Any) -> Mapping[int, float]:
    if not isinstance(logit_bias, Mapping):
        raise InputError(f"logit_bias must be a mapping from token ids to numbers, got {type(logit_bias).__name__}")
    checked = {}
    for token, value in logit_bias.items():
        key = _whole("a token id of logit_bias", token, 0, MAX_U32, "a whole number of at least 0")
        banned = isinstance(value, Real) and float(value) == -math.inf
        name, expected = f"logit_bias[{key}]", "a number in −100 … 100, or −inf"
        checked[key] = -math.inf if banned else _number(name, value, -100, 100, expected)
    return MappingProxyType(checked)


# Per field: minimum, maximum, and what is expected, for the error. NaN is in no range.
RANGES = {
    "temperature": (0.0, 1e6, "0 (greedy) or a positive number, at most 1e6"),
    "top_p": (0.0, 1.0, "a number in 0 … 1 (1: off)"),
    "min_p": (0.0, 1.0, "a number in 0 … 1 (0: off)"),
    "repetition_penalty": (1e-3, 1e3, "a number in 0.001 … 1000 (1: off)"),
    "presence_penalty": (-100.0, 100.0, "a number in −100 … 100 (0: off)"),
    "frequency_penalty": (-100.0, 100.0, "a number in −100 … 100 (0: off)"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is sampled. The defaults are greedy: the token with the largest logit.

    Applied in this order: penalties on tokens of the prompt and of the generation so far, logit_bias, temperature,
    top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the most likely tokens whose probabilities add up to p; 1: all
    min_p: float = 0.0  # keep tokens with at least this fraction of the largest probability; 0: all
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None  # None: a different one each time
    logprobs: int | None = None  # alternatives to report per token; 0: the sampled token alone; None: no report

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: _number(name, getattr(self, name), *bounds) for name, bounds in RANGES.items()}
        checked["top_k"] = _whole("top_k", self.top_k, 0, MAX_U32, "a whole number of at least 0 (0: off)")
        checked["logit_bias"] = _biases(self.logit_bias)
        if self.seed is not None:
            expected = "None or a whole number in −2^63 … 2^64 − 1"
            checked["seed"] = _whole("seed", self.seed, -(1 << 63), (1 << 64) - 1, expected)
        if self.logprobs is not None:
            expected = f"None or a whole number in 0 … {MAX_LOGPROBS}"
            checked["logprobs"] = _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, expected)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # plain numbers, whatever was given

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with another seed. Nothing is checked again: that takes long where there are many biases."""
        params = copy.copy(self)
        object.__setattr__(params, "seed", seed % (1 << 64))
        return params

    def check_vocabulary(self, size: int) -> None:
        """logit_bias must name tokens of this vocabulary, and leave at least one of them."""
        outside = next((token for token in self.logit_bias if token >= size), None)
        if outside is not None:
            raise InputError(f"logit_bias has token {outside}; the vocabulary has the tokens 0 … {size - 1}")
        if sum(bias == -math.inf for bias in self.logit_bias.values()) == size:
            raise InputError(f"logit_bias is −inf for all {size:,} tokens of the vocabulary; leave at least one")


def settings_of(params: SamplingParams) -> SamplerSettings:
    """The settings of one generation, as the device's sampler takes them. Without a seed, another one each time."""
    seed = secrets.randbits(64) if params.seed is None else params.seed
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    bias = tuple(sorted(params.logit_bias.items()))
    plain = (params.temperature, params.top_k, params.top_p, params.min_p)
    return SamplerSettings(*plain, seed, *penalties, bias, params.logprobs)


def sampling_of_file(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values that a model wants to be sampled with. A wrong one is named, and not used."""
    values = {}
    for name, key in SAMPLING_KEYS.items():
        value = metadata.get(key)
        if value is not None:
            try:
                checked = getattr(SamplingParams(**{name: value}), name)
                values[name] = float(f"{checked:.7g}") if isinstance(checked, float) else checked  # GGUF has f32
            except InputError as problem:
                _log.warning("%s of the model is not used: %s", key, problem)
    return MappingProxyType(values)
