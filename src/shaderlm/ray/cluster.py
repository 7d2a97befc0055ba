"""Runs the application for as long as a command runs: on a Ray of this machine alone, or on a cluster that is there."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, ShaderlmError
from . import loopback
from .config import ClusterConfig
from .versions import check_ray

APP = "shaderlm"
_PREFIX = "slm-"  # of folders for Ray's sockets and logs
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # the actor of Ray Serve, by its name
_ANSWER_SECONDS = 10.0  # for the front to say that requests are over
_STORE_BYTES = 200 << 20  # of Ray's shared memory: requests and answers are no larger than messages
_log = logging.getLogger("shaderlm.ray")


@dataclass(frozen=True)
class HttpOptions:
    """Where Ray's proxy listens."""

    host: str
    port: int
    ssl_cert_file: str | None = None
    ssl_key_file: str | None = None

    @property
    def url(self) -> str:
        """The address for clients."""
        scheme = "http" if self.ssl_cert_file is None else "https"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def check_free(self) -> None:
        """Ray says of a port that is taken that its proxy did not start, a minute later."""
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as problem:
            raise InputError(
                f"cannot listen on {self.host} port {self.port}: {(problem.strerror or '').lower()}"
            ) from None


def free_port(host: str) -> int:
    """A port that nobody listens on. Ray's proxy takes no 0."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def local_ray(cpus: float, gpus: int = 0) -> Iterator[None]:
    """A Ray of this machine alone. Nothing of it stays behind."""
    loopback.prepare()
    check_ray()
    import ray

    _remove_stale()
    # A short name: sockets lie in it, and their paths have 107 characters at most.
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    try:
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(os.cpu_count() or 1, int(cpus + 0.999)),
                num_gpus=gpus,
                object_store_memory=_STORE_BYTES,
                logging_level="warning",
                _temp_dir=folder,
            )
        except ValueError as problem:  # CUDA_VISIBLE_DEVICES and the like, of which Vulkan knows nothing
            expected = f"WebGPU finds {gpus} GPUs here, and sees no such variable: unset it"
            raise InputError(f"Ray does not start: {str(problem).splitlines()[0]} {expected}") from None
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale() -> None:
    """Folders of processes that were killed. Ray's own processes have ended with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_at(address: str) -> Iterator[None]:
    """A cluster that is there, and stays."""
    loopback.no_statistics()
    check_ray()
    import ray

    try:
        ray.init(address=address, logging_level="warning", namespace=APP)
    except (ConnectionError, RuntimeError, ValueError) as problem:
        raise InputError(f"--ray-address {address} is no Ray cluster: {str(problem).splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def serve_until_signal(config: ClusterConfig, http: HttpOptions, ready: Callable[[], None], drain: float) -> bool:
    """Deploy on this process's Ray, and serve until SIGINT or SIGTERM: was it SIGINT? A second one does not wait."""
    from ray import serve

    from .app import application

    _refuse_running_serve()
    options = {"host": http.host, "port": http.port}
    if http.ssl_cert_file is not None:
        options |= {"ssl_certfile": http.ssl_cert_file, "ssl_keyfile": http.ssl_key_file or ""}
    with _signals() as signals:
        try:
            serve.start(http_options=options, proxy_location="HeadOnly", logging_config=_QUIET)
            handle = _run(application(config))
            ready()
            signals.wait()
            with suppress(KeyboardInterrupt):  # the second one
                signals.hurry()
                _drain(handle, drain)
        finally:
            signals.ignore()
            serve.shutdown()
    return signals.interrupted


def _drain(handle: Any, seconds: float) -> None:
    """Let requests finish. A front that does not say that they have is ended with what it has."""
    from ray.exceptions import RayError

    try:
        handle.broadcast("drain", seconds).results(timeout_s=seconds + _ANSWER_SECONDS)
    except (TimeoutError, RayError) as problem:
        reason = str(problem).strip().splitlines()[:1]
        _log.warning("requests may not be over, and end now: %s", *(reason or [type(problem).__name__]))


_QUIET = {"enable_access_log": False, "log_level": "WARNING"}


def _run(app: Any) -> Any:
    from ray import serve

    try:
        return serve.run(app, name=APP, route_prefix="/", logging_config=_QUIET)
    except RuntimeError as problem:
        reason = _last_line(str(problem)) or _deployment_problem() or str(problem)
        raise ShaderlmError(f"the replicas did not start: {reason}") from None


def _deployment_problem() -> str:
    """What a deployment that failed says: the last line of the exception in its replica."""
    from ray import serve

    application = serve.status().applications.get(APP)
    messages = [each.message for each in application.deployments.values()] if application else []
    return next((line for line in map(_last_line, messages) if line), "")


def _last_line(text: str) -> str:
    """The exception at the end of a traceback of ours, if there is one."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("shaderlm.errors.")]
    return lines[-1].partition(": ")[2] if lines else ""


def _refuse_running_serve() -> None:
    """Its proxy has an address already, which may be another one, and an application that is not ours to end."""
    import ray

    try:
        ray.get_actor(_CONTROLLER, namespace="serve")
    except ValueError:  # there is none
        return
    raise InputError("Ray Serve runs on that cluster already; deploy with: serve run shaderlm.ray:build_app KEY=VALUE")


class _Signals:
    """SIGINT and SIGTERM: before `wait` they raise KeyboardInterrupt, in it they end it."""

    def __init__(self) -> None:
        self.interrupted = False
        self._raises = True
        self._event = threading.Event()

    def handle(self, number: int, frame: Any) -> None:
        """What Python calls."""
        self.interrupted = self.interrupted or number == signal.SIGINT
        self._event.set()
        if self._raises:
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Until a signal."""
        self._raises = False
        while not self._event.wait(0.5):
            pass

    def hurry(self) -> None:
        """The next one raises again."""
        self._raises = True

    def ignore(self) -> None:
        """What is being taken down is taken down whole."""
        self._raises = False


@contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {each: signal.signal(each, signals.handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    except KeyboardInterrupt:
        pass
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
