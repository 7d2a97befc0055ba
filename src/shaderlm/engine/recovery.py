"""`Recovery`: what a failed step takes with it, and what goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import DeviceError, UnavailableError
from ..runtime.runner import Runner
from .handle import Handle
from .inbox import Inbox
from .mask_queue import MaskQueue
from .scheduler import Scheduler
from .step_core import StepCore

Finish = Callable[[list[Handle], str, BaseException | None], None]  # ends requests: reason, error


@dataclass(frozen=True)
class Recovery:
    """Of an engine with these parts."""

    runner: Runner
    core: StepCore
    scheduler: Scheduler
    inbox: Inbox
    masks: MaskQueue

    def recover(self, problem: BaseException, raising: Handle | None, finish: Finish) -> None:
        """A step failed, or was interrupted: what ran ends with the error.

        `raising` is the handle whose reader gets the exception as it is. Requests that wait go on, unless the device is
        lost, or this fails too.
        """
        try:
            self._fail_running(problem, raising, finish)
        except Exception as second:
            self._fail_all(second, finish)
        except BaseException:  # interrupted once more
            self._fail_running(problem, raising, finish)
            raise

    def _fail_running(self, problem: BaseException, raising: Handle | None, finish: Finish) -> None:
        interrupted = not isinstance(problem, Exception)
        with self.runner.lock:
            self.core.clear()
            if isinstance(problem, DeviceError) and not self.runner.usable:
                self.inbox.lost = DeviceError(str(problem))  # without what its traceback refers to
            failed = self.failed_handles(raising, interrupted) if self.inbox.lost is None else self.inbox.all_active()
            self.scheduler.reset([handle.sequence for handle in failed])
        error = problem
        if interrupted:  # Ctrl-C is for the thread that got it
            error = UnavailableError("the thread that ran the steps of this request was interrupted; ask again")
        if raising is not None:
            finish([raising], "error", None)
        finish(failed, "error", error)

    def failed_handles(self, raising: Handle | None, interrupted: bool) -> list[Handle]:
        """Those that ran: nobody knows what is in their caches. Those that wait, or are new, go on.

        `raising` fails in any case. Of an interruption, so does whoever waits for a mask, which may have been on its
        way from one thread to the other.
        """
        waiting, new, active = set(self.scheduler.waiting), self.inbox.new, self.inbox.all_active()

        def goes_on(handle: Handle) -> bool:
            if handle is raising or handle.sequence.over:  # interrupted while its sequence left the batch
                return False
            if handle in new or handle.id in self.inbox.restoring:
                return True
            if handle.waits_for_features:
                return True
            if handle.sequence not in waiting:
                return False
            return not handle.sequence.mask_pending or (not interrupted and self.masks.has(handle))

        # A turn that fails with nothing on its way would fail again.
        return [handle for handle in active if not goes_on(handle)] or active

    def _fail_all(self, problem: Exception, finish: Finish) -> None:
        """Nobody knows which sequences and pages there are: no request can run any more."""
        inbox = self.inbox
        failed = f"the engine failed ({problem!r}); close this model and load it again"
        with inbox.lock:
            inbox.lost = inbox.lost or DeviceError(failed)
            handles = inbox.all_active()
            for handle in handles:
                handle.sequence.over = True
            finish(handles, "error", inbox.lost)
