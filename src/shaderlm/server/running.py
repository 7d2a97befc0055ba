"""Runs the application with uvicorn until a signal ends it, and lets its requests finish."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .service import Service

_SLACK_SECONDS = 2.0  # for the last bytes, after the last token


class Server(uvicorn.Server):
    """uvicorn, which drains the engine before it ends."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._service, self._drain, self._ready = service, drain, ready
        self.interrupted = False  # by Ctrl-C
        service.on_failure = self._fail

    def _fail(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            self._ready(f"{'https' if self.config.is_ssl else 'http'}://{_address(self.servers)}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections; wait for the requests that there are, as long as may be."""
        draining = asyncio.create_task(self._service.drain(self._drain))
        await super().shutdown(sockets)
        draining.cancel()
        with suppress(asyncio.CancelledError):
            await draining

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the server once its requests are over; the second one ends it now."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {each: signal.signal(each, self._handle) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in kept.items():
                signal.signal(each, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second time
        self.should_exit = True
        self.interrupted = self.interrupted or number == signal.SIGINT


def _address(servers: Sequence[asyncio.Server]) -> str:
    host, port = servers[0].sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def allow_connections() -> None:
    """As many open connections as the system allows: the usual limit of 1,024 files is for programs without clients."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_server(
    app: ASGIApp,
    service: Service,
    *,
    host: str,
    port: int,
    drain: float,
    ready: Callable[[str], None] = lambda address: None,
    ssl_cert_file: str | None = None,
    ssl_key_file: str | None = None,
) -> Server:
    """A server that is not running yet. httptools and uvloop are used where they are installed."""
    options: dict[str, Any] = {"ssl_certfile": ssl_cert_file, "ssl_keyfile": ssl_key_file}
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http="httptools" if find_spec("httptools") else "h11",
        loop="uvloop" if find_spec("uvloop") else "asyncio",
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(drain + _SLACK_SECONDS),
        backlog=2048,
        **options,
    )
    return Server(config, service, drain, ready)
