"""`MaskQueue`: which requests wait for the masks of their next tokens, and who computes those.

Whoever steps the engine computes masks that are known to be quick, and those of a single caller. A few threads compute
the others. A constraint is handed over after the text of the last token was made, which may end the request and ask it
for the last time: two threads never use it at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue

from .handle import Handle
from .masks import IN_PLACE_SECONDS, Mask, MaskJob, computed, run_jobs

_MAX_THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))


class MaskQueue:
    """Masks that are to be computed, and those that are being computed. All but `wake` is for whoever steps."""

    def __init__(self, vocabulary: int) -> None:
        self.is_waiting = False  # whoever steps waits for a mask
        self._vocabulary = vocabulary
        self._next: deque[Handle] = deque()  # whose masks are to be computed
        self._computing: set[int] = set()  # ids of those whose masks are being computed
        self._threads: list[threading.Thread] = []
        self._ending: list[threading.Thread] = []  # that were told so, and may be at a last mask
        self._begin()

    def _begin(self) -> None:
        # `put` of these queues may be called by signal handlers, at any time.
        self._jobs: SimpleQueue[MaskJob | None] = SimpleQueue()
        self._done: SimpleQueue[Mask | None] = SimpleQueue()
        self._under_way = 0  # jobs that threads have, dropped ones too
        self._dropped: set[int] = set()  # ids of requests that are over; threads look at it

    def __bool__(self) -> bool:
        """Is any mask to come?"""
        return bool(self._next or self._computing)

    def add(self, handle: Handle) -> None:
        """Its next mask is to be computed."""
        self._next.append(handle)

    def has(self, handle: Handle) -> bool:
        """Will there be a mask for it?"""
        return handle.id in self._computing or handle in self._next

    def in_place(self, handle: Handle, active: Mapping[int, Handle]) -> bool:
        """Is its next mask not worth another thread?"""
        if handle.pulled and len(active) == 1:
            return True  # nobody else waits
        return handle.mask_seconds is not None and handle.mask_seconds <= IN_PLACE_SECONDS

    def accept(self, handle: Handle, token: int, active: Mapping[int, Handle]) -> Mask | None:
        """This token came. What may come next; None: not known yet."""
        assert handle.constraint is not None
        state, handle.masked = handle.sequence, None
        try:
            goes_on = handle.constraint.accept(token)
        except Exception as problem:  # of this request alone
            return Mask(handle.id, None, error=problem)
        if goes_on is False:
            return Mask(handle.id, None)
        if goes_on and not state.remaining:
            return Mask(handle.id, handle.settings)  # which nothing is sampled with
        state.mask_pending = True
        if self.in_place(handle, active):
            return computed(self._job(handle), in_place=True)
        self.add(handle)
        return None

    def _job(self, handle: Handle) -> MaskJob:
        assert handle.constraint is not None
        return MaskJob(handle.id, handle.constraint, handle.unmasked_settings(), self._vocabulary)

    def dispatch(self, active: Mapping[int, Handle]) -> Iterator[Mask]:
        """Have masks computed, of requests that are not over. Gives those that are computed here."""
        while self._next:
            handle = self._next.popleft()
            if handle.id not in active:
                continue
            if self.in_place(handle, active):
                yield computed(self._job(handle), in_place=True)
                continue
            try:
                if self._under_way >= len(self._threads) < _MAX_THREADS:
                    self._start_thread()
            except RuntimeError as problem:  # no thread can be started: those that there are must do
                if not self._threads:
                    yield Mask(handle.id, None, error=problem)
                    continue
            self._jobs.put(self._job(handle))
            self._under_way += 1
            self._computing.add(handle.id)

    def _start_thread(self) -> None:
        queues = (self._jobs, self._done, self._dropped)
        thread = threading.Thread(target=run_jobs, args=queues, name="masks", daemon=True)
        thread.start()
        self._threads.append(thread)

    def ready(self) -> list[Mask]:
        """Those that threads have computed."""
        masks = list[Mask]()
        while not self._done.empty():
            masks += self.await_mask(0.0)
        return masks

    def wait(self, seconds: float | None, has_work: Callable[[], object], *, woken: bool = False) -> list[Mask]:
        """Until a thread has computed one, time is over, or `wake` is called; not at all where there is work.

        woken: somebody else will call `wake`. Otherwise there is something to wait for only if masks are computed.
        """
        if not (self._computing or woken) or self._next:  # those that came during this turn are handed over in the next
            return []
        self.is_waiting = True
        try:
            return [] if has_work() else self.await_mask(seconds)
        finally:
            self.is_waiting = False

    def await_mask(self, seconds: float | None) -> list[Mask]:
        """The next one, if it comes within this time, and before `wake` is called."""
        try:
            mask = self._done.get(timeout=seconds)
        except Empty:
            return []
        if mask is None:
            return []
        self._under_way -= 1
        self._dropped.discard(mask.number)
        self._computing.discard(mask.number)
        return [mask]

    def wake(self) -> None:
        """Whoever waits for masks looks again. Any thread."""
        if self.is_waiting:
            self._done.put(None)

    def drop(self, handle: Handle) -> None:
        """A request is over. Its mask is not computed, unless a thread is at it."""
        if handle.id in self._computing:
            self._computing.discard(handle.id)
            self._dropped.add(handle.id)

    @property
    def has_threads(self) -> bool:
        """Are there any that may be at work?"""
        return any(thread.is_alive() for thread in (*self._threads, *self._ending))

    def release(self) -> None:
        """No request is left: threads end when they have done their masks."""
        self._next.clear()
        if not self._threads:
            return
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        self._ending = [thread for thread in (*self._ending, *self._threads) if thread.is_alive()]
        self._threads = []
        self._begin()  # with other queues than theirs, which a thread that is at its last mask does not use

    def join(self) -> None:
        """After `release`: until all threads have ended. A constraint that closes its model is one of them."""
        for thread in self._ending:
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        self.release()
