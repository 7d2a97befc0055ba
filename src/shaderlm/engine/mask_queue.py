"""`MaskQueue`: which requests wait for the masks of their next tokens, and who computes those.

Whoever steps the engine computes masks that are known to be quick, and those of a single caller. Threads of `Masks`
compute the others. A constraint is handed over after the text of the last token was made, which may end the request and
ask it for the last time: two threads never use it at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from .handle import Handle
from .masks import IN_PLACE_SECONDS, Mask, Masks, computed


class MaskQueue:
    """Masks that are to be computed, and those that are being computed. All but `wake` is for whoever steps."""

    def __init__(self, vocabulary: int) -> None:
        self.threads = Masks()
        self.is_waiting = False  # whoever steps waits for a mask
        self._vocabulary = vocabulary
        self._next: deque[Handle] = deque()  # whose masks are to be computed
        self._computing: set[int] = set()  # ids of those whose masks are being computed

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

    def compute(self, handle: Handle) -> Mask:
        """Its next mask, here and now."""
        assert handle.constraint is not None
        return computed(handle.id, handle.constraint, handle.unmasked_settings(), self._vocabulary)

    def dispatch(self, active: Mapping[int, Handle]) -> Iterator[Mask]:
        """Have masks computed, of requests that are not over. Gives those that are computed here."""
        while self._next:
            handle = self._next.popleft()
            if handle.id not in active:
                continue
            if self.in_place(handle, active):
                yield self.compute(handle)
                continue
            assert handle.constraint is not None
            try:
                self.threads.submit(handle.id, handle.constraint, handle.unmasked_settings(), self._vocabulary)
            except RuntimeError as problem:  # no thread can be started
                yield Mask(handle.id, None, error=problem)
                continue
            self._computing.add(handle.id)

    def ready(self) -> list[Mask]:
        """Those that threads have computed."""
        return self._taken(self.threads.taken())

    def wait(self, seconds: float | None, has_work: Callable[[], object]) -> list[Mask]:
        """Until a thread has computed one, time is over, or `wake` is called; not at all where there is work."""
        if not self._computing or self._next:  # those that came during this turn are handed over in the next
            return []
        self.is_waiting = True
        try:
            return [] if has_work() else self._taken(self.threads.wait(seconds))
        finally:
            self.is_waiting = False

    def _taken(self, masks: list[Mask]) -> list[Mask]:
        self._computing.difference_update(mask.number for mask in masks)
        return masks

    def wake(self) -> None:
        """Whoever waits for masks looks again. Any thread."""
        if self.is_waiting:
            self.threads.wake()

    def drop(self, handle: Handle) -> None:
        """A request is over."""
        if handle.id in self._computing:
            self._computing.discard(handle.id)
            self.threads.drop(handle.id)

    def release(self) -> None:
        """No request is left: threads end."""
        self._next.clear()
        self.threads.release()
