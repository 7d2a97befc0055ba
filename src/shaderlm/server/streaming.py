"""Runs a prepared request and writes its answer, whole or as a stream. Who goes away cancels what is theirs.

One task writes; another one listens for the client's end and sends a sign of life where 15 s were silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine import Delta, Handle
from .access import CLIENT
from .errors import ApiError, api_error
from .generation import progress_of
from .request_log import HANDLES
from .routes import Prepared, encode
from .service import Service, cancel

SILENT_SECONDS = 15.0
PROGRESS_SECONDS = 0.1  # between two reports of how much of a prompt is read
_GONE = 499  # nobody reads it
_log = logging.getLogger("shaderlm.server")


async def respond(service: Service, prepared: Prepared, request: Request) -> Response:
    """The answer to a request. What the engine refuses is raised before anything is sent."""
    client = request.scope[CLIENT]
    handles = await service.submit(prepared.served, [replace(each, client=client) for each in prepared.requests])
    request.scope[HANDLES] = handles
    if prepared.served.slots is not None and handles and handles[0].request.generates:
        prepared.served.slots.note(client, getattr(prepared.body, "id_slot", None), handles)
    if prepared.stream:
        try:
            return EventStream(service, prepared, handles)
        except BaseException:
            cancel(handles)
            raise
    listening = asyncio.create_task(_listen(request.receive, handles))
    try:
        try:
            for handle in handles:
                await handle.aresult()
        except Exception as problem:
            raise _error_of(problem) from problem
        if any(handle.cancelled for handle in handles):
            return Response(status_code=_GONE)
        # In a thread: a long answer with log probabilities takes seconds.
        body = await asyncio.to_thread(lambda: encode(prepared.response(handles)))
        return Response(body, media_type="application/json")
    finally:
        await _leave(service, prepared, handles, listening)


def _error_of(problem: Exception) -> ApiError:
    """What a generation's problem is to a client. What is nobody's fault but the server's is logged."""
    error = api_error(problem)
    if error.status == 500:
        _log.error("a generation ended with an error", exc_info=problem)
    return error


async def _listen(receive: Receive, handles: Sequence[Handle]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    cancel(handles)


async def _leave(
    service: Service, prepared: Prepared, handles: Sequence[Handle], listening: asyncio.Task[None]
) -> None:
    """Nothing stays behind."""
    cancel(handles)
    service.finished(prepared.served, handles)
    listening.cancel()
    with suppress(asyncio.CancelledError):
        await listening


class EventStream(Response):
    """A stream of events. Headers are sent with the first one, so that an error before it has its own status."""

    def __init__(self, service: Service, prepared: Prepared, handles: Sequence[Handle]) -> None:
        self._service, self._prepared, self._handles = service, prepared, handles
        self._writer = prepared.writer(handles)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type=self._writer.media_type, headers=headers)
        del self.headers["content-length"]
        self._reports_progress = prepared.return_progress
        # Log probabilities of long prompts take seconds to write: in a thread, while other streams go on.
        self._scores_prompts = any(each.request.prompt_logprobs is not None for each in handles)
        self._headers_sent = self._ended = self._is_streaming = False
        self._lock = asyncio.Lock()  # of what is sent
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all of it."""
        self._last_write = asyncio.get_running_loop().time()
        listening = asyncio.create_task(self._listen(receive, send))
        try:
            try:
                if len(self._handles) == 1:
                    await self._stream(self._handles[0], send)
                else:
                    await self._stream_all(send)
            except Exception as problem:
                error = _error_of(problem)
                if not self._headers_sent:
                    raise error from problem
                await self._write(send, self._writer.error(error))
            async with self._lock:
                self._ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._service.coalescing.streams -= self._is_streaming
            await _leave(self._service, self._prepared, self._handles, listening)

    async def _write_events(self, send: Send, events: bytes) -> None:
        if not events:
            return
        if not self._is_streaming:  # it writes, and does not wait in the queue any more
            self._service.coalescing.streams += 1
            self._is_streaming = True
        await self._write(send, events)

    async def _write(self, send: Send, events: bytes) -> None:
        async with self._lock:
            if self._ended:
                return
            if not self._headers_sent:
                self._headers_sent = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": events, "more_body": True})
            self._last_write = asyncio.get_running_loop().time()

    async def _listen(self, receive: Receive, send: Send) -> None:
        """Until the client is gone; meanwhile a sign of life after each 15 s without an event."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(self._last_write + SILENT_SECONDS):
                    if (await receive())["type"] == "http.disconnect":
                        break
            except TimeoutError:
                if self._lock.locked():  # the reader is slow, not the writer
                    self._last_write = loop.time()
                elif loop.time() - self._last_write >= SILENT_SECONDS:
                    await self._write(send, self._writer.keep_alive())
        cancel(self._handles)

    async def _stream(self, handle: Handle, send: Send) -> None:
        """Write what comes for the only handle. Each event has all that there is: nobody waits for more of it."""
        writer, coalescing = self._writer, self._service.coalescing
        if self._reports_progress:
            async for events in self._reading(handle):
                await self._write_events(send, events)
        elif self._scores_prompts and (first := await handle.next_delta()) is not None:
            await self._write_events(send, await asyncio.to_thread(writer.delta, 0, first))
        while (delta := await handle.next_delta()) is not None:
            await self._write_events(send, writer.delta(0, delta))
            if coalescing.is_busy:
                await coalescing.next_write(handle)
        await self._write_events(send, (await self._finish(0)) + writer.end())

    async def _stream_all(self, send: Send) -> None:
        """The same for several handles, or none."""
        writer = self._writer
        async for index, delta in _merged(self._handles):
            if delta is None:
                events = await self._finish(index)
            elif self._scores_prompts:
                events = await asyncio.to_thread(writer.delta, index, delta)
            else:
                events = writer.delta(index, delta)
            await self._write_events(send, events)
        await self._write_events(send, writer.end())

    async def _finish(self, index: int) -> bytes:
        """The last event of a handle."""
        finish = self._writer.finish
        return await asyncio.to_thread(finish, index) if self._scores_prompts else finish(index)

    async def _reading(self, handle: Handle) -> AsyncIterator[bytes]:
        """Reports from what was in the cache until the prompt is read, and what came with its end."""
        writer, reported, delta, read = self._writer, -1, None, False
        while not read:
            try:
                async with asyncio.timeout(PROGRESS_SECONDS):
                    delta, read = await handle.next_delta(), True
            except TimeoutError:
                if handle.state == "waiting":
                    continue
            if reported < 0:
                begin = progress_of(handle, begin=True)
                reported = begin.prompt.processed
                yield writer.progress(0, begin)
            now = progress_of(handle)
            if now.prompt.processed > reported:
                reported = now.prompt.processed
                yield writer.progress(0, now)
        if delta is not None:
            yield await asyncio.to_thread(writer.delta, 0, delta)


async def _merged(handles: Sequence[Handle]) -> AsyncIterator[tuple[int, Delta | None]]:
    """Deltas of several handles as they come; None after the last one of each."""
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(handles))

    async def read(index: int, handle: Handle) -> None:
        try:
            async for delta in handle:
                await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as problem:
            await queue.put((index, problem))

    tasks = [asyncio.create_task(read(i, handle)) for i, handle in enumerate(handles)]
    try:
        running = len(handles)
        while running:
            index, delta = await queue.get()
            if isinstance(delta, Exception):
                raise delta
            running -= delta is None
            yield index, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
