"""How a row is sampled, as callers say it."""

from __future__ import annotations

from typing import NamedTuple


class SamplerSettings(NamedTuple):
    """How the device samples a row. Temperature 0 takes the largest logit. The random number of a token depends on the
    seed and the row's position alone.

    Applied in this order: penalties on the tokens of the sequence's history (`Runner.set_history`), bias, mask,
    temperature, top_k, top_p, min_p. Log probabilities are those of the logits before all of it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits
    logprobs: int | None = None  # of how many of the most likely tokens to report; 0: of the sampled one alone
    mask: bytes | None = None  # a bit per token in u32 words, the lowest first; 1: allowed
    recent: tuple[int, ...] = ()  # tokens of the history that came after those that `set_history` and sampling counted

    @property
    def greedy(self) -> bool:
        """Takes the largest logit."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Do the tokens so far change the logits?"""
        return self[5:8] != _NO_PENALTIES

    @property
    def adjusted(self) -> bool:
        """Is anything done with the logits but sampling?"""
        changes = bool(self.bias) or self.mask is not None or self.logprobs is not None
        return changes or self[5:8] != _NO_PENALTIES


_NO_PENALTIES = (1.0, 0.0, 0.0)  # of repetition, presence and frequency
GREEDY = SamplerSettings()
