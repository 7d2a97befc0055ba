"""What routes have of the server: its models, threads that prepare requests, running them, and draining."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ..engine import Engine, Handle, Request
from .addresses import Fetcher
from .errors import ENDING, ApiError, unavailable
from .limits import Limits
from .metrics import ModelNumbers
from .model_facts import FactReader
from .models import HostedModel, Models, ModelSource
from .pulls import Pulls
from .response_store import ResponseStore
from .served import ServedModel

PREPARING_THREADS, SEEING_THREADS = 16, 4
MAX_LARGE_BODIES = 8  # that are read, decoded and tokenised at the same time
_FEW_TOKENS, _FEW_REQUESTS = 16_384, 8  # take a millisecond
_LOADING = "the model is being loaded; try again in a few seconds"
_log = logging.getLogger("shaderlm.server")
Value = TypeVar("Value")


class WriteCoalescing:
    """Lets many streams write together, every few milliseconds, with all tokens that came meanwhile.

    An event costs about 25 µs of Python. 256 streams of 150 tokens per second would take all of a core's time, which
    the engine's thread needs, too: the interpreter runs one thread at a time. So writing takes a quarter of it, as
    measured: the more streams there are, the rarer they write, and the more tokens an event has. The first event of a
    stream does not wait.
    """

    INTERVAL_SECONDS = 0.008
    MAX_INTERVAL_SECONDS = 0.05  # on a slow machine, too: text that comes rarer is seen to halt
    SHARE = 0.25  # of the time, for writing
    BUSY_STREAMS = 8

    def __init__(self) -> None:
        self.streams = 0  # that are being written
        self._waiting: list[asyncio.Future[None]] = []
        self._busy_seconds = 0.0  # that the last writing took

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
            loop.call_later(self.seconds, self._end)
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        handle.end_waiter = mine
        try:
            if handle.finish_reason is None:  # it may have ended meanwhile, in the engine's thread
                await mine
        finally:
            handle.end_waiter = None

    @property
    def seconds(self) -> float:
        """From a writing to the next."""
        return max(self.INTERVAL_SECONDS, min(self._busy_seconds / self.SHARE, self.MAX_INTERVAL_SECONDS))

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)
        asyncio.get_running_loop().call_soon(self._note_seconds, time.thread_time())  # when all of them have written

    def _note_seconds(self, begin: float) -> None:
        self._busy_seconds = time.thread_time() - begin


class Service:
    """Has the models; `models` None: there is never one. Its methods are for the event loop."""

    def __init__(
        self,
        models: Models | Callable[[], ServedModel] | None,
        *,
        metrics: bool = False,
        slots: bool = True,
        limits: Limits = Limits(),  # noqa: B008 (nothing changes it)
        reload: bool = True,
        pull: bool = False,
        fetcher: Fetcher | None = None,
    ) -> None:
        """`models`: what there is, or the function that loads the only one, at the start of the server.

        `reload`: load the only model again after its device is lost. Otherwise another service takes its place.
        `pull`: clients may fetch models, and remove what they fetched. `fetcher`: reads addresses of pictures.
        """
        self.has_model = models is not None
        self.models = models if isinstance(models, Models) else one_model(models)
        self.limits, self._reload, self.facts = limits, reload, FactReader()
        self.coalescing = WriteCoalescing()
        self.responses = ResponseStore()
        self.large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        # Requests wait here for templates and grammars, which may take seconds: nothing else does.
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, "prepare")
        self._seeing = ThreadPoolExecutor(SEEING_THREADS, "see")  # decodes pictures: 0.6 GB of a request at most
        self.has_metrics, self.has_slots, self.started = metrics, slots, time.time()
        self.pulls = Pulls() if pull else None
        self.fetcher = fetcher
        self._ending = False

    # Models --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the only model. Requests get a 503 meanwhile."""
        if self.models.is_one:
            for each in self.models.all():
                self.models.load(each)

    async def wait_loaded(self) -> ServedModel:
        """The only model, once it is loaded. What ended the load is raised."""
        await self.models.wait_loaded()
        if self.models.failure is not None:
            raise self.models.failure
        return self.served

    def check_model(self) -> None:
        """A 501 if there is never one, a 503 while the only one is loaded at the start."""
        if not self.has_model:
            raise ApiError(501, "this server computes nothing, it only hosts /web/; start it with -m MODEL for its API")
        if self.models.is_pinned:
            self.served  # noqa: B018
        elif self.models.is_starting:
            raise unavailable(_LOADING)

    @property
    def served(self) -> ServedModel:
        """The only model; a 503 while there is none, a 501 if there never is."""
        if not self.has_model:
            self.check_model()
        model = self.models.all()[0]
        if model.served is None:
            self.check_ending()
            raise unavailable(_LOADING)
        lost = model.served.model.engine.lost
        if lost is not None:
            self._recover(model)
            what = "and the model is loaded again" if self._reload else "and this replica ends"
            raise unavailable(f"the device is lost, {what}: {lost}")
        return model.served

    def _recover(self, model: HostedModel) -> None:
        """Load the model again, unless the server ends. If that fails, the server ends."""
        if self._reload and not self._ending:
            _log.warning("the device is lost; the model is loaded again")
            self.models.reload(model)

    def numbers(self) -> list[ModelNumbers]:
        """Of all models that were loaded."""
        stats = [(each, each.stats()) for each in self.models.all()]
        return [ModelNumbers(each.name, each.metrics, numbers) for each, numbers in stats if numbers is not None]

    def check_ending(self) -> None:
        """A 503 if the server is about to end."""
        if self._ending:
            raise unavailable(ENDING)

    def body_limits(self, *, images: bool) -> Limits:
        """The limits of a body. `images`: of a route that takes pictures, which make it larger."""
        if not images or (self.models.is_pinned and self.served.model.vision is None):
            return self.limits
        return replace(self.limits, body_bytes=max(self.limits.body_bytes, self.limits.image_body_bytes))

    async def prepare(self, work: Callable[..., Value], *args: Any, images: bool = False) -> Value:
        """What a thread makes of a body. Those with pictures wait for each other, and let texts go on."""
        threads = self._seeing if images else self._preparing
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)

    # Requests ------------------------------------------------------------------------------------------------

    def check_queue(self) -> None:
        """A 503 if the server is about to end, a 429 if the only model's queue is full: before a body is read."""
        self.check_ending()
        self.check_model()
        if self.models.is_pinned:
            self.served.model.engine.check_queue()

    async def submit(self, served: ServedModel, requests: Sequence[Request]) -> list[Handle]:
        """Start all of them, or none. Where that takes long, it is done in a thread."""
        engine = served.model.engine
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

    def finished(self, served: ServedModel, handles: Sequence[Handle]) -> None:
        """Requests are over: count them, and look after the device."""
        model = self.models.of(served)
        for handle in handles:
            model.metrics.finished(handle)
        if self.models.is_pinned and model.served is served and served.model.engine.lost is not None:
            self._recover(model)

    # The end -------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """No more requests. Those that are not over after so many seconds end with an error."""
        self._ending = True
        if not await self.models.drain(seconds):
            if seconds:
                _log.warning("requests that are not over after %g s end now", seconds)
            await self.models.end_requests()

    @property
    def lost(self) -> Exception | None:
        """Why the device of a model computes nothing any more; None if all do, or if there is no model."""
        engines = [each.served.model.engine for each in self.models.all() if each.served is not None]
        return next((engine.lost for engine in engines if engine.lost is not None), None)

    async def stop(self) -> None:
        """Free the models."""
        self._ending = True
        for threads in (self._preparing, self._seeing):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.fetcher is not None:
            self.fetcher.close()
        await self.models.stop()


def one_model(load: Callable[[], ServedModel] | None) -> Models:
    """The models of a server that has one at most, from its start to its end."""
    sources = [] if load is None else [ModelSource(name="the model", load=load)]
    return Models(lambda: sources, one=True, pinned=True)


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
