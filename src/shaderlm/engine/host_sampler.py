"""`HostSampler`: draws the tokens of one request from logits that are read back, by samplers without a kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..graph.sampler_chain import ChainRow, ChainSettings, draw_token, next_mu, remaining_logprobs
from ..graph.sampling import adjust_logits, log_softmax, most_likely
from ..runtime.adjusted import adjusted
from ..runtime.sampler_settings import SamplerSettings
from .completion import TokenLogprob


class HostSampler:
    """Of one request: a chain, and what it remembers from token to token."""

    def __init__(self, chain: ChainSettings, *, reports_remaining: bool = False) -> None:
        """reports_remaining: log probabilities are those among the tokens that samplers left."""
        self._chain, self._reports_remaining = chain, reports_remaining
        self._mu = math.inf if chain.mirostat_tau is None else 2 * chain.mirostat_tau
        self._counts: NDArray[np.uint32] | None = None  # [vocabulary], of the first `_counted` tokens
        self._counted = 0

    def draw(
        self, logits: NDArray[np.float32], tokens: Sequence[int], settings: SamplerSettings, dry: Mapping[int, float]
    ) -> tuple[int, TokenLogprob | None]:
        """The next token after these, from logits [vocabulary], and what it reports.

        Of the settings, biases and mask hold before the chain.
        """
        counts = self._count(tokens, len(logits)) if "penalties" in self._chain.order else None
        row = ChainRow(len(tokens) - 1, counts, dry, self._mu)
        allowed = _allowed(logits, settings)
        token, surprise = draw_token(allowed, self._chain, row)
        if settings.logprobs is None:
            self._note_surprise(surprise)
            return token, None
        values = remaining_logprobs(allowed, self._chain, row) if self._reports_remaining else log_softmax(logits)
        likely = [int(each) for each in most_likely(values, settings.logprobs)]
        top = [(each, float(values[each])) for each in likely if not self._reports_remaining or values[each] > -np.inf]
        self._note_surprise(surprise)
        return token, TokenLogprob(token, float(values[token]), top)

    def _note_surprise(self, surprise: float) -> None:
        if self._chain.mirostat_tau is not None:
            self._mu = next_mu(self._mu, surprise, self._chain)

    def _count(self, tokens: Sequence[int], width: int) -> NDArray[np.uint32]:
        """How often each token is there. Only those that are new are counted."""
        if self._counts is None:
            self._counts = np.zeros(width, np.uint32)
        np.add.at(self._counts, np.asarray(tokens[self._counted :], np.int64), 1)
        self._counted = len(tokens)
        return self._counts


def _allowed(logits: NDArray[np.float32], settings: SamplerSettings) -> NDArray[np.float32]:
    """Logits after biases and mask, as the device applies them."""
    if not settings.bias and settings.mask is None:
        return logits
    changes = adjusted([SamplerSettings(bias=settings.bias, mask=settings.mask)], [0], [0], len(logits))
    (allowed,) = adjust_logits(logits[None], changes.records, None, changes.biases, changes.masks)
    return np.asarray(allowed, np.float32)
