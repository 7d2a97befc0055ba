"""Have the drivers of GPUs been started, and is this the process that did it? A fork has none of their threads."""

from __future__ import annotations

import os

from ..errors import DeviceError

_FORKED = (
    "this process is a fork of one that started GPU drivers, which do not work in both. Load the model after the fork "
    "alone, or load it again in processes that multiprocessing starts by 'spawn'"
)


class Drivers:
    """Those of this process. What a fork waits for never comes, so nothing is asked of them there."""

    started = forked = False

    def start(self) -> None:
        """Before adapters are looked for, and before any lock: another thread of the parent may have had it."""
        self.check()
        self.started = True

    def check(self) -> None:
        """In a fork, a DeviceError."""
        if self.forked:
            raise DeviceError(_FORKED)

    def after_fork(self) -> None:
        """In the child."""
        self.forked = self.started


DRIVERS = Drivers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=DRIVERS.after_fork)
