"""An HTTP request on its way between processes, and an ASGI application that answers it without a port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from ..server.access import CLIENT
from ..server.request_log import PROCESS, REQUEST
from .routing import Keys

_AHEAD = 64  # messages of an application that nobody has read yet; then it waits
_running = set[asyncio.Task[None]]()  # asyncio itself holds tasks weakly


@dataclass(frozen=True)
class RelayedRequest:
    """A request that the ingress let in, and where the router shall look for its beginning."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None  # the address
    key: str | None  # the number of the API key
    id: str
    keys: Keys = field(default_factory=Keys)


@dataclass(frozen=True)
class ResponseHead:
    """What comes before the body."""

    status: int
    headers: list[tuple[bytes, bytes]]


async def responses(app: ASGIApp, request: RelayedRequest, process: str) -> AsyncGenerator[ResponseHead | bytes, None]:
    """What the application answers: a head, and the body as it comes. Who stops reading disconnects the client."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
    gone = asyncio.Event()
    bodies = [request.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not gone.is_set():
            await messages.put(message)

    async def run() -> None:
        try:
            await app(_scope(request, process), receive, send)
        finally:
            if not gone.is_set():
                await messages.put(None)

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield ResponseHead(message["status"], list(message.get("headers", ())))
            elif message["type"] == "http.response.body" and message.get("body"):
                yield _joined(message["body"], messages)
        await task  # its exception
    finally:
        gone.set()  # the application hears it in its next step, and ends by itself
        while not messages.empty():  # a full queue holds it up
            messages.get_nowait()


def _joined(body: bytes, messages: asyncio.Queue[Message | None]) -> bytes:
    """The body, with the parts that are there already: each message costs a process a third of a millisecond."""
    parts = [body]
    while not messages.empty():
        following = messages.get_nowait()
        if following is None:
            messages.put_nowait(None)
            break
        parts.append(following.get("body", b""))
    return b"".join(parts)


def _scope(request: RelayedRequest, process: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
        CLIENT: request.key,
        REQUEST: request.id,
        PROCESS: process,
    }
