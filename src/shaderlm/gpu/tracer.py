"""Traces submissions: what the host does when; and on the GPU timestamps, per submission or per dispatch.

A tracer changes how submissions are recorded, and nothing of what they compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .queue import NO_TURNS, Queue
from .read_back import PendingReadBack
from .recording import BoundProgram, CommandBuffer, ReadBack, encode
from .webgpu_h import Encoder, Recorder

Grain = Literal["host", "submission", "dispatch"]
Queries = tuple[int, range]  # which set, and which of its queries
Nanoseconds = NDArray[np.float64]
MAX_QUERIES = 4096  # of one set, by the WebGPU standard

# The clocks that a tracer may have, from the finest to the coarsest, in words for people.
IN_PASS = "timestamps in the pass"
BY_PASS = "timestamps, one pass per dispatch"
WALL = "wall clock"


@dataclass
class Submission:
    """One submission. Times in nanoseconds: the host's by its own clock, the GPU's since its first timestamp of all."""

    programs: tuple[BoundProgram, ...]
    host: dict[str, tuple[int, int]]  # encode, finish (or take, if it was recorded ahead), submit: from, to
    # Begin, then the end of every dispatch; of the last one alone if the grain is a submission. Empty without a clock.
    ends: Nanoseconds
    ahead: dict[str, tuple[int, int]] = field(default_factory=dict)  # encode, finish by another thread


class Tracer:
    """Records submissions while it is a device's tracer; `collect` reads their timestamps."""

    def __init__(self, queue: Queue, clock: str, grain: Grain, close_pools: Callable[[], None]) -> None:
        self._queue, self._native, self._ring = queue, queue.native, queue.ring
        self._clock, self._grain, self._close_pools = clock, grain, close_pools
        self.takes_recorded = grain != "dispatch"
        self._sets: list[tuple[Any, int]] = []  # query sets, and how many of their queries are taken
        self._taking = threading.Lock()
        self._seen: list[tuple[Submission, Queries | None]] = []
        if clock != WALL and grain != "host":
            self._add_set()  # before anything is timed: some drivers take milliseconds

    def _add_set(self) -> None:
        self._sets.append((self._native.create_query_set(MAX_QUERIES), 0))

    def run(self, programs: Sequence[BoundProgram], read_back: ReadBack | None) -> PendingReadBack | None:
        """Record and submit; every dispatch by itself where it is to be timed and there are no timestamps."""
        if self._clock == WALL and self._grain == "dispatch":
            self._run_one_by_one(programs)
            return self._queue.submit(self._queue.record((), read_back))
        commands = self.record(programs, read_back)
        submission: Submission = commands.traced[0]
        submission.host, submission.ahead = submission.ahead, {}  # this thread recorded it
        return self.submit(commands)

    def record(
        self,
        programs: Sequence[BoundProgram],
        read_back: ReadBack | None,
        turn: AbstractContextManager[Any] = NO_TURNS,
    ) -> CommandBuffer:
        """A command buffer of these programs. Any thread may; it records while it is its turn."""
        with turn:
            began = time.perf_counter_ns()
            encoder = self._native.create_encoder()
            timed = self._clock != WALL and self._grain != "host"
            queries = self._record_timed(encoder, programs) if timed else None
            if queries is None:
                encode(encoder, programs)
            staged = self._ring.stage(encoder, *read_back) if read_back is not None else None
            encoded = time.perf_counter_ns()
        commands = encoder.finish()
        spans = {"encode": (began, encoded), "finish": (encoded, time.perf_counter_ns())}
        submission = Submission(tuple(programs), {}, np.zeros(0), spans)
        return CommandBuffer(commands, programs, staged, (submission, queries))

    def note(self, commands: CommandBuffer, name: str, began: int) -> None:
        """The host did something for a command buffer, from then until now."""
        commands.traced[0].host[name] = (began, time.perf_counter_ns())

    def submit(self, commands: CommandBuffer) -> PendingReadBack | None:
        """Submit what was recorded here, and note how long that takes."""
        began = time.perf_counter_ns()
        pending = self._queue.submit(commands)
        self.note(commands, "submit", began)
        # Only now are its queries going to be written: to read one that is not would be to wait for ever.
        self._seen.append(commands.traced)
        return pending

    def collect(self) -> list[Submission]:
        """Everything that was submitted, with its times. Waits for the GPU, and forgets what it returns."""
        self._close_pools()  # what is recorded ahead wants the queries that are given back here
        ticks = self._ticks()
        # As a float, a count of nanoseconds since 1970 would be rounded to 256.
        zero = min((each.min() for each in ticks.values()), default=np.uint64(0))
        for submission, queries in self._seen:
            if queries is not None:
                which, indices = queries
                submission.ends = (ticks[which, indices.start] - zero).astype(np.float64) * self._native.tick_ns
                if self._clock == BY_PASS and self._grain == "dispatch":  # begin and end of each: keep the ends
                    submission.ends = np.concatenate([submission.ends[:1], submission.ends[1::2]])
        submissions = [submission for submission, _ in self._seen]
        self._seen, self._sets = [], []
        return submissions

    # queries ---------------------------------------------------------------------------------------------

    def _take(self, count: int) -> Queries:
        """The next queries of a set that has room for all of them."""
        assert count <= MAX_QUERIES, f"a submission of {count} timestamps"
        with self._taking:
            if not self._sets or self._sets[-1][1] + count > MAX_QUERIES:
                self._add_set()
            native, first = self._sets[-1]
            self._sets[-1] = (native, first + count)
            return len(self._sets) - 1, range(first, first + count)

    def _ticks(self) -> dict[tuple[int, int], NDArray[np.uint64]]:
        """The ticks of every submission, by its set and its first query there. Neighbours are read together."""
        ticks_of = {}
        for which, (queries, _) in enumerate(self._sets):
            ranges = sorted((q[1] for _, q in self._seen if q is not None and q[0] == which), key=lambda q: q.start)
            for run in _runs(ranges):
                first = run[0].start
                ticks = self._resolved(queries, first, run[-1].stop - first)
                ticks_of.update({(which, each.start): ticks[each.start - first : each.stop - first] for each in run})
        return ticks_of

    def _resolved(self, queries: Any, first: int, count: int) -> NDArray[np.uint64]:
        buffer = self._native.create_buffer(8 * MAX_QUERIES, "timestamps")
        encoder = self._native.create_encoder()
        encoder.resolve(queries, first, count, buffer)
        ticks: NDArray[np.uint64] = self._queue.read(encoder, (buffer, 8 * count)).view(np.uint64)
        buffer.destroy()
        return ticks

    # ways to record --------------------------------------------------------------------------------------

    def _record_timed(self, encoder: Encoder, programs: Sequence[BoundProgram]) -> Queries:
        if self._grain == "dispatch":
            each = [record for bound in programs for record in bound.single]
        else:
            each = [_all_of(programs)]
        if self._clock == IN_PASS:
            which, indices = self._take(1 + len(each))
            queries = self._sets[which][0]
            compute_pass = encoder.begin_pass()
            compute_pass.timestamp(queries, indices[0])
            for record, query in zip(each, indices[1:], strict=True):
                record(compute_pass)
                compute_pass.timestamp(queries, query)
            compute_pass.end()
            return which, indices
        which, indices = self._take(2 * len(each))
        for record, begin in zip(each, indices[::2], strict=True):
            compute_pass = encoder.begin_pass((self._sets[which][0], begin, begin + 1))
            record(compute_pass)
            compute_pass.end()
        return which, indices

    def _run_one_by_one(self, programs: Sequence[BoundProgram]) -> None:
        """Without timestamps: every dispatch is submitted alone and waited for. Includes the way there and back."""
        started = time.perf_counter_ns()
        ends = [started]
        for bound in programs:
            for record in bound.single:
                encoder = self._native.create_encoder()
                compute_pass = encoder.begin_pass()
                record(compute_pass)
                compute_pass.end()
                self._queue.run(encoder.finish())
                ends.append(time.perf_counter_ns())
        host = {"submit": (started, ends[-1])}
        self._seen.append((Submission(tuple(programs), host, np.array(ends, np.float64)), None))


def _runs(ranges: Sequence[range]) -> list[list[range]]:
    """Ranges in order, those together that follow each other without a hole."""
    runs: list[list[range]] = []
    for each in ranges:
        if runs and runs[-1][-1].stop == each.start:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _all_of(programs: Sequence[BoundProgram]) -> Recorder:
    def record(compute_pass: Any) -> None:
        for bound in programs:
            bound.record(compute_pass)

    return record
