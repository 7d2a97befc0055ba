"""A small HTTP/1.1 client for streams of events: many connections in one thread, and the time of every read.

While streams run, bytes are only kept with their times: a read takes some microseconds. They are taken apart when the
answer is over. 64 streams of 400 tokens per second are a fraction of a core, also if each token is an event.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from ..errors import InputError

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_LAST_CHUNK = b"0\r\n\r\n"
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
            found = urlsplit(url if "://" in url else f"http://{url}")
            port = found.port
        except ValueError:
            found, port = urlsplit(""), None
        if found.scheme not in ("http", "https") or not found.hostname or found.query or found.fragment:
            raise InputError(f"--url must be like http://127.0.0.1:8080, got {url!r}")
        tls = found.scheme == "https"
        prefix = found.path.rstrip("/").removesuffix("/v1")
        return cls(found.hostname, port or (443 if tls else 80), tls, prefix, key)

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
    """What came back: every read with its time."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.ended = 0.0
        self.status = 0
        self.keeps_open = True
        self._times: list[float] = []
        self._reads: list[bytes] = []
        self._size = self._head = 0  # bytes so far; of them, the head
        self._length: int | None = None  # of the body, where the head says it
        self._chunked = False
        self._tail = b""

    @property
    def has_body(self) -> bool:
        """Did anything come after the head?"""
        return 0 < self._head < self._size

    def add(self, now: float, data: bytes) -> bool:
        """A read. Is the answer over?"""
        self._times.append(now)
        self._reads.append(data)
        self._size += len(data)
        if not self._head and not self._read_head():
            return False
        if self._chunked:
            self._tail = (self._tail + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
            return self._tail == _LAST_CHUNK and self._chunks() is not None
        return self._length is not None and self._size - self._head >= self._length

    def ends_with_connection(self) -> bool:
        """May the connection end here?"""
        return self._head > 0 and not self._chunked and self._length is None

    def _read_head(self) -> bool:
        raw = b"".join(self._reads)
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = raw[:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ConnectionError(f"this is no HTTP/1.1: {first[:80]!r}")
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(":") for x in lines)}
        self.status, self._head = int(rest[:3]), end + 4
        self._chunked = "chunked" in headers.get("transfer-encoding", "")
        length = headers.get("content-length", "")
        self._length = int(length) if length.isdigit() else None
        self.keeps_open = version == "HTTP/1.1" and headers.get("connection") != "close"
        return True

    def _chunks(self) -> list[tuple[int, int]] | None:
        """Where the parts of the body begin and end among all bytes; None while it is not complete."""
        raw = b"".join(self._reads)
        if not self._chunked:
            return [(self._head, len(raw))]
        found, at = list[tuple[int, int]](), self._head
        while (end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end].partition(b";")[0], 16)
            start = end + 2
            if size == 0:
                return found
            at = start + size + 2
            if at > len(raw):
                break
            found.append((start, start + size))
        return None

    def body(self) -> bytes:
        """The whole body."""
        raw = b"".join(self._reads)
        return b"".join(raw[start:end] for start, end in self._chunks() or ())

    def events(self) -> Iterator[tuple[float, bytes]]:
        """The data of each server-sent event, and the time of the read that completed it."""
        chunks, body = self._chunks() or [], self.body()
        starts = [0, *accumulate(end - start for start, end in chunks)]  # of each chunk in the body
        reads = list(accumulate(map(len, self._reads)))  # the end of each read among all bytes
        at = 0
        for end in _END_OF_EVENT.finditer(body):
            lines = body[at : end.start()].splitlines()
            at, last = end.end(), end.end() - 1
            chunk = bisect_right(starts, last) - 1
            came = self._times[bisect_right(reads, chunks[chunk][0] + last - starts[chunk])]
            data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
            if data:
                yield came, data


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
        except (ConnectionError, ValueError) as problem:
            over.set_exception(ConnectionError(str(problem)))
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
                _, made = await loop.create_connection(_Connection, address.host, address.port, ssl=context)
        except OSError as problem:  # TimeoutError is one
            refused = "connection refused" if isinstance(problem, ConnectionRefusedError) else None
            why = refused or problem.strerror or str(problem) or "no answer"
            raise ConnectionError(f"cannot connect to {address.host}:{address.port}: {why}") from None
        self._open = {made, *(each for each in self._open if not each.closed)}
        return made

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
