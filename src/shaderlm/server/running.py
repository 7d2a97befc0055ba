"""Runs the application with uvicorn until a signal ends it, and lets its requests finish."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ..errors import InputError
from .connection import protocol
from .service import Service

_SLACK_SECONDS = 2.0  # for the last bytes, after the last token


class Server(uvicorn.Server):
    """uvicorn, which drains the engine before it ends."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._service, self._drain, self._ready = service, drain, ready
        self._signals = 0
        self._hurried = asyncio.Event()
        self.interrupted = False  # by Ctrl-C
        self.on_drain: Callable[[int], None] = lambda requests: None  # told how many there are, if any
        service.models.on_failure = self._fail

    def _fail(self) -> None:
        self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end. OSError: the address is not free, or not of this machine."""
        super().run(sockets or listen(self.config.host, self.config.port))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            self._ready(f"{'https' if self.config.is_ssl else 'http'}://{_address(self.servers)}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer new requests with a 503 until those that there are have ended, or their time; then close."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._drain
        hurry = asyncio.create_task(self._end_if_hurried())
        requests = self._service.models.requests
        if requests and self._drain:
            self.on_drain(requests)
        await self._service.drain(self._drain)
        ending = [hurry, asyncio.create_task(self._disconnect(max(0.0, end - clock())))]
        await super().shutdown(sockets)
        for task in ending:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _end_if_hurried(self) -> None:
        await self._hurried.wait()
        await self._service.models.end_requests()
        await self._disconnect()

    async def _disconnect(self, seconds: float = 0.0) -> None:
        """End connections that do not end by themselves: their clients do not read, or do not send."""
        await asyncio.sleep(seconds + _SLACK_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the server once its requests are over; the second one ends them, the third all."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            self.should_exit = True
            self.interrupted = self.interrupted or number == signal.SIGINT
            if self._signals == 2:
                loop.call_soon_threadsafe(self._hurried.set)
            elif self._signals > 2:
                os._exit(130)  # the device, or a client, does not come to an end

        previous = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)


def listen(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of a host. One that this machine does not have is left out, if there is another."""
    sockets = list[socket.socket]()
    absent: OSError | None = None
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                sockets.append(socket.create_server(address, family=family))
            except OSError as problem:  # also of a machine without IPv6, whose list of hosts has such an address
                if problem.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = problem
        if not sockets and absent is not None:
            raise absent
    except OSError as problem:
        for each in sockets:
            each.close()
        reason = (problem.strerror or str(problem)).partition(" (while")[0].lower()
        raise OSError(f"cannot listen on {host}, port {port}: {reason}; give another --host or --port") from None
    return sockets


def _address(servers: Sequence[asyncio.Server]) -> str:
    host, port = servers[0].sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def allow_connections() -> None:
    """As many open connections as the system allows: the usual limit of 1,024 files is for programs without clients."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_certificate(cert_file: str, key_file: str) -> None:
    """InputError: they cannot be used for HTTPS, and why."""
    for path, kind, option in (
        (cert_file, "CERTIFICATE", "--ssl-cert-file"),
        (key_file, "PRIVATE KEY", "--ssl-key-file"),
    ):
        try:
            text = Path(path).read_bytes()
        except OSError as problem:
            raise InputError(f"{option} {path} cannot be read: {(problem.strerror or str(problem)).lower()}") from None
        if f"{kind}-----".encode() not in text:
            raise InputError(f"{option} {path} has no line -----BEGIN {kind}-----; it must be a PEM file with one")

    def refuse() -> str:  # OpenSSL would ask for it at the terminal
        raise InputError(f"--ssl-key-file {key_file} needs a password; give a key without: openssl pkey -in FILE")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, refuse)
    except ssl.SSLError as problem:
        if "MISMATCH" in (problem.reason or ""):
            raise InputError(f"--ssl-key-file {key_file} is not the key of --ssl-cert-file {cert_file}") from None
        reason = problem.reason or problem
        raise InputError(f"{cert_file} and {key_file} are no certificate and key in PEM form ({reason})") from None


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
    limits = service.limits
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol(limits.head_bytes, limits.head_seconds),
        h11_max_incomplete_event_size=limits.head_bytes,
        loop="uvloop" if find_spec("uvloop") else "asyncio",
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=2048,
        ssl_certfile=ssl_cert_file,
        ssl_keyfile=ssl_key_file,
    )
    if ssl_cert_file is not None and ssl_key_file is not None:
        check_certificate(ssl_cert_file, ssl_key_file)
    config.load()
    return Server(config, service, drain, ready)
