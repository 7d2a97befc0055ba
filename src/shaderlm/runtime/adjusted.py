"""Penalties, biases, masks and log probabilities of a step's outputs: what kernels and formulas read, what they report.

Every output has a record, whether it wants any of this or not: rows with and without share a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..graph.sampling import BIAS, MAX_LOGPROBS, RECENT, adjustments
from .pages import MAX_SEQUENCES
from .sampler_settings import SamplerSettings

U32 = NDArray[np.uint32]
Logprobs = tuple[float, list[tuple[int, float]]]  # of the sampled token; of the most likely ones, best first
REPORT = 8 * (1 + MAX_LOGPROBS)  # bytes of a row: (token, log probability) of the sampled and of the most likely ones


class LogprobRequest(NamedTuple):
    """Whose token an output is, and how many of the most likely tokens it reports; None: no report."""

    slot: int
    logprobs: int | None


class LogitAdjustments(NamedTuple):
    """What the ops adjust_logits and logprobs read of a step's outputs."""

    records: NDArray[Any]  # [outputs], of `graph.sampling.ADJUSTMENT`
    biases: NDArray[Any]  # of `graph.sampling.BIAS`, one at least
    masks: U32  # [masks, words], one at least
    requests: tuple[LogprobRequest, ...] | None  # None: no output reports log probabilities


def mask_words(vocabulary: int) -> int:
    """Words of a mask: a bit per token."""
    return -(-vocabulary // 32)


def adjusted(
    settings: Sequence[SamplerSettings], slots: Sequence[int], histories: Sequence[int], vocabulary: int
) -> LogitAdjustments:
    """The records of outputs with these settings, slots that take their tokens, and sequence slots of their histories.

    Where one reports log probabilities, all do: the tokens of such a step come back with them.
    """
    records = adjustments(len(settings))
    pairs: list[tuple[int, float]] = []
    masks: list[U32] = []
    reports = any(each.logprobs is not None for each in settings)
    if reports:
        records["logprobs"] = [each.logprobs or 0 for each in settings]
    for record, each, history in zip(records, settings, histories, strict=True):
        if not each.adjusted:  # most rows beside one with a grammar
            continue
        record["repetition"], record["presence"] = each.repetition_penalty, each.presence_penalty
        record["frequency"] = each.frequency_penalty
        record["history"], record["bias_first"] = history, len(pairs)
        if each.penalizes and each.recent:
            pairs += [(token | RECENT, count) for token, count in Counter(each.recent).items()]
        pairs += each.bias
        record["bias_count"] = len(pairs) - record["bias_first"]
        if each.mask is not None:
            record["mask"] = len(masks)
            masks.append(np.frombuffer(each.mask, np.uint32))
    counts = [None if each.logprobs is None else min(each.logprobs, vocabulary) for each in settings]
    requests = tuple(map(LogprobRequest, slots, counts)) if reports else None
    biases = np.array(pairs or [(0, 0.0)], BIAS)
    return LogitAdjustments(records, biases, np.stack(masks or [np.zeros(mask_words(vocabulary), np.uint32)]), requests)


def read_report(words: U32, requests: Sequence[LogprobRequest]) -> tuple[U32, dict[int, Logprobs]]:
    """What the op logprobs wrote, as tokens by sequence slot, and log probabilities by slot for those who want them."""
    tokens, logprobs = np.zeros(MAX_SEQUENCES, np.uint32), dict[int, Logprobs]()
    for row, (slot, count) in zip(words.reshape(-1, 1 + MAX_LOGPROBS, 2), requests, strict=False):
        tokens[slot] = row[0, 0]
        if count is not None:
            ids, values = row[: 1 + count, 0].tolist(), row[: 1 + count, 1].view(np.float32).tolist()
            logprobs[slot] = (values[0], list(zip(ids[1:], values[1:], strict=True)))
    return tokens, logprobs


def check_settings(settings: SamplerSettings, vocabulary: int, has_history: bool) -> None:
    """Refuse what the ops could not do."""
    wrong = next((token for token, _ in settings.bias if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InputError(f"bias has token {wrong}; the vocabulary has the tokens 0 … {vocabulary - 1}")
    if len({token for token, _ in settings.bias}) < len(settings.bias):
        raise InputError("bias has a token twice; give each token one value")
    if settings.logprobs is not None and not 0 <= settings.logprobs <= MAX_LOGPROBS:
        raise InputError(f"logprobs must be None or a whole number in 0 … {MAX_LOGPROBS}, got {settings.logprobs}")
    if settings.mask is not None and len(settings.mask) != 4 * mask_words(vocabulary):
        expected = f"{4 * mask_words(vocabulary)} bytes, a bit for each of {vocabulary:,} tokens"
        raise InputError(f"a mask must have {expected}, got {len(settings.mask)}")
    if settings.penalizes and not has_history:
        raise InputError("penalties need the tokens of the sequence so far; give them to set_history() first")
