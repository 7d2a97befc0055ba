"""One replica: one engine on one device, which answers requests with the server's own routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray import serve

from ..engine.loading import load_with
from ..errors import DeviceError
from ..files import cache_directory
from ..formats.default_model import NAME as DEFAULT_MODEL
from ..formats.find import find
from ..gpu import adapters
from ..server.app import make_routes
from ..server.limits import limits_of
from ..server.loading import ServeOptions, serve_model
from ..server.request_log import Logged, RequestLog
from ..server.served import ServedModel
from ..server.service import Service
from .adapters import device_of
from .config import ClusterConfig, ModelConfig
from .loopback import bind_replica
from .relay import RelayedRequest, ResponseHead, responses

_log = logging.getLogger("shaderlm.ray")


class EngineReplica:
    """What Ray Serve runs in each process. It is there when its model is loaded."""

    async def __init__(self, name: str, config: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        bind_replica()
        cluster = msgspec.convert(config, ClusterConfig)
        self._config, self._name = cluster.models[name], serve.get_replica_context().replica_id.unique_id
        limits = limits_of(cluster.limits)
        device = device_here(self._config)

        def load() -> ServedModel:
            return load_served(self._config, name, device, limits=limits)

        self._service = Service(load, metrics=cluster.metrics, slots=cluster.slots, limits=limits, reload=False)
        self._request_log = RequestLog(cluster.log_file, cluster.log_format, verbose=cluster.verbose)
        self._app = Logged(make_routes(self._service), self._request_log)
        self._service.start()
        served = await self._service.wait_loaded()
        _log.info("%s is ready on %s", served.name, served.model.report.device)

    async def relay(self, request: RelayedRequest) -> AsyncIterator[ResponseHead | bytes]:
        """The answer to a request: its head, then its body as it comes."""
        async for part in responses(self._app, request, self._name):
            yield part

    async def whole(self, request: RelayedRequest) -> tuple[str, int, bytes]:
        """This replica's name, and its whole answer: for what the ingress asks all of them."""
        status, parts = 500, list[bytes]()
        async for part in responses(self._app, request, self._name):
            if isinstance(part, bytes):
                parts.append(part)
            else:
                status = part.status
        return self._name, status, b"".join(parts)

    async def check_health(self) -> None:
        """Ray starts another replica instead of one whose device is lost."""
        if self._service.lost is not None:
            raise DeviceError(f"the device of the replica {self._name} is lost: {self._service.lost}")

    async def __del__(self) -> None:
        """The end. Ray has waited for the requests, for at most `drain` seconds."""
        service = getattr(self, "_service", None)
        if service is None:  # what the configuration has wrong ended the constructor
            return
        await service.drain(0.0)
        await service.stop()
        await asyncio.to_thread(self._request_log.close)


def device_here(config: ModelConfig) -> str:
    """The device of this process: the one that Ray gave, or else the one that the configuration names."""
    if not config.gpus:
        return config.device
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return device_of(ids, [each.caps for each in adapters(config.backend)])


def _fetch(model: str | None) -> None:
    """One process after the other: the second one finds the file that the first has fetched."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "fetch.lock").open("w") as lock:
        with suppress(ImportError):  # Windows
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        find(model)


def load_served(config: ModelConfig, name: str, device: str, **options: Any) -> ServedModel:
    """The model of a configuration, loaded. Several processes of a machine fetch its file once."""
    _fetch(config.model)
    model = load_with(
        config.model,
        device=device,
        backend=config.backend,
        context=config.context,
        precision=config.precision,
        tune=config.tune,
        measure=True,
        ignore_keys=config.ignore_keys,
        quantize=config.quantize,
        deterministic=config.deterministic,
    )
    serve_options = ServeOptions(
        names=config.aliases if name in ("", config.model or DEFAULT_MODEL) else (name, *config.aliases),
        n_predict=config.n_predict,
        seed=config.seed,
        sampling=config.sampling,
        reasoning="none" if config.reasoning_format == "none" else "auto",
        thinking=config.thinking,
        thinking_budget=config.thinking_budget,
        tags=config.tags,
        strict_model=config.strict_model,
        embedding=config.embedding,
        chat_template=config.chat_template,
        parallel=config.parallel,
        queue=config.queue + config.max_ongoing,  # Ray's router is where requests wait
        kv_memory=config.kv_memory,
        share_prefixes=config.share_prefixes,
        warmup=config.warmup,
        **options,
    )
    return serve_model(model, config.model or DEFAULT_MODEL, serve_options)
