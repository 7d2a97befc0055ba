"""Watches submissions: what the host does when; and on the GPU timestamps, per submission or per dispatch.

A watch changes how submissions are recorded, and nothing of what they compute.
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

from .mailbox import Letter, Mailbox
from .record import AT_ONCE, Loaded, Prepared, Recorder, encode
from .stock import Stock

Grain = Literal["host", "submission", "dispatch"]
Queries = tuple[int, range]  # which set, and which of its queries
Nanoseconds = NDArray[np.float64]
MOST_QUERIES = 4096  # of one set, by the WebGPU standard

# The clocks that a watch may have, from the finest to the coarsest, in words for people.
IN_PASS = "timestamps in the pass"
BY_PASS = "timestamps, one pass per dispatch"
WALL = "wall clock"


@dataclass
class Submission:
    """One submission. Times in nanoseconds: the host's by its own clock, the GPU's since its first stamp of all."""

    queue: tuple[Loaded, ...]
    host: dict[str, tuple[int, int]]  # encode, finish (or take, if it was recorded ahead), submit: from, to
    # Begin, then the end of every dispatch; of the last one alone if the grain is a submission. Empty without a clock.
    ends: Nanoseconds
    ahead: dict[str, tuple[int, int]] = field(default_factory=dict)  # encode, finish by another thread


class Watch:
    """Records submissions while it is a device's `watch`; `collect` reads their timestamps."""

    def __init__(
        self,
        native: Any,
        mailbox: Mailbox,
        clock: str,
        grain: Grain,
        tick_ns: float,
        close_stocks: Callable[[], None] = lambda: None,
    ) -> None:
        self._native, self._mailbox, self._close_stocks = native, mailbox, close_stocks
        self._clock, self._grain, self._tick_ns = clock, grain, tick_ns
        self.takes_prepared = grain != "dispatch"
        self._sets: list[tuple[Any, int]] = []  # query sets, and how many of their queries are taken
        self._taking = threading.Lock()
        self._seen: list[tuple[Submission, Queries | None]] = []
        if clock != WALL and grain != "host":
            self._add_set()  # before anything is timed: some drivers take milliseconds

    def _add_set(self) -> None:
        self._sets.append((self._native.create_query_set(type="timestamp", count=MOST_QUERIES), 0))

    def submit(self, queue: Sequence[Loaded], post: Any) -> Letter | None:
        """What `Device.submit` does, watched."""
        if self._clock == WALL and self._grain == "dispatch":
            return self._one_by_one(queue, post)
        made = self.prepared(queue, post)
        submission, _ = made.watched
        submission.host, submission.ahead = submission.ahead, {}
        return self._handed_over(made)

    def prepared(self, queue: Sequence[Loaded], post: Any, turn: AbstractContextManager[Any] = AT_ONCE) -> Prepared:
        """What `submit` records, not yet submitted. Any thread may; it records while it is its turn."""
        with turn:
            began = time.perf_counter_ns()
            encoder = self._native.create_command_encoder()
            queries = None if self._clock == WALL or self._grain == "host" else self._record_stamped(encoder, queue)
            if queries is None:
                encode(encoder, queue)
            staging = self._mailbox.stage(encoder, post) if post is not None else None
            encoded = time.perf_counter_ns()
        commands = encoder.finish()
        spans = {"encode": (began, encoded), "finish": (encoded, time.perf_counter_ns())}
        return Prepared(commands, staging, (Submission(tuple(queue), {}, np.zeros(0), spans), queries))

    def submit_from(self, stock: Stock[Prepared]) -> Letter | None:
        """What `Device.submit_from` does, watched."""
        began = time.perf_counter_ns()
        made = stock.take()
        made.watched[0].host["take"] = (began, time.perf_counter_ns())
        return self._handed_over(made)

    def _handed_over(self, made: Prepared) -> Letter | None:
        began = time.perf_counter_ns()
        letter = self._mailbox.submit(made.commands, made.staging)
        made.watched[0].host["submit"] = (began, time.perf_counter_ns())
        # Only now are its queries going to be written: to read one that is not would be to wait for ever.
        self._seen.append(made.watched)
        return letter

    def collect(self) -> list[Submission]:
        """Everything that was submitted, with its times. Waits for the GPU, and forgets what it returns."""
        self._close_stocks()  # what is recorded ahead wants the queries that are given back here
        ticks = self._ticks()
        # As a float, a count of nanoseconds since 1970 would be rounded to 256.
        zero = min((found.min() for found in ticks.values()), default=np.uint64(0))
        for submission, queries in self._seen:
            if queries is not None:
                which, taken = queries
                submission.ends = (ticks[which, taken.start] - zero).astype(np.float64) * self._tick_ns
                if self._clock == BY_PASS and self._grain == "dispatch":  # begin and end of each: keep the ends
                    submission.ends = np.concatenate([submission.ends[:1], submission.ends[1::2]])
        found = [submission for submission, _ in self._seen]
        for native, _ in self._sets:
            native.destroy()
        self._seen, self._sets = [], []
        return found

    # queries ---------------------------------------------------------------------------------------------

    def _take(self, count: int) -> Queries:
        """The next queries of a set that has room for all of them."""
        assert count <= MOST_QUERIES, f"a submission of {count} stamps"
        with self._taking:
            if not self._sets or self._sets[-1][1] + count > MOST_QUERIES:
                self._add_set()
            native, taken = self._sets[-1]
            self._sets[-1] = (native, taken + count)
            return len(self._sets) - 1, range(taken, taken + count)

    def _ticks(self) -> dict[tuple[int, int], NDArray[np.uint64]]:
        """The stamps of every submission, by its set and its first query there. Neighbours are read together."""
        found = {}
        for which, (native, _) in enumerate(self._sets):
            taken = sorted((q[1] for _, q in self._seen if q is not None and q[0] == which), key=lambda q: q.start)
            for run in _runs(taken):
                first = run[0].start
                ticks = self._resolved(native, first, run[-1].stop - first)
                found.update({(which, each.start): ticks[each.start - first : each.stop - first] for each in run})
        return found

    def _resolved(self, queries: Any, first: int, count: int) -> NDArray[np.uint64]:
        import wgpu

        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        ticks = self._native.create_buffer(size=8 * MOST_QUERIES, usage=usage)
        encoder = self._native.create_command_encoder()
        encoder.resolve_query_set(queries, first, count, ticks, 0)
        self._native.queue.submit([encoder.finish()])
        read = np.frombuffer(self._native.queue.read_buffer(ticks, 0, 8 * count), np.uint64)
        ticks.destroy()
        return read

    # ways to record --------------------------------------------------------------------------------------

    def _record_stamped(self, encoder: Any, queue: Sequence[Loaded]) -> Queries:
        if self._grain == "dispatch":
            each = [record for loaded in queue for record in loaded.single]
        else:
            each = [_all_of(queue)]
        if self._clock == IN_PASS:
            which, taken = self._take(1 + len(each))
            compute_pass = encoder.begin_compute_pass()
            stamp = _stamper(compute_pass, self._sets[which][0])
            stamp(taken[0])
            for record, query in zip(each, taken[1:], strict=True):
                record(compute_pass)
                stamp(query)
            compute_pass.end()
            return which, taken
        which, taken = self._take(2 * len(each))
        for record, begin in zip(each, taken[::2], strict=True):
            stamps = {
                "query_set": self._sets[which][0],
                "beginning_of_pass_write_index": begin,
                "end_of_pass_write_index": begin + 1,
            }
            compute_pass = encoder.begin_compute_pass(timestamp_writes=stamps)
            record(compute_pass)
            compute_pass.end()
        return which, taken

    def _one_by_one(self, queue: Sequence[Loaded], post: Any) -> Letter | None:
        """Without timestamps: every dispatch is submitted alone and waited for. Includes the way there and back."""
        import wgpu

        usage = wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        fence = self._native.create_buffer(size=16, usage=usage)
        started = time.perf_counter_ns()
        ends = [started]
        for loaded in queue:
            for record in loaded.single:
                encoder = self._native.create_command_encoder()
                compute_pass = encoder.begin_compute_pass()
                record(compute_pass)
                compute_pass.end()
                self._native.queue.submit([encoder.finish()])
                self._native.queue.read_buffer(fence)
                ends.append(time.perf_counter_ns())
        fence.destroy()
        submission = Submission(tuple(queue), {"submit": (started, ends[-1])}, np.array(ends, np.float64))
        self._seen.append((submission, None))
        if post is None:
            return None
        encoder = self._native.create_command_encoder()
        staging = self._mailbox.stage(encoder, post)
        return self._mailbox.submit(encoder.finish(), staging)


def _runs(ranges: Sequence[range]) -> list[list[range]]:
    """Ranges in order, those together that follow each other without a hole."""
    found: list[list[range]] = []
    for each in ranges:
        if found and found[-1][-1].stop == each.start:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _all_of(queue: Sequence[Loaded]) -> Recorder:
    def record(compute_pass: Any) -> None:
        for loaded in queue:
            loaded.encode(compute_pass)

    return record


def _stamper(compute_pass: Any, queries: Any) -> Callable[[int], None]:
    """Writes a timestamp into an open pass: straight where this wgpu has the function, else by its public name."""
    try:
        from wgpu.backends.wgpu_native import lib

        write, handle, target = lib.wgpuComputePassEncoderWriteTimestamp, compute_pass._internal, queries._internal
        return lambda index: write(handle, target, index)
    except (ImportError, AttributeError):
        from wgpu.backends.wgpu_native.extras import write_timestamp

        return lambda index: write_timestamp(compute_pass, queries, index)
