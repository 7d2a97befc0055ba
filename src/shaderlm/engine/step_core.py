"""`StepCore`: runs the steps that the scheduler makes, several at a time. Whoever calls it holds `Runner.lock`.

Steps of decode rows go through one `DecodeBatch`, which records ahead as long as the same sequences decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import is_not
from typing import NamedTuple

from ..errors import DeviceError
from ..runtime.pages import KvSequence, pages_for
from ..runtime.runner import U32, DecodeBatch, OutputKind, Runner, SequenceChunk, StepResult, Tokens, bucket
from ..runtime.sampler_settings import SamplerSettings
from .completion import TokenLogprob
from .request import EngineOptions, Output
from .scheduler import Batch, Rows, SchedulerLimits, SequenceState

# What the last row of a prompt gives; every row, where all logits are asked for.
_GIVES: dict[Output, OutputKind] = {
    "text": "token",
    "tokens": "token",
    "hidden": "hidden",
    "logits": "all logits",
    "nothing": "nothing",
}


class OutputRows(NamedTuple):
    """Rows of a sequence, from a position on, and their places among the outputs of a step."""

    position: int
    places: slice


class DraftedRows(NamedTuple):
    """Drafts of a sequence that a step verifies, and the slots that take the tokens of their rows."""

    drafts: Sequence[int]
    places: Sequence[int]


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step on its way: the sequences that it runs, and those that get a token, with their slots.

    `outputs`: those that get hidden states or logits, of which the host may draw a token. `scores`: those whose prompts
    get log probabilities.
    """

    states: list[SequenceState]
    sampled: list[tuple[SequenceState, int]]
    tokens: Tokens | None
    result: StepResult | None = None
    outputs: dict[SequenceState, OutputRows] = field(default_factory=dict)
    scores: dict[SequenceState, OutputRows] = field(default_factory=dict)
    drafted: dict[SequenceState, DraftedRows] = field(default_factory=dict)
    rows: int = 0
    has_prompt: bool = False  # a part of one is read
    verifies: bool = False  # drafts, or did when it was submitted

    def wait(self) -> U32 | None:
        """Until the step is run. Its tokens by sequence slot, if it gives any."""
        if self.result is not None:
            self.result.wait()
        return None if self.tokens is None else self.tokens.wait()

    def logprob(self, token: int, slot: int) -> TokenLogprob | None:
        """What the settings of the sequence with this slot ask for; `token` was sampled for it."""
        report = None if self.tokens is None else self.tokens.logprobs(slot)
        return None if report is None else TokenLogprob(token, *report)

    def remove(self, state: SequenceState) -> None:
        """Nobody waits for what a sequence gets."""
        self.states = [each for each in self.states if each is not state]
        self.sampled = [each for each in self.sampled if each[0] is not state]
        self.outputs.pop(state, None)
        self.scores.pop(state, None)
        self.drafted.pop(state, None)


class StepCore:
    """The steps of one runner. `in_flight` has those that were submitted and not waited for, the oldest first."""

    def __init__(self, runner: Runner) -> None:
        self.in_flight: deque[InFlightStep] = deque()
        self.steps = self.rows = self.sequences = 0  # submitted so far
        self.growth_error: Exception | None = None  # why the pool could not grow
        self._runner = runner
        self._decode: DecodeBatch | None = None
        self._members: list[KvSequence] = []  # of the decode batch
        self._settings: list[SamplerSettings] = []
        # The last batch, if the next step may be the same.
        self._steady: tuple[Batch | None, list[SequenceState], list[tuple[SequenceState, int]]] = (None, [], [])

    def limits(self, options: EngineOptions) -> SchedulerLimits:
        """What a step may hold."""
        runner = self._runner
        rows, outputs = runner.max_tokens, min(runner.max_outputs, runner.max_tokens)
        running = min(outputs if options.parallel is None else min(options.parallel, outputs), runner.max_states)
        chunk = options.chunk_tokens or rows
        pages = runner.max_pages
        if options.cache_tokens is not None:
            pages = min(pages_for(options.cache_tokens), pages)
        elif runner.cache_pages is not None:
            pages = min(runner.cache_pages, pages)
        decode = bucket(running) if runner.deterministic else outputs  # all that a plan of decode rows holds
        return SchedulerLimits(
            rows,
            running,
            chunk,
            runner.fixed_chunk,
            options.share_prefixes,
            outputs,
            min(decode, outputs),
            pages,
            runner.config.recurrent,
            runner.max_spares if runner.config.recurrent else 1 << 31,
        )

    def submit(self, batch: Batch) -> bool:
        """One more step on its way; False: the pool cannot grow for it, which is known now. Then its pages must do."""
        try:
            step = self._submitted(batch)
        except (DeviceError, MemoryError) as problem:
            if not self.could_not_grow(batch):
                raise
            self.growth_error = problem
            return False
        self.in_flight.append(step)
        step.rows = len(batch.rows) if batch.decode else sum(rows.count for rows in batch.rows)
        step.has_prompt, step.verifies = not batch.decode and batch.has_prompt, bool(step.drafted)
        self.steps += 1
        self.sequences += len(batch.rows)
        self.rows += step.rows
        return True

    def _submitted(self, batch: Batch) -> InFlightStep:
        if batch is self._steady[0]:  # nothing changed since the last step
            assert self._decode is not None
            return InFlightStep(*self._steady[1:], self._decode.step())
        states = [rows.state for rows in batch.rows]
        sampled = [(rows.state, rows.state.kv_sequence.slot) for rows in batch.rows if rows.samples]
        if batch.decode:
            tokens = self._decode_step(states)
            fixed = all(used is state.owner.settings for used, state in zip(self._settings, states, strict=True))
            self._steady = (batch if fixed else None, states, sampled)
            return InFlightStep(states, sampled, tokens)
        # Logits that are read back come first: no others are read back with them.
        rows_of_step = sorted(batch.rows, key=lambda rows: not rows.state.host_sampled)
        places = iter(self._runner.pool.unused_slots(sum(rows.drafted for rows in rows_of_step)))
        chunks = [self._chunk(rows, places) for rows in rows_of_step]
        states_of_step = [rows.state for rows in rows_of_step]
        outputs, scores = _outputs(states_of_step, chunks), _scores(states_of_step, chunks)
        drafted = {
            rows.state: DraftedRows((rows.ids or ())[1:], chunk.places)
            for rows, chunk in zip(rows_of_step, chunks, strict=True)
            if rows.drafted
        }
        result = self._runner.step(chunks)
        return InFlightStep(states, sampled, result.tokens, result, outputs, scores, drafted)

    def _decode_step(self, states: list[SequenceState]) -> Tokens:
        settings = [state.owner.fixed_settings or state.owner.next_settings() for state in states]
        sequences = [state.kv_sequence for state in states]
        batch = self._decode
        if batch is None or sequences != self._members or any(map(is_not, settings, self._settings)):
            self._members, self._settings = [], settings
            if batch is None:
                batch = self._decode = self._runner.decode_batch(sequences, settings)
            else:
                batch.replace(sequences, settings)
            self._members = sequences
        return batch.step()

    def _chunk(self, rows: Rows, places: Iterator[int]) -> SequenceChunk:
        chunk = self._chunk_of(rows, places)
        images, sequence = rows.state.images, chunk.sequence
        if images is None or rows.ids is None:
            return chunk
        sequence.shift = images.shift  # of what follows the prompt
        ids = images.step_ids(rows.ids, sequence.length)
        return chunk._replace(ids=ids, images=images.chunk(sequence.length, rows.count))

    def _chunk_of(self, rows: Rows, places: Iterator[int]) -> SequenceChunk:
        state, sequence = rows.state, rows.state.kv_sequence
        if rows.ids is None and state.owner.fixed_settings is not None:  # most rows of most steps
            return SequenceChunk(sequence, None, "token", state.owner.fixed_settings)
        gives, count = _GIVES[state.owner.request.output], rows.count
        scores = state.owner.scores_of(sequence.length, count)
        if gives == "all logits":
            wanted = sequence.length + count > state.first_output
            return SequenceChunk(sequence, rows.ids, gives if wanted else "nothing")
        if gives == "nothing" or not rows.samples:
            return SequenceChunk(sequence, rows.ids, "nothing", scores=scores)
        if state.host_sampled:
            return SequenceChunk(sequence, rows.ids, "logits", scores=scores)
        settings = state.owner.next_settings()
        if settings.penalizes and not sequence.has_history:
            self._runner.set_history(sequence, state.tokens)
        if rows.drafted:
            drafted = state.owner.drafted_settings[: rows.drafted]
            return SequenceChunk(
                sequence, rows.ids, "tokens", settings, scores, drafted, list(islice(places, rows.drafted))
            )
        return SequenceChunk(sequence, rows.ids, gives, settings, scores)

    def could_not_grow(self, batch: Batch) -> bool:
        """After an error: is the pool as large as it can be, which is now known? Then its pages must do."""
        pool, context = self._runner.pool, self._runner.config.context
        needed = []
        for rows in batch.rows:
            sequence = rows.state.kv_sequence
            # A decode batch reserves the position after the next, too.
            needed.append((sequence, min(2, context - sequence.length) if batch.decode else rows.count))
        if not self._runner.usable or pool.missing(needed) == 0 or pool.max_pages == pool.pages:
            return False
        pool.max_pages = pool.pages
        return True

    def forget(self, state: SequenceState) -> None:
        """Nobody waits for its rows any more; nor for steps that have no others."""
        for step in list(self.in_flight):
            if state in step.states:
                step.remove(state)
                if not step.states:
                    self.in_flight.remove(step)

    def clear(self) -> None:
        """After an error: nothing is on its way."""
        self.in_flight.clear()
        self.release()

    def release(self) -> None:
        """Keep nothing of the last steps: their states and settings refer to much."""
        self._members, self._steady = [], (None, [], [])

    def close(self) -> None:
        """Nothing is recorded ahead any more."""
        if self._decode is not None:
            self._decode.close()
            self._decode = None


def _outputs(states: list[SequenceState], chunks: list[SequenceChunk]) -> dict[SequenceState, OutputRows]:
    """Rows of sequences that get hidden states or logits. Before the step, which moves their lengths on."""
    outputs, first = dict[SequenceState, OutputRows](), 0
    for state, chunk in zip(states, chunks, strict=True):
        if chunk.gives == "token":
            first += 1
            continue
        rows = chunk.rows if chunk.gives == "all logits" else int(chunk.gives != "nothing")
        if chunk.gives in ("hidden", "logits", "all logits"):
            outputs[state] = OutputRows(chunk.sequence.length, slice(first, first + rows))
        first += rows
    return outputs


def _scores(states: list[SequenceState], chunks: list[SequenceChunk]) -> dict[SequenceState, OutputRows]:
    """Of sequences whose prompts are scored, before the step, too."""
    scores, first = dict[SequenceState, OutputRows](), 0
    for state, chunk in zip(states, chunks, strict=True):
        if chunk.scores is not None:
            rows = len(chunk.scores.targets)
            scores[state] = OutputRows(chunk.sequence.length + chunk.scores.first, slice(first, first + rows))
            first += rows
    return scores
