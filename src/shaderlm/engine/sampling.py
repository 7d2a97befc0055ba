"""Sampling parameters and their checks. Knows no GPU, no text and no HTTP. The formulas are in `graph.sampling`."""

from __future__ import annotations

import copy
import logging
import math
import re
import reprlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from ..errors import InputError
from ..formats.sampling_keys import SAMPLING_KEYS
from ..graph.sampler_chain import SAMPLERS
from ..graph.sampling import MAX_LOGPROBS
from ..runtime.sampler_settings import SamplerSettings

MAX_U32 = (1 << 32) - 1
MAX_BREAKERS, MAX_BREAKER = 64, 256  # sequence breakers, and characters of one
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
    "dry_multiplier": (0.0, 1e3, "a number in 0 … 1000 (0: off)"),
    "dry_base": (1.0, 1e3, "a number in 1 … 1000"),
    "xtc_probability": (0.0, 1.0, "a number in 0 … 1 (0: off)"),
    "xtc_threshold": (0.0, 1.0, "a number in 0 … 1 (above 0.5: off)"),
    "typical_p": (0.0, 1.0, "a number in 0 … 1 (1: off)"),
    "top_n_sigma": (-1e3, 1e3, "a number in −1000 … 1000 (0 or less: off)"),
    "dynatemp_range": (0.0, 1e3, "a number in 0 … 1000 (0: off)"),
    "dynatemp_exponent": (0.0, 100.0, "a number in 0 … 100"),
    "mirostat_tau": (0.0, 100.0, "a number in 0 … 100"),
    "mirostat_eta": (0.0, 100.0, "a number in 0 … 100"),
}
WHOLE_RANGES = {
    "top_k": (0, MAX_U32, "a whole number of at least 0 (0: off)"),
    "dry_allowed_length": (0, MAX_U32, "a whole number of at least 0"),
    "dry_penalty_last_n": (-1, MAX_U32, "a whole number of at least −1 (−1: all tokens, 0: off)"),
}


def _is_breaker(text: Any) -> bool:
    return isinstance(text, str) and 1 <= len(text) <= MAX_BREAKER and not re.search("[\ud800-\udfff]", text)


def _breakers(breakers: Any) -> tuple[str, ...]:
    right = isinstance(breakers, (list, tuple)) and len(breakers) <= MAX_BREAKERS
    if not right or not all(map(_is_breaker, breakers)):
        expected = f"a list of at most {MAX_BREAKERS} strings of 1 … {MAX_BREAKER} characters"
        raise InputError(f"dry_sequence_breakers must be {expected}, got {reprlib.repr(breakers)}")
    return tuple(breakers)


# llama.cpp's letters of samplers, and another name for one.
_SAMPLER_LETTERS = dict(zip("edskypmxt", SAMPLERS, strict=True))
_SAMPLER_ALIASES = {"typical_p": "typ_p"}


def _sampler_names(samplers: Any) -> tuple[str, ...]:
    names = samplers
    if isinstance(samplers, str):
        letters = set(samplers) <= set(_SAMPLER_LETTERS)
        names = [_SAMPLER_LETTERS[each] for each in samplers] if letters else samplers.split(";")
    if isinstance(names, (list, tuple)):
        names = [_SAMPLER_ALIASES.get(each, each) if isinstance(each, str) else each for each in names]
    known = isinstance(names, (list, tuple)) and all(isinstance(each, str) and each in SAMPLERS for each in names)
    if not known or len(set(names)) < len(names):
        expected = f"None or a list of {', '.join(SAMPLERS)}, each at most once"
        raise InputError(f"samplers must be {expected}; got {reprlib.repr(samplers)}")
    return tuple(names)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is sampled. The defaults are greedy: the token with the largest logit.

    Applied in this order: penalties on tokens of the prompt and of the generation so far, DRY, logit_bias, temperature,
    top_k, top_p, min_p. With `samplers`, or where one of top_n_sigma, typical_p, xtc_probability, dynatemp_range and
    mirostat acts, in the order that `sampler_order` says.
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
    dry_multiplier: float = 0.0  # of what is subtracted from tokens that would repeat a sequence; 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0  # of leaving out the most likely tokens; 0: never
    xtc_threshold: float = 0.1
    typical_p: float = 1.0  # keep tokens of typical probability that add up to p; 1: all
    top_n_sigma: float = -1.0  # keep logits within so many standard deviations of the largest; 0 or less: all
    dynatemp_range: float = 0.0  # by which the temperature follows the entropy; 0: it does not
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 2: Mirostat 2.0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: Sequence[str] | None = None  # which, and in which order; None: all

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: _number(name, getattr(self, name), *bounds) for name, bounds in RANGES.items()}
        checked |= {name: _whole(name, getattr(self, name), *bounds) for name, bounds in WHOLE_RANGES.items()}
        checked["mirostat"] = _whole("mirostat", self.mirostat, 0, 2, "0 (off) or 2 (Mirostat 2.0)")
        if checked["mirostat"] == 1:
            raise InputError("mirostat must be 0 (off) or 2 (Mirostat 2.0), got 1")
        checked["dry_sequence_breakers"] = _breakers(self.dry_sequence_breakers)
        checked["samplers"] = None if self.samplers is None else _sampler_names(self.samplers)
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
    bias = tuple(sorted(params.logit_bias.items()))
    settings = SamplerSettings(
        *(params.temperature, params.top_k, params.top_p, params.min_p, seed),
        *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        *(bias, params.logprobs),
    )
    if params.samplers is None:
        return settings
    unused = SamplerSettings(temperature=1.0)._asdict()
    off = {
        field: unused[field]
        for name, sampler_fields in _FIELDS.items()
        if name not in params.samplers
        for field in sampler_fields
    }
    return settings._replace(**off)


def without_tokens(settings: SamplerSettings, tokens: Collection[int]) -> SamplerSettings:
    """The same, where these tokens are never drawn, whatever is added to their logits."""
    if not tokens:
        return settings
    biases = dict(settings.bias) | dict.fromkeys(tokens, -math.inf)
    return settings._replace(bias=tuple(sorted(biases.items())))


# What of `SamplerSettings` belongs to a sampler that `samplers` names.
_FIELDS = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    **{name: (name,) for name in ("temperature", "top_k", "top_p", "min_p")},
}


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
