"""A stock of things that are used up one per step and made ahead of time by other threads: command buffers.

WebGPU's command buffers can be submitted once. Where every step is the same, other threads record the next ones, and
the thread that wants results only takes and submits them. Knows nothing of what it holds.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ..errors import DeviceError

Made = TypeVar("Made")

COUNT = 6  # in stock
# Threads that fill a stock. Python's lock lets one of them record at a time; finishing goes on beside it.
WORKERS = 3

_open: weakref.WeakSet[Stock[Any]] = weakref.WeakSet()


class _ClosedError(DeviceError):
    """Nothing will come any more."""


class Stock(Generic[Made]):
    """`make` is called ahead of time, by other threads, and what nobody took is given to `discard` in the end.

    Workers know the two functions and not the stock: one that is forgotten instead of closed ends them too.
    """

    def __init__(self, make: Callable[[], Made], discard: Callable[[Made], None]) -> None:
        self.closed = False
        self._discard = discard
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[Made | BaseException] = SimpleQueue()
        self._spent: list[Made] = []  # for a worker to let go of: releasing a command buffer takes 20 µs
        given = (make, self._orders, self._ready, self._spent)
        self._workers = [threading.Thread(target=_work, args=given, name="ahead", daemon=True) for _ in range(WORKERS)]
        weakref.finalize(self, _dismiss, self._orders, WORKERS).atexit = False
        for worker in self._workers:
            worker.start()
        for _ in range(COUNT):
            self.order()
        _open.add(self)

    def take(self) -> Made:
        """The next one; waits until there is one. What went wrong in making it is raised here."""
        found = self._ready.get()
        if isinstance(found, _ClosedError):
            self._ready.put(found)  # for others that wait
        if isinstance(found, BaseException):
            raise found
        self._spent.append(found)
        return found

    def order(self) -> None:
        """One more, for one that was taken and is let go of. Last in a step: threads share Python's lock."""
        self._orders.put(True)

    def close(self) -> None:
        """End the threads, and discard what is left. Once closed, nothing can be taken."""
        self.closed = True
        _dismiss(self._orders, len(self._workers))
        for worker in self._workers:
            worker.join()
        self._spent.clear()
        for left in _all_of(self._ready):
            if not isinstance(left, BaseException):
                self._discard(left)
        self._ready.put(
            _ClosedError("what was recorded ahead is gone: the model was closed, or a profile began or ended")
        )


def _work(
    make: Callable[[], Made], orders: SimpleQueue[bool], ready: SimpleQueue[Made | BaseException], spent: list[Made]
) -> None:
    while orders.get():
        spent.clear()
        try:
            ready.put(make())
        except BaseException as problem:  # raised in the thread that takes
            ready.put(problem)


def _dismiss(orders: SimpleQueue[bool], workers: int) -> None:
    """What was ordered and not begun is not wanted any more."""
    for _ in _all_of(orders):
        pass
    for _ in range(workers):
        orders.put(False)


def _all_of(queue: SimpleQueue[Made]) -> list[Made]:
    found = []
    try:
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found


@atexit.register
def _close_all() -> None:
    """A thread inside the GPU's library while the interpreter goes away would take the process with it."""
    for stock in list(_open):
        stock.close()
