"""Masks of constrained sequences, computed by threads of their own while the engine steps the others.

A mask of llguidance takes 10 µs or several ms, and Python runs other threads meanwhile. These threads know neither the
engine nor its requests: they do not keep a model that nobody refers to.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ..runtime.adjusted import check_settings
from ..runtime.sampler_settings import SamplerSettings
from .request import Constraint

IN_PLACE_SECONDS = 100e-6  # a mask that takes less holds nobody up; another thread would take longer to begin with it
_MAX_THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))
_INTERPRETER_SECONDS = 0.02  # for which a thread may wait until Python lets it go on


class Mask(NamedTuple):
    """What became of a mask: settings that have it, None where nothing may follow, or an error."""

    number: int  # of the request
    settings: SamplerSettings | None
    seconds: float = 0.0  # that whoever steps is held up; of another thread, would be as far as is known
    error: BaseException | None = None


class _Job(NamedTuple):
    number: int
    constraint: Constraint
    settings: SamplerSettings
    vocabulary: int


def computed(
    number: int, constraint: Constraint, settings: SamplerSettings, vocabulary: int, *, in_place: bool = True
) -> Mask:
    """The mask of the next token. Whatever a constraint raises is of its request alone."""
    began, worked = time.perf_counter(), time.thread_time()
    try:
        mask = constraint.mask()
        worked, seconds = time.thread_time() - worked, time.perf_counter() - began
        if not in_place:  # while other threads run, unless it is for so long that the mask itself must have waited
            seconds = max(worked, seconds - _INTERPRETER_SECONDS)
        if mask is None:
            return Mask(number, None, seconds)
        settings = settings._replace(mask=mask)
        check_settings(settings, vocabulary, has_history=True)
    except Exception as problem:
        return Mask(number, None, error=problem)
    return Mask(number, settings, seconds)


class Masks:
    """Threads that compute masks. All methods but `wake` are called by whoever steps the engine, or closes it."""

    def __init__(self) -> None:
        # `put` of these queues may be called by signal handlers, at any time.
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[Mask | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ending: list[threading.Thread] = []  # that were told so, and may be at a last mask
        self._under_way = 0
        self._dropped: set[int] = set()  # numbers of requests that are over; threads look at it

    def submit(self, number: int, constraint: Constraint, settings: SamplerSettings, vocabulary: int) -> None:
        """Have a mask computed. `constraint` is not to be touched until it is there."""
        if self._under_way >= len(self._threads) < _MAX_THREADS:
            given = (self._jobs, self._done, self._dropped)
            thread = threading.Thread(target=_run, args=given, name="masks", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # no more threads can be started: those that there are must do
                if not self._threads:
                    raise
        self._jobs.put(_Job(number, constraint, settings, vocabulary))
        self._under_way += 1

    def taken(self) -> list[Mask]:
        """Those that are there."""
        found = list[Mask]()
        while not self._done.empty():
            self._take(found, 0.0)
        return found

    def wait(self, seconds: float | None) -> list[Mask]:
        """Until one is there, or `wake` is called."""
        found = list[Mask]()
        self._take(found, seconds)
        return found

    def _take(self, found: list[Mask], seconds: float | None) -> None:
        try:
            mask = self._done.get(timeout=seconds)
        except Empty:
            return
        if mask is not None:
            self._under_way -= 1
            self._dropped.discard(mask.number)
            found.append(mask)

    def drop(self, number: int) -> None:
        """The mask of a request is not wanted any more. It is not computed, unless a thread is at it."""
        self._dropped.add(number)

    def wake(self) -> None:
        """Whoever waits looks again. Any thread."""
        self._done.put(None)

    @property
    def has_threads(self) -> bool:
        """Are there any that may be at work?"""
        return any(thread.is_alive() for thread in (*self._threads, *self._ending))

    def release(self) -> None:
        """No masks are wanted any more: threads end when they have done theirs."""
        if not self._threads:
            return
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        self._ending = [thread for thread in (*self._ending, *self._threads) if thread.is_alive()]
        # Others than theirs, which a thread that is at its last mask does not use.
        self._jobs, self._done, self._threads, self._under_way = SimpleQueue(), SimpleQueue(), [], 0
        self._dropped = set()

    def join(self) -> None:
        """After `release`: until all threads have ended. A constraint that closes its model is one of them."""
        for thread in self._ending:
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        self.release()


def _run(jobs: SimpleQueue[_Job | None], done: SimpleQueue[Mask | None], dropped: set[int]) -> None:
    while (job := jobs.get()) is not None:
        try:
            wanted = job.number not in dropped
            mask = computed(*job, in_place=False) if wanted else Mask(job.number, None)
        except BaseException as problem:
            mask = Mask(job.number, None, error=problem)
        done.put(mask)
        del job, mask
