"""Ctrl-C while C code calls back into Python: there the exception is lost, and here it is raised once more.

A driver calls back while a device is opened or a buffer is mapped. A KeyboardInterrupt in such a function cannot pass
through C: Python reports it to `sys.unraisablehook` and goes on, with a result missing that somebody waits for.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from typing import Any

_AGAIN_SECONDS = 0.05
_BLAMED_SECONDS = 1.0


class LostInterrupts:
    """A context in which lost interrupts are raised again in the main thread, a moment later."""

    def __init__(self) -> None:
        self._lost_at = float("-inf")
        self._timer: threading.Timer | None = None

    def just_now(self) -> bool:
        """Was one lost a moment ago, so that an exception is likely to come from it?"""
        return time.monotonic() - self._lost_at < _BLAMED_SECONDS

    def _hook(self, report: Any) -> None:
        if not issubclass(report.exc_type, KeyboardInterrupt):
            self._before(report)
            return
        self._lost_at = time.monotonic()
        self._timer = threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> LostInterrupts:
        self._before, sys.unraisablehook = sys.unraisablehook, self._hook
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._before
        if self._timer is not None:
            self._timer.cancel()
