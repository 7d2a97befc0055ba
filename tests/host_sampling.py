"""Sampling on the host from logits that are read back: what the device's penalties, biases and reports must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shaderlm.engine.sampling import SamplingParams, settings_of
from shaderlm.graph import sampling as formulas
from shaderlm.runtime.sampler_settings import SamplerSettings

Logits = NDArray[np.float32]


def sample(
    logits: Logits,
    params: SamplingParams,
    history: Sequence[int] | Counter[int],
    settings: SamplerSettings,
    position: int,
) -> int:
    """The next token, from the logits [V] after the token at `position`, and the tokens so far."""
    adjusted, u = adjust(logits, params, history), formulas.uniform(settings.seed, position)
    return formulas.draw(adjusted, settings.temperature, settings.top_k, settings.top_p, settings.min_p, u)


def adjust(logits: Logits, params: SamplingParams, history: Sequence[int] | Counter[int]) -> Logits:
    """Logits [V] after penalties and biases. The given array is not changed.

    Tokens of the history: repetition divides positive logits and multiplies negative ones, presence subtracts once
    per token, frequency once per occurrence. Then biases are added.
    """
    out = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):  # −inf stays −inf, and NaN is never drawn
        if settings_of(params).penalizes:
            counts = history if isinstance(history, Counter) else Counter(history)
            tokens = list(counts)
            occurrences = np.fromiter(counts.values(), np.float64, len(counts))
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            out[tokens] = formulas.penalised(out[tokens], occurrences, *penalties)
        tokens = list(params.logit_bias)
        out[tokens] += np.fromiter(params.logit_bias.values(), np.float32, len(tokens))
    return out


def log_probabilities(logits: Logits, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-softmax of the raw logits [V]: of one token, and of the `count` most likely ones, best first."""
    x = formulas.log_softmax(logits)
    return float(x[token]), [(int(i), float(x[i])) for i in formulas.most_likely(logits, count)]
