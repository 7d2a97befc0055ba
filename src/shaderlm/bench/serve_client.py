"""A small HTTP/1.1 client for streams of events: many connections in one thread, and the time of every read.

While streams run, bodies are only kept with their times: a read takes some microseconds. Events are parsed when the
answer is over. 64 streams of 400 tokens per second are a fraction of a core, also if each token is an event.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from ..errors import InputError
from ..install import install_command

try:
    from httptools import HttpParserError, HttpResponseParser
except ImportError:
    raise InputError(f"`bench serve` needs the package httptools: {install_command('serve')}") from None

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Address:
    """Where a server is, and the key that it wants."""

    host: str
    port: int
    tls: bool
    prefix: str  # of all routes
    key: str | None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Address:
        """From http://HOST:PORT. OpenAI's base URL, which ends with /v1, is the same."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError(f"--url must be like http://127.0.0.1:8080, got {url!r}")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, key)

    def message(self, method: str, route: str, body: bytes = b"") -> bytes:
        """A request as bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{route} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class ClientAnswer:
    """What came back: every part of the body with the time of its read. The parser calls the `on_…` methods."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.ended = 0.0
        self.status = 0
        self.keeps_open = True
        self._parts: list[tuple[float, bytes]] = []
        self._now = 0.0  # of the read that is parsed
        self._has_length = self._complete = False
        self._parser = HttpResponseParser(self)

    @property
    def has_body(self) -> bool:
        """Did anything come after the head?"""
        return bool(self._parts)

    def add(self, now: float, data: bytes) -> bool:
        """A read. Is the answer over?"""
        self._now = now
        try:
            self._parser.feed_data(data)
        except HttpParserError as problem:
            raise ConnectionError(f"this is no HTTP/1.1: {problem}") from None
        if self._complete:
            del self._parser  # it refers back, and no garbage is collected during a measurement
        return self._complete

    def ends_with_connection(self) -> bool:
        """May the connection end here?"""
        return self.status > 0 and not self._has_length

    def on_header(self, name: bytes, value: bytes) -> None:
        """Does the head say where the body ends?"""
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """The head is there."""
        self.status = self._parser.get_status_code()
        self.keeps_open = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """A part of the body, without the frame of its chunk."""
        self._parts.append((self._now, data))

    def on_message_complete(self) -> None:
        """All of the body is there."""
        self._complete = True

    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self._parts)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """The data of each server-sent event, and the time of the read that completed it."""
        body, begin = self.body(), 0
        ends = list(accumulate(len(data) for _, data in self._parts))
        for separator in _END_OF_EVENT.finditer(body):
            lines = body[begin : separator.start()].splitlines()
            begin = separator.end()
            data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
            if data:
                yield self._parts[bisect_left(ends, begin)][0], data


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.closed = False
        self._answer: ClientAnswer | None = None
        self._over: asyncio.Future[None] | None = None
        self._on_body: Callable[[], None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        now, answer, over = time.perf_counter(), self._answer, self._over
        if answer is None or over is None or over.done():
            return
        try:
            done = answer.add(now, data)
        except ConnectionError as problem:
            over.set_exception(problem)
            return
        if self._on_body is not None and answer.has_body:
            self._on_body()
            self._on_body = None
        if done:
            answer.ended = now
            over.set_result(None)

    def connection_lost(self, problem: Exception | None) -> None:
        self.closed = True
        answer, over = self._answer, self._over
        if answer is None or over is None or over.done():
            return
        if answer.ends_with_connection():
            answer.ended = time.perf_counter()
            over.set_result(None)
        else:
            over.set_exception(ConnectionError("the server closed the connection before the answer was complete"))

    async def exchange(self, message: bytes, answer: ClientAnswer, on_body: Callable[[], None] | None) -> None:
        self._answer, self._on_body = answer, on_body
        self._over = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        await self._over
        self._answer = None


class Client:
    """Sends requests over connections that stay open."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def send(self, message: bytes, on_body: Callable[[], None] | None = None) -> ClientAnswer:
        """The answer, when it is over. `on_body` is called once, when something of its body is there."""
        answer = ClientAnswer()
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            try:
                return await self._exchange(connection, message, answer, on_body)
            except ConnectionError:
                if answer.status:
                    raise
                break  # the server closed an idle connection in the same moment
        return await self._exchange(await self._connect(), message, answer, on_body)

    async def _connect(self) -> _Connection:
        loop, address = asyncio.get_running_loop(), self.address
        context = ssl.create_default_context() if address.tls else None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(_Connection, address.host, address.port, ssl=context)
        except OSError as problem:  # TimeoutError is one
            refused = "connection refused" if isinstance(problem, ConnectionRefusedError) else None
            why = refused or problem.strerror or str(problem) or "no answer"
            raise ConnectionError(f"cannot connect to {address.host}:{address.port}: {why}") from None
        self._open = {connection, *(each for each in self._open if not each.closed)}
        return connection

    async def _exchange(
        self, connection: _Connection, message: bytes, answer: ClientAnswer, on_body: Callable[[], None] | None
    ) -> ClientAnswer:
        try:
            await connection.exchange(message, answer, on_body)
        except BaseException:
            connection.transport.abort()  # the server cancels what nobody reads
            raise
        if answer.keeps_open:
            self._idle.append(connection)
        else:
            connection.transport.close()
        return answer

    async def get(self, route: str) -> tuple[int, Any]:
        """The status and the JSON of a route."""
        answer = await self.send(self.address.message("GET", route))
        try:
            return answer.status, json.loads(answer.body())
        except ValueError:
            return answer.status, None

    async def close(self) -> None:
        """End all connections."""
        for connection in self._open:
            connection.transport.abort()
        while any(not connection.closed for connection in self._open):
            await asyncio.sleep(0.001)
        self._idle.clear()
        self._open.clear()
