"""One sequence alone, and its tokens one by one: how tests drive runners without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shaderlm.runtime.adjusted import Logprobs
from shaderlm.runtime.pages import KvSequence
from shaderlm.runtime.runner import F32, DecodeBatch, Runner, SequenceChunk, StepResult, Tokens
from shaderlm.runtime.sampler_settings import GREEDY, SamplerSettings


@dataclass
class TokenOf:
    """One sequence's token among those of a step."""

    tokens: Tokens
    slot: int

    def wait(self) -> int:
        return int(self.tokens.wait()[self.slot])

    def logprobs(self) -> Logprobs | None:
        return self.tokens.logprobs(self.slot)


def token_of(result: StepResult, sequence: KvSequence) -> TokenOf:
    assert result.tokens is not None, "no part of this step gives a token"
    return TokenOf(result.tokens, sequence.slot)


def rewind(runner: Runner, sequence: KvSequence, ids: Sequence[int], length: int) -> None:
    """Forget what comes after the first `length` positions, of these tokens. What a state lost beside is run again."""
    kept = runner.truncate(sequence, length)
    if kept < length:
        runner.feed(sequence, ids[kept:length])


class Session:
    """A sequence, and steps that have it alone."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.sequence = runner.add()
        self._decode: tuple[SamplerSettings, DecodeBatch] | None = None
        self._ids: list[int] = []  # that were run, as far as they are known here

    @property
    def length(self) -> int:
        """Positions that are filled."""
        return self.sequence.length

    def rewind(self, length: int) -> None:
        """Forget what comes after the first `length` positions."""
        rewind(self._runner, self.sequence, self._ids, length)
        del self._ids[length:]

    def set_history(self, ids: Sequence[int]) -> None:
        """The tokens that penalties count, beside those that are sampled with penalties from now on."""
        self._runner.set_history(self.sequence, ids)

    def feed(self, ids: Sequence[int]) -> None:
        """Run tokens."""
        self._ids += ids
        self._runner.feed(self.sequence, ids)

    def sample(self, ids: Sequence[int], settings: SamplerSettings = GREEDY) -> TokenOf:
        """Run tokens and sample the next one, without waiting for it."""
        self._ids += ids
        return token_of(self._runner.feed(self.sequence, ids, "token", settings), self.sequence)

    def advance(self, settings: SamplerSettings = GREEDY) -> TokenOf:
        """Run the token that was sampled last and sample the next, without waiting for either."""
        if self._decode is None or self._decode[0] != settings:
            self._end_decode()
            self._decode = (settings, self._runner.decode_batch([self.sequence], [settings]))
        return TokenOf(self._decode[1].step(), self.sequence.slot)

    def logits(self, ids: Sequence[int]) -> F32:
        """Run tokens and return the logits after the last one, [vocabulary]."""
        self._ids += ids
        found = self._runner.feed(self.sequence, ids, "logits").logits
        assert found is not None
        last: F32 = found[-1]
        return last

    def all_logits(self, ids: Sequence[int]) -> F32:
        """Run tokens and return the logits after every one, [tokens, vocabulary]."""
        self._ids += ids
        found, most = [], min(self._runner.max_tokens, self._runner.max_outputs)
        for first in range(0, len(ids), most):
            result = self._runner.step([SequenceChunk(self.sequence, ids[first : first + most], "all logits")])
            assert result.logits is not None
            found.append(result.logits)
        return np.concatenate(found)

    def _end_decode(self) -> None:
        if self._decode is not None:
            self._decode[1].close()
            self._decode = None

    def close(self) -> None:
        """Give the cache back."""
        self._end_decode()
        self._runner.free(self.sequence)
