"""Which requests a failed step takes with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .handle import Handle
from .mask_queue import MaskQueue
from .scheduler import SequenceState


def failed_handles(
    active: Sequence[Handle],
    raising: Handle | None,
    waiting: Iterable[SequenceState],
    new: Collection[Handle],
    masks: MaskQueue,
    interrupted: bool,
) -> Sequence[Handle]:
    """Those that ran: nobody knows what is in their caches. Those that wait, or are new, go on.

    `raising` fails in any case: its reader gets the exception. Of an interruption, so does whoever waits for a mask,
    which may have been on its way from one thread to the other.
    """
    unstarted = set(waiting)

    def goes_on(handle: Handle) -> bool:
        if handle is raising:
            return False
        if handle in new:
            return True
        if handle.sequence not in unstarted:
            return False
        return not handle.sequence.mask_pending or (not interrupted and masks.has(handle))

    # A turn that fails with nothing on its way would fail again.
    return [handle for handle in active if not goes_on(handle)] or active
