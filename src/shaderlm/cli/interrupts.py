"""Ctrl-C while C code calls back into Python: there the exception is lost, and here it is raised once more.

A driver calls back while a device is opened or a buffer is mapped. A KeyboardInterrupt in such a function cannot pass
through C: Python reports it to `sys.unraisablehook` and goes on, with a result missing that somebody waits for.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any

_AGAIN_SECONDS = 0.05
_BLAMED_SECONDS = 1.0


class LostInterrupts:
    """A context in which lost interrupts are raised again in the main thread, a moment later."""

    def __init__(self) -> None:
        self._lost_at = float("-inf")
        self._lost: SimpleQueue[bool] = SimpleQueue()  # False: nothing more will be lost

    def just_now(self) -> bool:
        """Was one lost a moment ago, so that an exception is likely to come from it?"""
        return time.monotonic() - self._lost_at < _BLAMED_SECONDS

    def _hook(self, report: Any) -> None:
        if not issubclass(report.exc_type, KeyboardInterrupt):
            self._before(report)
            return
        # Nothing here waits: on a busy machine the next interrupt could come before the hook has ended.
        try:
            self._lost_at = time.monotonic()
            self._lost.put(True)
        except KeyboardInterrupt:
            self._lost.put(True)

    def _raise_again(self) -> None:
        lost = self._lost.get()
        while lost:
            time.sleep(_AGAIN_SECONDS)
            # One Ctrl-C may be reported more than once: by a callback, and by what handles the callback's errors.
            while lost and not self._lost.empty():
                lost = self._lost.get()
            if lost:
                _thread.interrupt_main()
                lost = self._lost.get()

    def __enter__(self) -> LostInterrupts:
        threading.Thread(target=self._raise_again, name="interrupts", daemon=True).start()
        self._before, sys.unraisablehook = sys.unraisablehook, self._hook
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._before
        self._lost.put(False)
