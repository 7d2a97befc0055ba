"""Sequences that decode together on a GPU.

As long as the same sequences go on, the records of the next step are made on the device by the sampler, so that the
host writes nothing: command buffers are recorded ahead by other threads, and a step is one submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

from ..compile.steps import Head
from ..gpu import BoundProgram, Buffer, CommandBuffer, CommandBufferPool, PendingReadBack
from ..graph.batch import CONTEXTS, PAGE, last_key
from ..models.config import StepSpec
from .adjusted import LogitAdjustments, LogprobRequest
from .gpu_steps import GpuSteps
from .pages import KvSequence
from .runner import DecodeBatch, Tokens, decode_chunks, head_kind, padded_batch
from .sampler_settings import SamplerSettings

_NEVER = 1 << 31
_KEPT_POOLS = 8  # of other plans, beside the one in use: there is one for each power of two of rows


class _Recorded(NamedTuple):
    """Command buffers that are recorded ahead, for which programs, and what they read back."""

    programs: list[BoundProgram]
    region: tuple[Buffer, int]
    pool: CommandBufferPool[CommandBuffer]


class GpuDecode(DecodeBatch):
    """Made by `GpuRunner.decode_batch`."""

    def __init__(self, runner: GpuSteps, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> None:
        self._runner = runner
        self.replace(sequences, settings)
        self._adjusted: LogitAdjustments | None = None
        self._requests: tuple[LogprobRequest, ...] | None = None  # where log probabilities come back with the tokens
        self._keys: tuple[StepSpec, Head] | None = None
        self._programs: list[BoundProgram] = []
        self._last_key = 0  # of the context class
        self._prepare_at = 0  # the length at which the plan of the next class is wanted soon
        self._pool: CommandBufferPool[CommandBuffer] | None = None
        self._region: tuple[Buffer, int] | None = None  # what its command buffers read back
        # What is recorded and not submitted is never freed by wgpu: 0.6 MB each on an H200. So it is kept for later.
        self._recorded: dict[tuple[StepSpec, Head], _Recorded] = {}

    def replace(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> None:
        """Other sequences or settings from now on. The pool of command buffers is kept if it runs the same plans."""
        with self._runner.lock:
            if self._runner.written_by is self:
                self._runner.written_by = None
            self._lengths: list[int] = []  # as the records on the device have them
            self._sequences, self._parts = list(sequences), decode_chunks(sequences, settings)
            self._kind = head_kind(self._parts)

    def step(self) -> Tokens:
        """Run one step without waiting for it."""
        runner = self._runner
        with runner.lock:
            runner._check_open()
            lengths = [sequence.length for sequence in self._sequences]
            written = runner.written_by is self and lengths == self._lengths
            if not written or self._pages_end(lengths):
                runner._check_parts(self._parts)
                self._extend()
                self._choose()
            elif self._keys is None or max(lengths) >= self._last_key:
                self._choose()
            if not written:
                self._write()
            if max(lengths) >= self._prepare_at:
                self._prepare_next()
            self._lengths = []  # if this fails, nobody knows what the records on the device are
            pending = self._submit()
            for sequence in self._sequences:
                sequence.length += 1
            self._lengths = [length + 1 for length in lengths]
            return runner.tokens(pending, self._requests)

    def _pages_end(self, lengths: Sequence[int]) -> bool:
        """Does a sequence lack the page of the position after the next? The sampler looks it up for the next record.

        True too where the context is full, which is refused.
        """
        context = self._runner.config.context
        pairs = zip(self._sequences, lengths, strict=True)
        return any(length >= context or len(each.pages) * PAGE < min(length + 2, context) for each, length in pairs)

    def _extend(self) -> None:
        context = self._runner.config.context
        self._runner._reserve([(each, min(2, context - each.length)) for each in self._sequences])
        self._adjusted = self._requests = None
        if self._kind == "adjusted":
            self._adjusted = self._runner._adjusted(self._parts)
            self._requests = self._adjusted.requests
            self._runner.reserve_adjusted(self._adjusted, [each.slot for each in self._sequences])

    def _write(self) -> None:
        """The records of this step, where the device does not have them."""
        runner = self._runner
        assert self._keys is not None
        records, outputs = runner._records(self._parts), runner._outputs(self._parts)
        runner.written_by = None
        runner.write_batch(padded_batch(records, self._keys[0].tokens, len(outputs)), outputs, self._adjusted)
        if self._keys[0].images:  # shifts of positions, which stay as the records move on
            runner.write_images(self._parts)
        runner.written_by = self
        runner._end_histories(self._parts)

    def _choose(self) -> None:
        """The plans for the lengths as they are, bound to today's buffers."""
        runner = self._runner
        width = runner.config.head_width
        keys, rows = max(sequence.length for sequence in self._sequences) + 1, len(self._parts)
        paged = runner.step_rows(rows, decode=True) > 1 or not self._sequences[0].contiguous
        step = runner.step_of(rows, keys, decode=True, paged=paged, images=runner.has_images(self._parts))
        plans = (step, runner.head(step.tokens, step.tokens, self._kind, paged))
        programs = runner.bound_all(plans)
        region = runner.token_region(self._requests)
        same = plans == self._keys and all(map(is_, programs, self._programs))
        if not same or (self._pool is not None and self._region != region):
            recorded = self._recorded.pop(plans, None)
            self._put_aside()
            self._take_up(recorded, programs, region)
        self._keys, self._programs = plans, programs
        self._last_key = last_key(step.context, width)
        # A quarter of the class is left then: a tenth of a second, which is what making and compiling a plan takes. It
        # takes the recording threads' time, so that generations that end before do without.
        longer = any(each.expected is None or each.expected > self._last_key for each in self._sequences)
        self._prepare_at = self._last_key * 3 // 4 if longer else _NEVER

    def _put_aside(self) -> None:
        """Keep what is recorded for the plans that ran until now; the oldest of what is kept goes."""
        pool, self._pool = self._pool, None
        if pool is None or pool.closed:
            return
        assert self._keys is not None
        assert self._region is not None
        other = self._recorded.pop(self._keys, None)
        self._recorded[self._keys] = _Recorded(self._programs, self._region, pool)
        if other is None and len(self._recorded) > _KEPT_POOLS:
            other = self._recorded.pop(next(iter(self._recorded)))
        if other is not None:
            other.pool.close()

    def _take_up(self, recorded: _Recorded | None, programs: list[BoundProgram], region: tuple[Buffer, int]) -> None:
        """Go on with what was recorded for these plans, if it is what would be recorded now."""
        if recorded is None:
            return
        if not recorded.pool.closed and recorded.region == region and all(map(is_, programs, recorded.programs)):
            self._pool, self._region = recorded.pool, region
        else:
            recorded.pool.close()

    def _prepare_next(self) -> None:
        self._prepare_at = _NEVER
        assert self._keys is not None
        step = self._keys[0]
        following = CONTEXTS[CONTEXTS.index(step.context) + 1 :]
        if following:
            self._runner.prepare(step._replace(context=following[0]))

    def _submit(self) -> PendingReadBack:
        runner = self._runner
        device = runner.device
        if self._pool is None or self._pool.closed:
            region = self._region = runner.token_region(self._requests)
            self._pool = device.command_pool(self._programs, region)
            if self._pool is None:
                pending = device.submit(self._programs, region)
                assert pending is not None
                return pending
        try:
            pending = device.submit_from(self._pool)
            assert pending is not None
            return pending
        except BaseException:  # Ctrl-C too: the pool may be one short
            self.close()
            raise

    def close(self) -> None:
        """Nothing is recorded ahead any more, until the next step."""
        with self._runner.lock:
            pool, self._pool = self._pool, None
            recorded, self._recorded = self._recorded, {}
            self._keys, self._programs = None, []
            if self._runner.written_by is self:
                self._runner.written_by = None
            for each in (pool, *(other.pool for other in recorded.values())):
                if each is not None:
                    each.close()


class GpuRunner(GpuSteps):
    """A model on a GPU: steps of any rows, and sequences that decode together."""

    def decode_batch(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> DecodeBatch:
        """Sequences to decode together."""
        batch = GpuDecode(self, sequences, settings)
        self._decodes.add(batch)
        return batch
