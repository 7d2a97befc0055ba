"""One conversation: a sequence, and steps that have it alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .runner import F32, DecodeBatch, OutputKind, Runner, SequenceChunk, StepResult, Token, TokenOf
from .sampler_settings import GREEDY, SamplerSettings


class Session:
    """One conversation: a sequence, and steps that have it alone."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.sequence = runner.add()
        self.steps_ahead = runner.steps_ahead
        self._decode: tuple[SamplerSettings, DecodeBatch] | None = None

    @property
    def length(self) -> int:
        """Positions that are filled."""
        return self.sequence.length

    def rewind(self, length: int) -> None:
        """Forget what comes after the first `length` positions."""
        self._runner.truncate(self.sequence, length)

    def set_history(self, ids: Sequence[int]) -> None:
        """The tokens that penalties count, beside those that are sampled with penalties from now on."""
        self._runner.set_history(self.sequence, ids)

    def feed(self, ids: Sequence[int]) -> None:
        """Run tokens."""
        self._in_steps(ids, "nothing")

    def sample(self, ids: Sequence[int], settings: SamplerSettings = GREEDY) -> Token:
        """Run tokens and sample the next one, without waiting for it."""
        return self._in_steps(ids, "token", settings).token(self.sequence)

    def advance(self, settings: SamplerSettings = GREEDY) -> Token:
        """Run the token that was sampled last and sample the next, without waiting for either."""
        if self._decode is None or self._decode[0] != settings:
            self._end_decode()
            self._decode = (settings, self._runner.decode_batch([self.sequence], [settings]))
        return TokenOf(self._decode[1].step(), self.sequence.slot)

    def logits(self, ids: Sequence[int]) -> F32:
        """Run tokens and return the logits after the last one, [vocabulary]."""
        found = self._in_steps(ids, "logits").logits
        assert found is not None
        last: F32 = found[-1]
        return last

    def all_logits(self, ids: Sequence[int]) -> F32:
        """Run tokens and return the logits after every one, [tokens, vocabulary]."""
        self._check(ids)
        found = []
        step = min(self._runner.max_tokens, self._runner.max_outputs)
        for first in range(0, len(ids), step):
            result = self._runner.step([SequenceChunk(self.sequence, ids[first : first + step], "all logits")])
            assert result.logits is not None
            found.append(result.logits)
        return np.concatenate(found)

    def _check(self, ids: Sequence[int]) -> None:
        """Before anything is run."""
        self._runner.check_ids(ids)
        self._runner._check_length(self.length, len(ids))

    def _in_steps(self, ids: Sequence[int], gives: OutputKind, settings: SamplerSettings = GREEDY) -> StepResult:
        """A long prompt is waited for as it goes: what is submitted cannot be cancelled by Ctrl-C."""
        self._check(ids)
        most = self._runner.max_tokens
        under_way: deque[StepResult] = deque()
        for first in range(0, len(ids), most):
            last = first + most >= len(ids)
            if len(under_way) == self.steps_ahead:
                under_way.popleft().wait()
            part = SequenceChunk(self.sequence, ids[first : first + most], gives if last else "nothing", settings)
            under_way.append(self._runner.step([part]))
        return under_way[-1]

    def _end_decode(self) -> None:
        if self._decode is not None:
            self._decode[1].close()
            self._decode = None

    def close(self) -> None:
        """Give the cache back."""
        self._end_decode()
        self._runner.free(self.sequence)
