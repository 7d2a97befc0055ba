"""`Inbox`: the requests of an engine, and what any thread asks of them, for the thread that steps."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque

from ..errors import DeviceError, UnavailableError
from .handle import Handle


class Inbox:
    """Requests that are not over, those of them that are new, those to be cancelled, and deadlines.

    `lock` covers all of it. It is reentrant: a signal handler may close the model. `new` and `cancels` may be read and
    appended to without it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.active: dict[int, Handle] = {}
        self.new: deque[Handle] = deque()
        self.cancels: deque[Handle] = deque()
        self.restoring = set[int]()  # ids of requests whose prompts are looked for on disk; they are new afterwards
        self.closed = self.draining = False
        self.lost: DeviceError | None = None  # the device is, or nobody knows what is in the cache
        self._idle = threading.Condition(self.lock)
        self._deadlines: list[tuple[float, int]] = []  # with ids; a heap

    def check_open(self) -> None:
        """May there be more requests?"""
        if self.closed:
            raise UnavailableError("this model is closed; load it again")
        if self.draining:
            raise UnavailableError("this model takes no more requests: it is about to end")
        if self.lost is not None:
            raise self.lost

    def add(self, handle: Handle) -> None:
        """A new request. With `lock` held."""
        handle.submitted_at = time.perf_counter()
        if handle.request.timeout is not None:
            if len(self._deadlines) > 64 + 2 * len(self.active):  # most of them are over
                self._deadlines = sorted(each for each in self._deadlines if each[1] in self.active)
            heapq.heappush(self._deadlines, (handle.submitted_at + handle.request.timeout, handle.id))
        self.new.append(handle)
        self.active[handle.id] = handle
        if handle.cancelled:  # during one of the lines above
            self.cancels.append(handle)

    def remove(self, handle: Handle) -> bool:
        """A request is over. Was it the last one? With `lock` held."""
        if handle in self.new:  # first: a handle that is over and new would be admitted
            self.new.remove(handle)
        self.active.pop(handle.id, None)
        if self.active:
            return False
        self._idle.notify_all()
        return True

    def all_active(self) -> list[Handle]:
        """Requests that are not over."""
        with self.lock:
            return list(self.active.values())

    def late(self) -> list[Handle]:
        """Requests whose deadlines are over, each once."""
        handles = list[Handle]()
        if not self._deadlines or self._deadlines[0][0] > (now := time.perf_counter()):
            return handles
        with self.lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                handle = self.active.get(heapq.heappop(self._deadlines)[1])
                if handle is not None:
                    handles.append(handle)
        return handles

    def seconds_to_deadline(self) -> float | None:
        """Until the first deadline; None: there is none."""
        deadlines = self._deadlines  # which another thread may replace
        return max(0.0, deadlines[0][0] - time.perf_counter()) if deadlines else None

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Until there is no request. False: time is over, and some are left."""
        with self._idle:
            return self._idle.wait_for(lambda: not self.active, timeout)
