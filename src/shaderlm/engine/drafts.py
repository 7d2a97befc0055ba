"""Speculative decoding: drafted tokens are verified as further rows of a step, each of which draws its own token.

A row draws by its seed and position, so that a draft is accepted where it is what the row draws: the text is the one
without drafts. `Drafts` says which sequences draft, and how many tokens; a drafter says which tokens these are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .draft_rates import Acceptance, StepCosts, draft_counts, level_of
from .draft_settings import DRAFT_TOKENS
from .ngram import NgramIndex
from .scheduler import Scheduler, SequenceState
from .step_core import InFlightStep

if TYPE_CHECKING:
    from .handle import Handle

_POLLED = 4  # sequences that are looked at in a step, beside those that draft: looking takes a few µs


class Drafter(Protocol):
    """Proposes tokens. Sequences are those of the engine; it may keep something of each until `forget`."""

    def chances(self, state: SequenceState, most: int) -> Sequence[float]:
        """The chance that the first one, two, … drafted tokens of a sequence are all right; none: it has no draft."""
        ...

    def draft(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """So many tokens for each of these sequences, or fewer. All of their tokens are known."""
        ...

    def verified(self, state: SequenceState, drafted: int, accepted: int) -> None:
        """What became of a draft. The sequence has the tokens that came."""
        ...

    def seconds(self, tokens: int) -> float:
        """What it takes to draft so many tokens for each sequence, as far as is known."""
        ...

    def forget(self, state: SequenceState) -> None:
        """A sequence is over."""
        ...

    def warm_up(self) -> None:
        """Compile whatever drafts may want, for servers."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


@dataclass(eq=False, slots=True)
class _Match:
    """Where the text of a sequence goes on as it did before."""

    acceptance: Acceptance
    known: int  # tokens that were looked at
    index: NgramIndex = field(default_factory=NgramIndex)
    offset: int = 0  # the token that is expected is the one so many before it; 0: none is
    length: int = 0  # tokens that were the same


class NgramDrafter:
    """Drafts what followed the last tokens where they came before, in the prompt or the output.

    Whether such drafts are right is known without verifying them: the tokens that come are compared with them.
    """

    def __init__(self) -> None:
        self._matches: dict[SequenceState, _Match] = {}
        self._acceptance = Acceptance(weight=8.0, keep=0.999)  # of all sequences: what others begin with

    def chances(self, state: SequenceState, most: int) -> Sequence[float]:
        """By the length of the match, which grows with every token that is right."""
        match = self._looked_at(state)
        if not match.offset:
            return ()
        chances, chance = [], 1.0
        for i in range(most):
            chance *= match.acceptance.chance(level_of(match.length + i))
            chances.append(chance)
        return chances

    def _looked_at(self, state: SequenceState) -> _Match:
        """The match of a sequence after the tokens that are known."""
        tokens, match = state.tokens, self._matches.get(state)
        if match is None:
            match = self._matches[state] = _Match(Acceptance(self._acceptance), len(tokens))
            match.index.extend(tokens, len(tokens))
            match.offset, match.length = _found(match.index, tokens, len(tokens))
        for at in range(match.known, len(tokens)):
            if match.offset:
                right = tokens[at] == tokens[at - match.offset]
                match.acceptance.observe(level_of(match.length), right)
                match.length += 1
                if not right:
                    match.offset = 0
            match.index.extend(tokens, at + 1)
            if not match.offset:
                match.offset, match.length = _found(match.index, tokens, at + 1)
        match.known = len(tokens)
        return match

    def draft(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """What came after the match; where that is not far enough, what is drafted goes on in the same way."""
        drafts = []
        for state, count in wanted:
            tokens, offset, drafted = state.tokens, self._looked_at(state).offset, list[int]()
            for i in range(len(tokens) - offset, len(tokens) - offset + count) if offset else ():
                drafted.append(tokens[i] if i < len(tokens) else drafted[i - len(tokens)])
            drafts.append(drafted)
        return drafts

    def verified(self, state: SequenceState, drafted: int, accepted: int) -> None:
        """The tokens that came say it."""

    def seconds(self, tokens: int) -> float:
        """Nothing runs for it."""
        return 0.0

    def forget(self, state: SequenceState) -> None:
        """A sequence is over."""
        self._matches.pop(state, None)

    def warm_up(self) -> None:
        """Nothing is compiled for it."""

    def close(self) -> None:
        """There is nothing to give back."""


def _found(index: NgramIndex, tokens: Sequence[int], end: int) -> tuple[int, int]:
    """How far back the last tokens came before, and how many of them; (0, 0): nowhere."""
    at, length = index.find(tokens, end)
    return (end - at, length) if at else (0, 0)


class Drafts:
    """Of one engine. Called by the thread that steps it."""

    def __init__(
        self, drafter: Drafter, most: int = DRAFT_TOKENS, *, measured: bool = True, acceptance: float | None = None
    ) -> None:
        """most: tokens that are drafted for a sequence at once.

        measured: draft where it is faster, by what is measured; False: whenever there is a draft. acceptance: of
        drafts, whatever the rows draw. Both are for tests and benchmarks.
        """
        self.drafter, self._most = drafter, most
        self._measured, self._forced = measured, acceptance
        self._random = random.Random(0)
        self._costs = StepCosts()
        self._next = 0  # of those that are looked at in turn
        self._hopeful = set[SequenceState]()  # those that have a draft, as far as is known
        self._drafted_in = 0.0  # seconds of the draft that the next step verifies
        self._last: float | None = None  # when the last step was over, if another one was on its way or to be made
        self.active = False  # does a sequence draft? Then steps are not submitted ahead

    def choose(
        self, scheduler: Scheduler, is_quick: Callable[[Handle], bool], ready_rows: Callable[[int], int]
    ) -> None:
        """Which sequences draft, and their drafts, if the tokens before are known. Before a step is scheduled.

        is_quick: can the masks of a constraint be computed at once? ready_rows: how many of so many rows need no new
        kernels.
        """
        running = [
            state
            for state in scheduler.running
            if not scheduler.is_prefilling(state) and not state.mask_pending and state.remaining + state.in_flight > 1
        ]
        if self.active:
            for state in scheduler.running:
                state.drafts = ()
        looked_at = self._looked_at(running)
        most = scheduler.drafts_that_fit(len(running))
        if self._measured and running:
            most = min(most, self._most * len(running))
            most = max(0, ready_rows(len(running) + most) - len(running))
        chances = [self._chances(state, most, is_quick) for state in looked_at]
        counts = self._counts(chances, len(running), most)
        wanted = list[tuple[SequenceState, int]]()
        drafting = set[SequenceState]()
        for state, count in zip(looked_at, counts, strict=True):
            if count:
                drafting.add(state)
                if not state.in_flight:
                    wanted.append((state, count))
        if self.active or drafting:
            for state in scheduler.running:
                scheduler.set_drafting(state, state in drafting)
        self.active, self._drafted_in = bool(drafting), 0.0
        if not wanted:
            return
        began = time.perf_counter()
        for (state, _), drafts in zip(wanted, self.drafter.draft(wanted), strict=True):
            state.drafts = drafts[: state.owner.draft(drafts)]
        self._drafted_in = time.perf_counter() - began

    def _looked_at(self, running: Sequence[SequenceState]) -> list[SequenceState]:
        """Those that have drafts, and a few of the others in turn."""
        if len(running) <= _POLLED:
            return list(running)
        self._next = (self._next + _POLLED) % len(running)
        turn = set(range(self._next, self._next + _POLLED))
        return [
            state for i, state in enumerate(running) if state in self._hopeful or i in turn or i + len(running) in turn
        ]

    def _chances(self, state: SequenceState, most: int, is_quick: Callable[[Handle], bool]) -> Sequence[float]:
        handle: Handle = state.owner
        most = min(self._most, most, state.remaining + state.in_flight - 1)
        if most <= 0 or not handle.can_draft or (handle.constraint is not None and not is_quick(handle)):
            self._hopeful.discard(state)
            return ()
        chances = self.drafter.chances(state, most)
        (self._hopeful.add if chances else self._hopeful.discard)(state)
        return chances

    def _counts(self, chances: Sequence[Sequence[float]], rows: int, most: int) -> list[int]:
        if not self._measured:
            counts, left = [], most
            for each in chances:
                counts.append(min(len(each), left))
                left -= counts[-1]
            return counts
        if not any(chances):
            return [0] * len(chances)
        without = self._costs.seconds(False, rows)

        def cost(count: int, longest: int) -> float | None:
            seconds = self._costs.expected(count)
            return None if seconds is None else seconds + self.drafter.seconds(longest)

        return draft_counts(chances, rows, most, cost, without, drafting=self.active)

    def accepted(self, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        """How many of the first drafts are accepted: as many as are what their rows draw."""
        if self._forced is not None:
            wrong = (i for i in range(len(drafts)) if self._random.random() >= self._forced)
        else:
            wrong = (i for i, (draft, token) in enumerate(zip(drafts, drawn, strict=False)) if draft != token)
        return next(wrong, len(drafts))

    def observe(self, step: InFlightStep, now: float) -> None:
        """A step is over: what it took, if it is one of those that are compared."""
        last, self._last = self._last, now
        if last is not None and not step.has_prompt and (step.verifies or not self.active):
            drafted_in = self._drafted_in if step.verifies else 0.0
            self._costs.observe(step.verifies, step.rows, now - last - drafted_in)

    def idle(self) -> None:
        """The time until the next step is over says nothing of the step."""
        self._last = None

    def forget(self, state: SequenceState) -> None:
        """A sequence is over."""
        self._hopeful.discard(state)
        self.drafter.forget(state)

    def close(self) -> None:
        """The drafter gives its memory back."""
        self.drafter.close()
