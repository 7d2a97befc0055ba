"""A line for each request: method, route, status, tokens and times. Never text of a request or an answer, nor a key.

Lines are written by a thread: a disk or a terminal that stops stops no stream.
"""

from __future__ import annotations

import ipaddress
import json
import queue
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from logging.handlers import WatchedFileHandler
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine import Handle
from ..errors import InputError
from .access import CLIENT

ROUTE, HANDLES = "shaderlm.route", "shaderlm.handles"  # in the scope of a request
# Where several processes serve: what the request is called in all of their logs, and which one writes this line.
REQUEST, PROCESS = "shaderlm.request", "shaderlm.process"
Format = Literal["text", "json"]
_MAX_WAITING = 10_000  # lines
_END_SECONDS = 2.0  # for the last ones
# Asked for every few seconds, by programs: left out where nothing is wrong, unless all requests are wanted.
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
_FREQUENT = ("/health", "/metrics", "/slots")
_FINE = (200, 204, 206, 304, 307, 503)  # 503: not yet, or not any more


class RequestLog:
    """Where the lines go: a file, or else stderr."""

    def __init__(self, path: str | None = None, form: Format = "text", *, verbose: bool = False) -> None:
        self._form, self.verbose = form, verbose
        try:
            self._file = None if path is None else WatchedFileHandler(path, encoding="utf-8")
        except OSError as problem:
            reason = (problem.strerror or str(problem)).lower()
            raise InputError(f"--log-file {path} cannot be written: {reason}") from None
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._lost = 0  # lines that nobody could write in time
        self._broken = False  # the last line could not be written, which was told
        self._thread = threading.Thread(target=self._write, name="request log", daemon=True)
        self._thread.start()

    def add(self, entry: dict[str, Any]) -> None:
        """One request."""
        line = json.dumps(entry) if self._form == "json" else _text(entry)
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                lost, self._lost = self._lost, 0
                if lost:
                    self._print(f"{lost:,} requests are missing here: the log could not be written")
                self._print(line)
                self._broken = False
            except (OSError, ValueError) as problem:  # a full disk, or nobody reads
                self._lost += lost + 1
                self._tell(problem)

    def _tell(self, problem: Exception) -> None:
        """Once until a line is written again, that the file has none."""
        if self._file is not None and not self._broken:
            self._broken = True
            reason = (getattr(problem, "strerror", None) or str(problem)).lower()
            with suppress(OSError, ValueError):
                text = f"shaderlm: --log-file {self._file.baseFilename} cannot be written: {reason}"
                print(text, file=sys.stderr, flush=True)

    def _print(self, line: str) -> None:
        if self._file is None:
            print(line, file=sys.stderr, flush=True)
            return
        self._file.reopenIfNeeded()  # it may have been moved away: programs that keep logs small do that
        if self._file.stream is None:  # it could not be opened then
            self._file.stream = self._file._open()
        print(line, file=self._file.stream, flush=True)

    def close(self) -> None:
        """Write what waits."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=_END_SECONDS)
            self._thread.join(_END_SECONDS)
        if self._file is not None and not self._thread.is_alive():
            with suppress(OSError):  # of a full disk: what is left has no place
                self._file.close()


class Logged:
    """Puts every request of an application into the log, when its answer has ended."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            route = scope.get(ROUTE)
            frequent = scope["method"] == "GET" and (route is None or route in _FREQUENT) and status in _FINE
            if self._log.verbose or not frequent:
                self._log.add(_entry(scope, status, time.monotonic() - started))


def _entry(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """What the log says of a request. A path may be anything, so it is the route that is named."""
    entry: dict[str, Any] = {
        "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "client": _address((scope.get("client") or ("-",))[0]),
        "method": scope["method"] if scope["method"] in _METHODS else "-",
        "route": scope.get(ROUTE, "-"),
        "status": status,
        "seconds": round(seconds, 4),
    }
    entry |= {name: scope[key] for name, key in (("request", REQUEST), ("process", PROCESS)) if key in scope}
    if scope.get(CLIENT) is not None:
        entry["key"] = int(scope[CLIENT]) + 1  # its number, in the order in which keys were given
    handles: Sequence[Handle] = scope.get(HANDLES, ())
    if handles:
        usages, timings = [each.usage for each in handles], [each.timing for each in handles]
        entry |= {
            "prompt_tokens": sum(each.prompt_tokens for each in usages),
            "cached_tokens": sum(each.cached_tokens for each in usages),
            "completion_tokens": sum(each.completion_tokens for each in usages),
            "queue_seconds": round(max(each.queue_seconds for each in timings), 4),
            "prompt_seconds": round(max(each.prompt_seconds for each in timings), 4),
            "decode_seconds": round(max(each.decode_seconds for each in timings), 4),
            "finish": sorted({each.finish_reason or "closed" for each in handles}),
        }
    return entry


def _address(text: str) -> str:
    """An address, if it is one: behind a proxy it is what a header says."""
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return "-"


def _text(entry: dict[str, Any]) -> str:
    key = f" key {entry['key']}" if "key" in entry else ""
    line = f"{entry['time']} {entry['client']}{key} {entry['method']} {entry['route']} {entry['status']}"
    if "finish" in entry:
        line += (
            f" prompt {entry['prompt_tokens']} ({entry['cached_tokens']} cached), {entry['completion_tokens']} tokens, "
            f"queue {entry['queue_seconds']:.3f} s, prompt {entry['prompt_seconds']:.3f} s, "
            f"decode {entry['decode_seconds']:.3f} s, {'/'.join(entry['finish'])},"
        )
    names = f" {entry['process']} {entry['request']}" if "request" in entry else ""
    return f"{line} {entry['seconds']:.3f} s{names}"
