"""Runs the HTTP server for tests: a real uvicorn on a free port, in a thread of this process."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shaderlm import load
from shaderlm.engine import EngineOptions, LanguageModel
from shaderlm.server.access import Origins
from shaderlm.server.app import make_app
from shaderlm.server.limits import Limits
from shaderlm.server.models import Models
from shaderlm.server.request_log import RequestLog
from shaderlm.server.running import Server, make_server
from shaderlm.server.served import ServedModel
from shaderlm.server.service import Service
from shaderlm.server.web import Export


@dataclass
class Running:
    """A server that answers."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread

    @property
    def model(self) -> LanguageModel:
        return self.service.served.model

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, **options)


def resident_bytes() -> int:
    """Memory of this process, after what nobody holds is gone; 0: this system does not say."""
    gc.collect()
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(
    models: Models | Callable[[], ServedModel] | None,
    *,
    keys: Sequence[str] = (),
    origins: Sequence[str] = ("localhost",),
    metrics: bool = True,
    slots: bool = True,
    drain: float = 5.0,
    wait: bool = True,
    port: int = 0,
    web: Export | None = None,
    host: str = "127.0.0.1",
    limits: Limits = Limits(),  # noqa: B008
    log: RequestLog | None = None,
    pull: bool = False,
) -> Iterator[Running]:
    """A server, from its first answer to its end. `wait`: until the model is loaded. `web`: an export beside it."""
    ready, loaded, address = threading.Event(), threading.Event(), ""

    def listening(found: str) -> None:
        nonlocal address
        address = found
        ready.set()

    service = Service(models, metrics=metrics, slots=slots, limits=limits, pull=pull)
    service.models.on_loaded = lambda served: loaded.set()
    app = make_app(service, keys=keys, origins=Origins(origins), host=host, web=web, log=log)
    server = make_server(app, service, host=host, port=port, drain=drain, ready=listening)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert ready.wait(60), "the server does not listen"
        is_one = not isinstance(models, Models) and models is not None
        assert not wait or not is_one or loaded.wait(60), f"the model is not loaded: {service.models.failure}"
        yield Running(address, service, server, thread)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"


def loader(path: Path, options: EngineOptions | None = None, **more: Any) -> Callable[[], ServedModel]:
    """Loads a checkpoint on the CPU."""

    def made() -> ServedModel:
        model = load(path, device="cpu")
        if options is not None:
            model.engine.configure(options)
        return ServedModel(model, **more)

    return made
