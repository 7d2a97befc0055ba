"""Drafts of a smaller model with the same vocabulary, which runs on the same device with a cache of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ..errors import DeviceError, InputError
from ..runtime.pages import KvSequence
from ..runtime.runner import DecodeBatch, SequenceChunk
from ..runtime.sampler_settings import SamplerSettings
from ..text import Vocabulary
from .draft_rates import Acceptance
from .scheduler import SequenceState

if TYPE_CHECKING:
    from .language_model import LanguageModel

_LEVEL = 2  # of its acceptance: it has no matches, and begins with 0.75
_LIKELY = 0.4  # where fewer drafted tokens are right, it drafts to see whether that has changed, and rarely
_PROBED = 2  # tokens of such a draft
_FIRST_PROBE, _LAST_PROBE = 64, 1024  # tokens between them: each that is wrong doubles it
_READ = 256  # tokens of a prompt that are read at once, between steps of the other model
_SAMPLES = 9


@dataclass(eq=False, slots=True)
class _Sequence:
    """What the model has of a sequence. The first `valid` rows of its cache are those of known tokens."""

    kv: KvSequence
    acceptance: Acceptance
    valid: int = 0
    known: int = 0  # tokens when it drafted last
    drafted_at: int = 0
    probe: int = _FIRST_PROBE


class ModelDrafter:
    """Runs a model on after the tokens of sequences. It draws as they do, but for what depends on their history."""

    def __init__(self, model: LanguageModel, vocabulary: int) -> None:
        """vocabulary: tokens of the model that verifies. `model` is closed with this."""
        self._model, self._runner, self._vocabulary = model, model.runner, vocabulary
        self._sequences: dict[SequenceState, _Sequence] = {}
        self._acceptance = Acceptance(weight=8.0, keep=0.999)
        self._batch: DecodeBatch | None = None
        self._refused = set[SequenceState]()  # there was no memory for them
        self._times: deque[float] = deque(maxlen=_SAMPLES)  # seconds of a drafted token of all sequences

    def chances(self, state: SequenceState, most: int) -> Sequence[float]:
        """By what was accepted. A long prompt is read in parts first, without a draft."""
        tokens, each = len(state.tokens), self._sequences.get(state)
        if each is None:
            each = None if state in self._refused else self._sequence(state)
            if each is None:
                return ()
        chance = each.acceptance.chance(_LEVEL)
        if chance < _LIKELY:
            if tokens - each.drafted_at < each.probe:
                return ()
            chance, most = 1.0, min(most, _PROBED)
        if tokens - each.valid > _READ and not self._read(state, each):
            return ()
        most = min(most, self._runner.config.context - tokens - state.in_flight)
        return [chance ** (i + 1) for i in range(most)]

    def _sequence(self, state: SequenceState) -> _Sequence | None:
        """A new one; None: there is no place for it."""
        try:
            kv = self._runner.add()
        except InputError:
            return None
        each = self._sequences[state] = _Sequence(kv, Acceptance(self._acceptance))
        return each

    def _read(self, state: SequenceState, each: _Sequence) -> bool:
        """Run some of the tokens that it lacks. True: the rest is a few, which the draft begins with."""
        self._truncate(each)
        tokens = state.tokens[each.valid : len(state.tokens) - 1]
        part = tokens[: min(len(tokens), self._runner.max_tokens)]
        if not self._run(state, [SequenceChunk(each.kv, part, "nothing")]):
            return False
        each.valid += len(part)
        return len(part) == len(tokens)

    def _run(self, state: SequenceState, chunks: list[SequenceChunk]) -> bool:
        try:
            self._runner.step(chunks)
        except DeviceError:
            self._refuse([state])
            return False
        return True

    def _refuse(self, states: Sequence[SequenceState]) -> None:
        """After an error: where it was lack of memory, these go on without drafts."""
        if not self._runner.usable:
            raise
        for state in states:
            self.forget(state)
            self._refused.add(state)

    def _truncate(self, each: _Sequence) -> None:
        """Rows after those of known tokens are of drafts that did not come."""
        each.valid = min(each.valid, each.kv.length)
        self._runner.truncate(each.kv, each.valid)

    def draft(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """One step for the tokens that are new, then one for each token, of all sequences together."""
        began = time.perf_counter()
        drafts = {state: list[int]() for state, _ in wanted}
        there, settings, chunks, longest = self._begin(wanted)
        if not chunks:
            return [[] for _ in wanted]
        try:
            first = self._runner.step(chunks).tokens
            steps = [] if first is None else [first]
            if longest > 1:
                sequences = [each.kv for _, each in there]
                if self._batch is None:
                    self._batch = self._runner.decode_batch(sequences, settings)
                else:
                    self._batch.replace(sequences, settings)
                steps += [self._batch.step() for _ in range(longest - 1)]
            words = [step.wait() for step in steps]
        except DeviceError:
            self._refuse([state for state, _ in there])
            return [[] for _ in wanted]
        for state, each in there:
            each.valid = len(state.tokens)
            drafts[state] = [int(tokens[each.kv.slot]) for tokens in words]
        self._times.append((time.perf_counter() - began) / longest)
        return [self._known_ids(drafts[state][:count]) for state, count in wanted]

    def _begin(
        self, wanted: Sequence[tuple[SequenceState, int]]
    ) -> tuple[list[tuple[SequenceState, _Sequence]], list[SamplerSettings], list[SequenceChunk], int]:
        """Those that a step holds, their settings, the rows of the first step, and how many tokens are drafted."""
        there, chunks, rows, longest = list[tuple[SequenceState, _Sequence]](), list[SequenceChunk](), 0, 0
        room = self._runner.config.context
        for state, count in wanted:
            each = self._sequences.get(state)
            if each is None or len(there) == self._runner.max_outputs:
                continue
            each.valid = min(each.valid, len(state.tokens) - 1)
            if rows + len(state.tokens) - each.valid > self._runner.max_tokens:
                continue
            self._truncate(each)
            rows += len(state.tokens) - each.valid
            each.known = each.drafted_at = len(state.tokens)
            there.append((state, each))
            chunks.append(SequenceChunk(each.kv, state.tokens[each.valid :], "token", _settings(state)))
            longest, room = max(longest, count), min(room, self._runner.config.context - len(state.tokens))
        return there, [chunk.settings for chunk in chunks], chunks, min(longest, room + 1)

    def _known_ids(self, drafts: list[int]) -> list[int]:
        """Up to a token that only this model has: its matrix may have more rows."""
        end = next((i for i, token in enumerate(drafts) if token >= self._vocabulary), len(drafts))
        return drafts[:end]

    def verified(self, state: SequenceState, drafted: int, accepted: int) -> None:
        """Rows of accepted drafts are those of known tokens."""
        each = self._sequences.get(state)
        if each is None:
            return
        each.valid = min(each.kv.length, each.known + accepted)
        for i in range(min(accepted + 1, drafted)):
            each.acceptance.observe(_LEVEL, i < accepted)
        if each.acceptance.chance(_LEVEL) < _LIKELY:
            each.probe = _FIRST_PROBE if accepted == drafted else min(2 * each.probe, _LAST_PROBE)

    def seconds(self, tokens: int) -> float:
        """As it was measured lately; nothing before the first time."""
        return tokens * median(self._times) if self._times else 0.0

    def forget(self, state: SequenceState) -> None:
        """A sequence is over."""
        self._refused.discard(state)
        each = self._sequences.pop(state, None)
        if each is not None and not self._runner.closed:
            self._runner.free(each.kv)

    def warm_up(self) -> None:
        """Its kernels."""
        self._runner.warm_up()

    def close(self) -> None:
        """Close its model."""
        if self._batch is not None:
            self._batch.close()
            self._batch = None
        self._model.close()


def _settings(state: SequenceState) -> SamplerSettings:
    """What draws alike where the logits are alike, without what would have to be kept for each sequence."""
    settings: SamplerSettings = state.owner.settings
    return SamplerSettings(*settings[:5])


def check_same_vocabulary(vocabulary: Vocabulary, draft: Vocabulary) -> None:
    """Drafts are token ids: both models must mean the same by them."""
    ours, theirs = vocabulary.tokens, draft.tokens
    if len(ours) != len(theirs):
        raise InputError(
            f"a draft model must have the same vocabulary: it has {len(theirs):,} tokens, the model {len(ours):,}"
        )
    at = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), None)
    if at is not None:
        raise InputError(
            f"a draft model must have the same vocabulary: its token {at} is {theirs[at]!r}, the model's {ours[at]!r}"
        )
