"""The models of a server: which there are, which of them are loaded, who uses them, and who makes room for others.

Knows no HTTP library. All methods are for the event loop; models are loaded and closed in threads of their own.

A request has a lease of its model for as long as it runs. A model without leases may be closed for another one, the
least recently used first. If all are in use, the one that was loaded first takes no new request and ends with those
that it has: so nobody waits for ever. Who waits for room comes in the order of the first request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ..engine import EngineStats
from ..errors import DeviceError, MemoryFullError, ModelError, ShaderlmError, TooLargeError
from ..formats.gguf import all_parts
from ..formats.opening import checkpoint_bytes
from .errors import ENDING, ApiError, unavailable
from .metrics import Metrics, added
from .served import ServedModel

State = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
Value = TypeVar("Value")
PATIENCE_SECONDS = 2.0  # for a model to be without requests, before one of them takes no more
RETRY_SECONDS = 10.0  # until a model whose load failed is loaded again for a request
LOOK_SECONDS = 1.0  # between two looks at a file or a folder, at least
_FOR_EVER = 3e9  # seconds: a time of day that is later has no date
_LISTED = 20  # names in an error
_LATEST = ":latest"  # the tag that stands for none: Ollama's clients may add it
_log = logging.getLogger("shaderlm.server")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be loaded."""

    name: str
    load: Callable[[], ServedModel]
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: Path | None = None  # of its file or folder; None: not known before it is loaded
    context: int | None = None  # that it will have; None: its own
    embedding: bool = False
    vision: bool = True  # is the part that reads images loaded, if there is one?
    mmproj: str | None = None  # the file of that part; None: the one beside the model


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """How long models stay. `memory` in bytes, of weights and caches; `sleep_seconds` inf: as long as there is room."""

    memory: int | None = None
    most: int | None = None  # models that are loaded at the same time
    sleep_seconds: float = math.inf
    room_seconds: float = 60.0  # that a request waits for room
    waiting: int = 1024  # requests that may wait for one model


class HostedModel:
    """One of the models. `Models` changes it."""

    def __init__(self, source: ModelSource) -> None:
        self.source, self._name, self._path = source, source.name, source.path
        self.state: State = "unloaded"
        self.served: ServedModel | None = None
        self.problem: Exception | None = None  # why it was not loaded
        self.metrics = Metrics()
        self.leases = 0
        self.last_used = 0.0  # in the time of the loop
        self.expires_at: float | None = None  # when it goes to sleep, as the time of day
        self.keep_seconds = math.inf  # after the last request
        self.nbytes = 0  # that it has, or will have, where memory is limited
        self._past: EngineStats | None = None  # of earlier loads
        self._loaded_at = self._failed_at = self._looked_at = 0.0
        self._known_bytes: int | None = None  # when it was loaded before
        self._waiters: list[asyncio.Future[ServedModel]] = []
        # It takes no new requests; it is loaded for no request in particular; a thread loads it; and somebody has asked
        # to close it, which is done even if it is still to be loaded.
        self._is_draining = self._is_wanted = self._in_thread = self._is_unwanted = False
        self._stamp: object = None  # of its file, when it was loaded
        self._loading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """What answers say."""
        return self._name

    @property
    def path(self) -> Path | None:
        """Of its file or folder, where it is known."""
        return self._path

    @property
    def waiting(self) -> int:
        """Requests that wait until it is loaded."""
        return len(self._waiters)

    def stats(self) -> EngineStats | None:
        """What its engines did since the start, and what the one that is there does; None: there was none."""
        now = None if self.served is None else self.served.model.engine.stats()
        return added(now, self._past)


class Lease:
    """A model that stays loaded until this is released."""

    def __init__(self, models: Models, model: HostedModel, served: ServedModel) -> None:
        self._models, self._model, self.served = models, model, served
        self._is_released = False

    def release(self) -> None:
        """The request is over. A second time has no effect."""
        if not self._is_released:
            self._is_released = True
            self._models._release(self._model)


class Models:
    """All models of a server."""

    def __init__(
        self,
        sources: Callable[[], Iterable[ModelSource]],
        options: ModelsOptions = ModelsOptions(),
        *,
        one: bool = False,
        pinned: bool = False,
    ) -> None:
        """`sources`: what there is now, in the order of preference; a folder may have other files each time.

        `one`: any name is that of the only one. `pinned`: it is never closed, and a failure to load it ends the server.
        """
        self.options, self.is_one, self.is_pinned = options, one, pinned
        self._sources = sources
        self._models = {source.name: HostedModel(source) for source in sources()}
        self._looked_at = 0.0
        self._room = asyncio.Lock()  # who has it makes room
        self._watchers = list[asyncio.Future[None]]()
        self._tasks = set[asyncio.Task[None]]()
        self._threads = set[HostedModel]()  # that threads load
        self._is_ending = self._is_stopped = False
        self.failure: Exception | None = None  # why there will be no model
        self.on_failure: Callable[[], None] = lambda: None
        self.on_loaded: Callable[[ServedModel], None] = lambda served: None

    # Which there are ---------------------------------------------------------------------------------------------

    def all(self) -> list[HostedModel]:
        """In their order."""
        return [*self._models.values()]

    def loaded(self) -> list[HostedModel]:
        """Those that can answer now."""
        return [each for each in self._models.values() if each.served is not None]

    def get(self, name: str) -> HostedModel | None:
        """The model of a name, an alias or a tag."""
        for text in dict.fromkeys((name, name.removesuffix(_LATEST))):
            if text in self._models:
                return self._models[text]
            for belongs in (_has_alias, _has_tag):
                for each in self._models.values():
                    if belongs(each, text):
                        return each
        return None

    async def find(self, name: str | None) -> HostedModel:
        """The model that a request asks for; of one that names none, the first. An unknown one is a 404."""
        model = self._named(name)
        if model is None:
            await self.refresh()
            model = self._named(name)
        if model is None:
            names = [repr(each) for each in self._models]
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            there = f"there are {', '.join(names[:_LISTED])}{more}" if names else "there are none"
            raise ApiError(404, f"the model {name!r} is not served here; {there}", param="model")
        return model

    def _named(self, name: str | None) -> HostedModel | None:
        return next(iter(self._models.values()), None) if name is None or self.is_one else self.get(name)

    async def refresh(self) -> None:
        """Look which models there are now, unless that was a moment ago."""
        now = asyncio.get_running_loop().time()
        if self.is_one or now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        sources = {source.name: source for source in await asyncio.to_thread(lambda: [*self._sources()])}
        before = self._models
        self._models = {name: before.get(name) or HostedModel(source) for name, source in sources.items()}
        for name, model in before.items():
            if name not in sources and (
                _takes_room(model) or model._loading is not None
            ):  # its file is gone, it is not
                self._models[name] = model

    # Leases ------------------------------------------------------------------------------------------------------

    def acquire_now(self, model: HostedModel, keep_seconds: float | None = None) -> Lease | None:
        """A lease of a model that is loaded; None: it must be waited for."""
        self._check_ending()
        served = self._ready(model)
        if served is None:
            return None
        model.leases += 1
        return self._leased(model, served, keep_seconds)

    async def acquire(self, model: HostedModel, keep_seconds: float | None = None) -> Lease:
        """A lease of a model, once it is loaded. Whoever is cancelled meanwhile gives up a place, and nothing else.

        `keep_seconds`: how long the model stays after this request, if nobody else asks; None: as the server says.
        """
        lease = self.acquire_now(model, keep_seconds)
        return self._leased(model, await self._wait(model), keep_seconds) if lease is None else lease

    def _leased(self, model: HostedModel, served: ServedModel, keep_seconds: float | None) -> Lease:
        self._cancel_timer(model)
        model.keep_seconds = self.options.sleep_seconds if keep_seconds is None else keep_seconds
        return Lease(self, model, served)

    async def _wait(self, model: HostedModel) -> ServedModel:
        """Until it is loaded; then there is one more lease of it."""
        loop = asyncio.get_running_loop()
        if model.problem is not None and loop.time() < model._failed_at + RETRY_SECONDS:
            raise _failed(model, model.problem)
        if len(model._waiters) >= self.options.waiting:
            many = f"{len(model._waiters):,} requests wait for the model {model.name!r} to be loaded, which is the most"
            raise ApiError(429, f"{many}; try again in a few seconds", headers={"Retry-After": "5"})
        waiter: asyncio.Future[ServedModel] = loop.create_future()
        model._waiters.append(waiter)
        self._begin_load(model)
        try:
            await asyncio.wait((waiter,), timeout=self.options.room_seconds)
            if not waiter.done() and model.served is not None:  # its requests may take for ever
                busy = f"the model {model.name!r} is loaded again when its requests are over"
                raise unavailable(f"{busy}; try again in a few seconds")
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(model)
            raise
        finally:
            if waiter in model._waiters:
                model._waiters.remove(waiter)
            if not model._waiters and not model._is_wanted and not model._in_thread and model._loading is not None:
                model._loading.cancel()  # it waits for room, and nobody for it

    def _ready(self, model: HostedModel) -> ServedModel | None:
        """The model if it can take a request. One that is lost, or whose file is another one, takes none."""
        served = model.served
        if served is None or model._is_draining:
            return None
        if served.model.engine.lost is not None:
            _log.warning("the device of %s is lost; the model is loaded again", model.name)
        elif not self._is_replaced(model):
            return served
        else:
            _log.warning("the file of %s has changed; the model is loaded again", model.name)
        self._drain(model)
        return None

    def _is_replaced(self, model: HostedModel) -> bool:
        """Is there another file in the place of the one that was loaded?"""
        now = asyncio.get_running_loop().time()
        if self.is_one or model.path is None or now < model._looked_at + LOOK_SECONDS:
            return False
        model._looked_at = now
        stamp = stamp_of(model.path)
        return stamp is not None and stamp != model._stamp  # a file that is gone cannot be loaded again

    def _release(self, model: HostedModel) -> None:
        model.leases -= 1
        model.last_used = asyncio.get_running_loop().time()
        if not model.leases:
            self._idle(model)
        self._changed()

    def _idle(self, model: HostedModel) -> None:
        """No request has it any more."""
        if model._is_draining:
            self._start(self._unload_idle(model, "unloaded"))
        elif self.options.memory is not None and not self._has_room():  # caches have grown
            victim = self._least_recently_used()
            if victim is not None:
                self._start(self._unload_idle(victim, "unloaded"))
        if model.keep_seconds < _FOR_EVER and model.served is not None and not model._is_draining:
            loop = asyncio.get_running_loop()
            model.expires_at = time.time() + model.keep_seconds
            model._timer = loop.call_later(model.keep_seconds, self._sleep, model)

    def _sleep(self, model: HostedModel) -> None:
        if not model.leases and model.served is not None:
            self._start(self._unload_idle(model, "sleeping"))

    def _cancel_timer(self, model: HostedModel) -> None:
        model.expires_at = None
        if model._timer is not None:
            model._timer.cancel()
            model._timer = None

    # Loading -----------------------------------------------------------------------------------------------------

    def load(self, model: HostedModel) -> None:
        """Load it, for no request in particular. A load that failed is tried again."""
        self._check_ending()
        if self._ready(model) is None:
            model.problem, model._is_wanted, model._is_unwanted = None, True, False
            self._begin_load(model)

    def _begin_load(self, model: HostedModel) -> None:
        if model._loading is None:
            model._is_unwanted = False
            model._loading = asyncio.create_task(self._load(model))

    def reload(self, model: HostedModel) -> None:
        """Load it again now, and answer nothing meanwhile."""
        self._drain(model)
        model._is_wanted = True
        self._begin_load(model)

    async def _load(self, model: HostedModel) -> None:
        """Tell all who wait for it how it went."""
        before: State = model.state if model.state == "sleeping" else "unloaded"
        try:
            served = await self._bring_in(model)
        except asyncio.CancelledError:
            model.state = "loaded" if model.served is not None else before  # it still has requests
            raise
        except ApiError as problem:  # there is no room
            model.state = before
            self._answer(model, problem)
        except Exception as problem:
            model.state, model.problem = "failed", problem
            model._failed_at = asyncio.get_running_loop().time()
            self._answer(model, _failed(model, problem))
            self._tell_failure(model, problem)
            if problem is not self.failure:  # it refers to all that was loaded so far
                problem.__traceback__ = problem.__cause__ = problem.__context__ = None
        else:
            self._loaded(model, served)
        finally:
            model._loading, model._is_wanted, model._in_thread = None, False, False
            if model._waiters and not self._is_ending:  # it was cancelled, and somebody came at the same time
                self._begin_load(model)
            self._changed()

    def _tell_failure(self, model: HostedModel, problem: Exception) -> None:
        if self.is_pinned or (self.is_one and not model._loaded_at):
            self.failure = problem
            self.on_failure()
        elif isinstance(problem, ShaderlmError):
            _log.warning("the model %s cannot be loaded: %s", model.name, problem)
        else:
            _log.error("the model %s cannot be loaded", model.name, exc_info=problem)

    def _loaded(self, model: HostedModel, served: ServedModel) -> None:
        is_new = model.served is not served
        model.served, model.state, model.problem = served, "loaded", None
        if is_new:
            model._name, model._path = served.name, model._path or served.model.report.path
            model._loaded_at = model.last_used = asyncio.get_running_loop().time()
            model.keep_seconds = self.options.sleep_seconds
        waiters, model._waiters = model._waiters, []
        for waiter in waiters:
            if not waiter.done():
                model.leases += 1
                waiter.set_result(served)
        if model._is_unwanted or self._is_stopped:
            self._drain(model)
        elif not model.leases:
            self._idle(model)
        if is_new:
            self.on_loaded(served)

    def _answer(self, model: HostedModel, problem: ApiError) -> None:
        waiters, model._waiters = model._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(problem)

    async def _bring_in(self, model: HostedModel) -> ServedModel:
        """The model, loaded, with room for it."""
        while model.served is not None or model._closing is not None:
            if model.served is not None and not model._is_draining:
                return model.served  # whoever wanted its room has left
            await self._change()
        model.state = "loading"
        while True:
            async with self._room:
                await self._make_room(model)
                model.nbytes, model._in_thread = self._expected_bytes(model), True
            served = await self._load_in_thread(model)
            if served is not None and await self._fits(model, served):
                return served
            model.nbytes, model._in_thread = 0, False

    async def _load_in_thread(self, model: HostedModel) -> ServedModel | None:
        """None: the device has no memory, and another model made room."""

        def work() -> ServedModel:
            try:
                served = model.source.load()
                if self._is_stopped:  # nobody waits for it
                    served.model.close()
                    raise unavailable(ENDING)
                return served
            finally:
                self._threads.discard(model)

        model._stamp = None if self.is_one or model.source.path is None else stamp_of(model.source.path)
        self._threads.add(model)
        try:
            return await in_thread(work)
        except (DeviceError, MemoryError) as problem:
            is_full = isinstance(problem, (MemoryFullError, MemoryError))
            victim = self._least_recently_used() if is_full else None
            if victim is None:
                model.nbytes = 0
                raise
            _log.warning("%s is closed, for the device has no memory for %s: %s", victim.name, model.name, problem)
            await self._unload(victim, "unloaded")
            return None
        except BaseException:
            model.nbytes = 0
            raise

    async def _fits(self, model: HostedModel, served: ServedModel) -> bool:
        """Is there room for what was loaded? If others run, and it is larger than was expected, it is closed again."""
        if not self.is_one and model._stamp is None:
            model._stamp = stamp_of(served.model.report.path)
        if self.options.memory is None:
            return True
        model.nbytes = model._known_bytes = served.model.nbytes
        while not self._has_room() and (victim := self._least_recently_used()) is not None:
            await self._unload(victim, "unloaded")
        if self._has_room():
            return True
        await in_thread(served.model.close)
        return False

    # Room --------------------------------------------------------------------------------------------------------

    def _expected_bytes(self, model: HostedModel) -> int:
        """What it had when it was loaded before, or else the size of its files."""
        if model._known_bytes is not None:
            return model._known_bytes
        return 0 if model.source.path is None else checkpoint_bytes(model.source.path)

    def _has_room(self, count: int = 0, nbytes: int = 0) -> bool:
        """For so many more models, of so many bytes."""
        memory, most = self.options.memory, self.options.most
        there = [each for each in self._models.values() if _takes_room(each)]
        if most is not None and len(there) + count > most:
            return False
        for each in there:
            if each.served is not None:
                each.nbytes = each.served.model.nbytes  # caches grow
        return memory is None or sum(each.nbytes for each in there) + nbytes <= memory

    def _least_recently_used(self) -> HostedModel | None:
        """Of those that no request has. Those who wait for one that is draining wait for its next load."""
        idle = [each for each in self.loaded() if not each.leases]
        return min(idle, key=lambda each: each.last_used, default=None)

    async def _make_room(self, model: HostedModel) -> None:
        """Until there is room for it. Other requests are not ended for that."""
        loop, memory = asyncio.get_running_loop(), self.options.memory
        began, nbytes = loop.time(), self._expected_bytes(model)
        if memory is not None and nbytes > memory:
            raise ModelError(f"it takes {_size(nbytes)}, and --models-memory is {_size(memory)}")
        drained: HostedModel | None = None
        try:
            while not self._has_room(1, nbytes):
                victim = self._least_recently_used()
                if victim is not None:
                    await self._unload(victim, "unloaded")
                    continue
                waited = loop.time() - began
                if waited >= self.options.room_seconds:
                    raise self._no_room(model)
                if waited >= PATIENCE_SECONDS:
                    drained = drained or self._drain_oldest()
                until = min(PATIENCE_SECONDS if waited < PATIENCE_SECONDS else math.inf, self.options.room_seconds)
                await self._change(max(0.01, began + until - loop.time()))
        finally:
            if drained is not None and drained.served is not None and drained._is_draining and not drained._is_unwanted:
                drained._is_draining = False  # nobody needs its room any more
                self._changed()

    def _no_room(self, model: HostedModel) -> ApiError:
        busy = ", ".join(repr(each.name) for each in self._models.values() if _takes_room(each))
        return unavailable(
            f"there is no memory for the model {model.name!r}: {busy} have requests; try again in a few seconds"
        )

    def _drain_oldest(self) -> HostedModel | None:
        """The model that was loaded first takes no new requests, unless another one already does not."""
        loaded = self.loaded()
        if not loaded or any(each._is_draining for each in loaded):
            return None
        oldest = min(loaded, key=lambda each: each._loaded_at)
        self._drain(oldest)
        return oldest

    def _drain(self, model: HostedModel) -> None:
        """No new requests. It is closed when there are none."""
        model._is_draining = True
        if not model.leases:
            self._start(self._unload_idle(model, "unloaded"))

    def unload(self, model: HostedModel) -> None:
        """Close it as soon as its requests are over."""
        if model.served is not None:
            model._is_unwanted = True
            self._drain(model)
        elif model._loading is None:
            model.state, model.problem = "unloaded", None
        elif model._in_thread or model._waiters:
            model._is_unwanted = True
        else:
            model._loading.cancel()

    async def _unload_idle(self, model: HostedModel, state: State) -> None:
        """Unless a request has come meanwhile."""
        if not model.leases:
            await self._unload(model, state)

    async def _unload(self, model: HostedModel, state: State) -> None:
        served = model.served
        if served is not None:
            model.served, model.state, model._is_draining = None, state, False
            self._cancel_timer(model)
            if not self._is_stopped:
                model._past = added(served.model.engine.stats(), model._past)
            model._closing = asyncio.create_task(self._close(model, served))
        if model._closing is not None:
            await asyncio.shield(model._closing)

    async def _close(self, model: HostedModel, served: ServedModel) -> None:
        try:
            await in_thread(served.model.close)
        except Exception as problem:
            _log.error("%s could not be closed", model.name, exc_info=problem)
        finally:
            model.nbytes, model._closing = 0, None
            self._changed()

    # Changes -----------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def _change(self, seconds: float | None = None) -> None:
        """Until something is loaded, released or closed."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await watcher

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def is_starting(self) -> bool:
        """Is the only model loaded for the first time?"""
        return self.is_one and any(each.state == "loading" and not each._loaded_at for each in self.all())

    async def wait_loaded(self) -> None:
        """Until no model is being loaded."""
        while any(each._loading is not None for each in self.all()):
            await self._change()

    def of(self, served: ServedModel) -> HostedModel:
        """The one that a model belongs to. The only one may have been loaded again meanwhile."""
        return next(each for each in self._models.values() if self.is_one or each.served is served)

    # The end -----------------------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Does a thread still load a model?"""
        return bool(self._threads)

    @property
    def requests(self) -> int:
        """How many run and wait."""
        running = sum(len(each.served.model.engine.sequences()) for each in self.loaded() if each.served is not None)
        return running + sum(each.waiting for each in self._models.values())

    def _check_ending(self) -> None:
        if self._is_ending:
            raise unavailable(ENDING)

    async def drain(self, seconds: float) -> bool:
        """No more requests. Are those that there are over after so many seconds?"""
        self._is_ending = True
        for model in self._models.values():
            self._answer(model, unavailable(ENDING))
            if model._loading is not None and not model._in_thread:
                model._loading.cancel()
        engines = [each.served.model.engine for each in self.loaded() if each.served is not None]
        return all(await asyncio.gather(*(engine.adrain(seconds) for engine in engines)))

    async def end_requests(self) -> None:
        """Those that are not over end with an error."""
        for each in self.loaded():
            if each.served is not None:
                await in_thread(each.served.model.engine.close)

    async def stop(self) -> None:
        """Free all models. One that a thread loads is left to it."""
        self._is_ending = self._is_stopped = True
        for model in self._models.values():
            self._cancel_timer(model)
            if model._loading is not None and not model._in_thread:
                model._loading.cancel()
            if model._loading is not None and model not in self._threads:  # it may just have been loaded
                await asyncio.wait((model._loading,))
            await self._unload(model, "unloaded")


def _takes_room(model: HostedModel) -> bool:
    return model.served is not None or model._closing is not None or model._in_thread


def _has_alias(model: HostedModel, name: str) -> bool:
    return name in model.source.aliases


def _has_tag(model: HostedModel, name: str) -> bool:
    return name in model.source.tags


def _failed(model: HostedModel, problem: Exception) -> ApiError:
    """What a request for a model that is not there is told."""
    if isinstance(problem, ShaderlmError):
        reason = str(problem)
    elif isinstance(problem, MemoryError):
        reason = "there is no memory for it"
    else:
        reason = "the server's log has the reason"
    may_pass = isinstance(problem, (DeviceError, MemoryError)) and not isinstance(problem, TooLargeError)
    status = 503 if may_pass else 500
    headers = {"Retry-After": f"{RETRY_SECONDS:.0f}"} if status == 503 else {}
    return ApiError(status, f"the model {model.name!r} cannot be loaded: {reason}", param="model", headers=headers)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def local_path(model: str) -> Path | None:
    """The path of a model that is named by one; None: it is named otherwise."""
    path = Path(model).expanduser()
    with suppress(OSError, ValueError):
        return path if path.exists() else None
    return None


def stamp_of(path: Path) -> object:
    """What changes with the file, with the parts of one, or with the files of a folder; None: some are gone."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else map(Path, all_parts(str(path)))
        facts = [each.stat() for each in files]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in facts)


async def in_thread(work: Callable[[], Value]) -> Value:
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
