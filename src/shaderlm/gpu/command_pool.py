"""A pool of command buffers that other threads record ahead of time.

WebGPU's command buffers can be submitted once. Where every step is the same, other threads record the next ones, and
the thread that wants results only takes and submits them. Knows nothing of what it holds.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ..errors import DeviceError

Commands = TypeVar("Commands")

COUNT = 6  # command buffers that are ready or being recorded
# Threads that record. Python's lock lets one of them record at a time; finishing goes on beside it.
WORKERS = 3

_open: weakref.WeakSet[CommandBufferPool[Any]] = weakref.WeakSet()


class _ClosedError(DeviceError):
    """Nothing will come any more."""


class CommandBufferPool(Generic[Commands]):
    """`make` is called ahead of time, by other threads, and what nobody took is given to `discard` in the end.

    Workers know the two functions and not the pool: one that is forgotten instead of closed ends them too.
    """

    def __init__(self, make: Callable[[], Commands], discard: Callable[[Commands], None]) -> None:
        self.closed = False
        self._discard = discard
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[Commands | BaseException] = SimpleQueue()
        self._retired: list[Commands] = []  # for a worker to let go of: releasing a command buffer takes 20 µs
        arguments = (make, self._requests, self._ready, self._retired)
        self._workers = [
            threading.Thread(target=_work, args=arguments, name="record-ahead", daemon=True) for _ in range(WORKERS)
        ]
        weakref.finalize(self, _dismiss, self._requests, WORKERS).atexit = False
        for worker in self._workers:
            worker.start()
        for _ in range(COUNT):
            self.request()
        _open.add(self)

    def take(self) -> Commands:
        """The next one; waits until there is one. What went wrong in making it is raised here."""
        commands = self._ready.get()
        if isinstance(commands, _ClosedError):
            self._ready.put(commands)  # for others that wait
        if isinstance(commands, BaseException):
            raise commands
        self._retired.append(commands)
        return commands

    def request(self) -> None:
        """One more, for one that was taken and is let go of. Last in a step: threads share Python's lock."""
        self._requests.put(True)

    def close(self) -> None:
        """End the threads, and discard what is left. Once closed, nothing can be taken."""
        self.closed = True
        _dismiss(self._requests, len(self._workers))
        for worker in self._workers:
            worker.join()
        self._retired.clear()
        for commands in _all_of(self._ready):
            if not isinstance(commands, BaseException):
                self._discard(commands)
        self._ready.put(
            _ClosedError("nothing is recorded ahead any more: the model was closed, or tracing began or ended")
        )


def _work(
    make: Callable[[], Commands],
    requests: SimpleQueue[bool],
    ready: SimpleQueue[Commands | BaseException],
    retired: list[Commands],
) -> None:
    while requests.get():
        retired.clear()
        try:
            ready.put(make())
        except BaseException as problem:  # raised in the thread that takes
            ready.put(problem)


def _dismiss(requests: SimpleQueue[bool], workers: int) -> None:
    """What was requested and not begun is not wanted any more."""
    for _ in _all_of(requests):
        pass
    for _ in range(workers):
        requests.put(False)


def _all_of(queue: SimpleQueue[Commands]) -> list[Commands]:
    items = []
    try:
        while True:
            items.append(queue.get_nowait())
    except Empty:
        return items


if hasattr(os, "register_at_fork"):  # the threads of pools are not in the child
    os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    """A thread inside the GPU's library while the interpreter goes away would take the process with it."""
    for pool in list(_open):
        pool.close()
