"""The model behind the server, if it has one: loading, requests, loading again after its device is lost, draining."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..engine import Engine, Handle, Request
from .errors import ENDING, ApiError, unavailable
from .limits import Limits
from .metrics import Metrics
from .pulls import Pulls
from .served import ServedModel

PREPARING_THREADS = 16
MAX_LARGE_BODIES = 8  # that are read, decoded and tokenised at the same time
_FEW_TOKENS, _FEW_REQUESTS = 16_384, 8  # take a millisecond
_log = logging.getLogger("shaderlm.server")
Value = TypeVar("Value")


class WriteCoalescing:
    """Lets many streams write together, every few milliseconds, with all tokens that came meanwhile.

    An event costs 30 µs of Python. 64 streams of 400 tokens per second would take most of a core's time, which the
    engine's thread needs, too. The first event of a stream does not wait.
    """

    INTERVAL_SECONDS = 0.008
    BUSY_STREAMS = 8

    def __init__(self) -> None:
        self.streams = 0  # that are being written
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_busy(self) -> bool:
        """Are there so many streams that they wait for each other?"""
        return self.streams >= self.BUSY_STREAMS

    async def next_write(self, handle: Handle) -> None:
        """Until the next time that all streams write, or the end of this one."""
        if handle.finish_reason is not None:
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self.INTERVAL_SECONDS, self._end)
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        handle.end_waiter = mine
        try:
            if handle.finish_reason is None:  # it may have ended meanwhile, in the engine's thread
                await mine
        finally:
            handle.end_waiter = None

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


class Service:
    """Holds the model while there is one; `load` None: there is never one. Its methods are for the event loop."""

    def __init__(
        self,
        load: Callable[[], ServedModel] | None,
        *,
        metrics: bool = False,
        slots: bool = True,
        limits: Limits = Limits(),  # noqa: B008 (nothing changes it)
        reload: bool = True,
        pull: bool = False,
    ) -> None:
        """`reload`: load the model again after its device is lost. Otherwise another service takes its place.

        `pull`: clients may fetch models, and remove what they fetched.
        """
        self._load, self.limits, self._reload = load, limits, reload
        self._served: ServedModel | None = None
        self._loading: asyncio.Task[None] | None = None
        self.failure: Exception | None = None  # why there will be no model
        self.on_failure: Callable[[], None] = lambda: None
        self.on_loaded: Callable[[ServedModel], None] = lambda served: None
        self.coalescing = WriteCoalescing()
        self.large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        # Requests wait here for templates and grammars, which may take seconds: nothing else does.
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, "prepare")
        self.metrics, self.has_metrics, self.has_slots = Metrics(), metrics, slots
        self.pulls = Pulls() if pull else None
        self._ending = self._stopped = False

    # Loading -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the model. Requests get a 503 meanwhile."""
        if self._load is not None:
            self._loading = asyncio.create_task(self._loaded(None))

    async def wait_loaded(self) -> ServedModel:
        """The model, once it is loaded. What ended the load is raised."""
        if self._loading is not None:
            await self._loading
        if self.failure is not None:
            raise self.failure
        return self.served

    async def _loaded(self, lost: ServedModel | None) -> None:
        assert self._load is not None
        try:
            if lost is not None:
                await _in_a_thread(lost.model.close)
            served = await _in_a_thread(self._load)
        except Exception as problem:
            self.failure = problem
            self.on_failure()
            return
        self._served = served
        self.on_loaded(served)
        if self._ending:
            await self.stop()

    @property
    def has_model(self) -> bool:
        """Is there one, loaded or not?"""
        return self._load is not None

    @property
    def is_loading(self) -> bool:
        """Does a thread still load a model?"""
        return self.has_model and self._served is None and self.failure is None and not self._stopped

    @property
    def served(self) -> ServedModel:
        """The model; a 503 while there is none, a 501 if there never is."""
        if self._load is None:
            raise ApiError(501, "this server computes nothing, it only hosts /web/; start it with -m MODEL for its API")
        if self._served is None:
            self.check_ending()
            raise unavailable("the model is being loaded; try again in a few seconds")
        lost = self._served.model.engine.lost
        if lost is not None:
            self._recover()
            what = "and the model is loaded again" if self._reload else "and this replica ends"
            raise unavailable(f"the device is lost, {what}: {lost}")
        return self._served

    def _recover(self) -> None:
        """Load the model again, unless the server ends. If that fails, the server ends."""
        if self._ending or not self._reload:
            return
        lost, self._served = self._served, None
        if lost is not None:
            _log.warning("the device is lost; the model is loaded again")
            self._loading = asyncio.create_task(self._loaded(lost))

    def check_ending(self) -> None:
        """A 503 if the server is about to end."""
        if self._ending:
            raise unavailable(ENDING)

    async def prepare(self, work: Callable[..., Value], *args: Any) -> Value:
        """What a thread makes of a body."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work, *args)

    # Requests ------------------------------------------------------------------------------------------------

    def check_queue(self) -> None:
        """A 503 if the server is about to end, a 429 if the queue is full: before a body is read."""
        self.check_ending()
        self.served.model.engine.check_queue()

    async def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Start all of them, or none. Where that takes long, it is done in a thread."""
        engine = self.served.model.engine
        limit = engine.max_requests
        if limit is not None and len(requests) > limit:
            count = f"the request asks for {len(requests):,} generations"
            message = f"{count}, this server runs and queues {limit:,} at most"
            raise ApiError(400, f"{message}; send several requests, or start it with a larger --queue")
        if sum(len(request.prompt_ids) for request in requests) < _FEW_TOKENS and len(requests) < _FEW_REQUESTS:
            return _submitted(engine, requests)
        work = asyncio.ensure_future(asyncio.to_thread(_submitted, engine, requests))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_cancel_result)
            raise

    def finished(self, handles: Sequence[Handle]) -> None:
        """Requests are over: count them, and look after the device."""
        for handle in handles:
            self.metrics.finished(handle)
        if self._served is not None and self._served.model.engine.lost is not None:
            self._recover()

    # The end -------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """No more requests. Those that are not over after so many seconds end with an error."""
        self._ending = True
        served = self._served
        if served is not None and not await served.model.engine.adrain(seconds):
            if seconds:
                _log.warning("requests that are not over after %g s end now", seconds)
            await self.end_requests()

    @property
    def lost(self) -> Exception | None:
        """Why the device computes nothing any more; None if it does, or if there is no model."""
        return None if self._served is None else self._served.model.engine.lost

    @property
    def requests(self) -> int:
        """How many run and wait."""
        return 0 if self._served is None else len(self._served.model.engine.sequences())

    async def end_requests(self) -> None:
        """Those that are not over end with an error."""
        if self._served is not None:
            await _in_a_thread(self._served.model.engine.close)

    async def stop(self) -> None:
        """Free the model."""
        self._ending = True
        self._preparing.shutdown(wait=False, cancel_futures=True)
        served, self._served = self._served, None
        if served is not None:
            self._stopped = True
            await _in_a_thread(served.model.close)


def _submitted(engine: Engine, requests: Sequence[Request]) -> list[Handle]:
    handles: list[Handle] = []
    try:
        for request in requests:
            handles.append(engine.submit(request))
    except BaseException:
        cancel(handles)
        raise
    return handles


def cancel(handles: Iterable[Handle]) -> None:
    """Does nothing to those that are finished."""
    for handle in handles:
        handle.cancel()


def _cancel_result(work: asyncio.Future[list[Handle]]) -> None:
    """Nobody waits for them any more."""
    if not work.cancelled() and work.exception() is None:
        cancel(work.result())


async def _in_a_thread(work: Callable[[], Value]) -> Value:
    """Like `asyncio.to_thread`, but it waits for no other thread, and the end of the program does not wait for it."""
    future = Future[Value]()
    future.set_running_or_notify_cancel()  # nothing can cancel it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:
            future.set_exception(problem)

    threading.Thread(target=run, name="model", daemon=True).start()
    return await asyncio.wrap_future(future)
