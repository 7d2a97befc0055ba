"""Connections that bound what a client sends before the application sees it: the size of the head, and its time.

uvicorn bounds neither with httptools: a header may have any size, and a head that never ends keeps its connection.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError

_LINGER_SECONDS = 1.0  # for a client that still sends to read why it is refused
_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def protocol(head_bytes: int, head_seconds: float) -> type[asyncio.Protocol]:
    """The protocol of connections: httptools where it is installed."""
    base = _with_httptools() if find_spec("httptools") else _Timed
    limits = {"head_bytes": head_bytes, "head_seconds": head_seconds}
    return type("Connection", (base,), limits)


class _Head(asyncio.Protocol):
    """What both parsers share: the head must be there in time."""

    head_bytes: int
    head_seconds: float
    transport: Any
    loop: Any
    cycle: Any
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._late)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._answers:  # the head of the next request, which has time until then
            self._begin_head()
            return
        message = f"the head of the request took more than {self.head_seconds:g} s to arrive; send it faster"
        self._refuse(ApiError(408, message))

    @property
    def _answers(self) -> bool:
        """Is an answer being written?"""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, problem: ApiError) -> None:
        """Answer, and end the connection. What still comes is not read."""
        if self._refused:
            return
        self._refused = True
        self._end_head()
        if self._answers:
            self.transport.abort()
            return
        body = msgspec.json.encode(problem.body())
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (problem.status, _REASONS[problem.status], len(body)) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


class _Timed(_Head, H11Protocol):
    """h11 bounds the size by itself (`h11_max_incomplete_event_size`)."""

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._end_head()


def _with_httptools() -> type[_Head]:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Connection(_Head, HttpToolsProtocol):
        """httptools gives a header when it is whole. So bytes are counted that gave nothing yet."""

        _unread = 0
        _too_large = False

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            self._unread += len(data)
            super().data_received(data)
            if self._unread > self.head_bytes:
                self._refuse(self._size_problem())

        def _size_problem(self) -> ApiError:
            most = f"more than {self.head_bytes:,} bytes, which is the most"
            return ApiError(431, f"the head of the request has {most}; send fewer or shorter headers")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._begin_head()

        def on_headers_complete(self) -> None:
            self._end_head()
            self._unread = 0
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.head_bytes:
                self._too_large = True
                raise ValueError("a head that came at once, and is too large")  # httptools stops
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unread = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unread = 0
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            if self._too_large:
                self._refuse(self._size_problem())
            else:
                super().send_400_response(msg)

    return Connection
