"""The front: who may ask, which model, and the way to a replica and back. It computes nothing, and knows no tokens."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from ray import serve
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..server.access import CLIENT, Access, Origins, error_response
from ..server.app import has_large_body, read_body, route_of
from ..server.errors import ENDING, ApiError, unavailable
from ..server.limits import Limits, limits_of
from ..server.metrics import CONTENT_TYPE
from ..server.ollama import LINES
from ..server.request_log import PROCESS, REQUEST, ROUTE, Logged, RequestLog
from ..server.routes import encode, sse
from ..server.service import MAX_LARGE_BODIES
from ..server.types.llama_server import Health
from ..server.types.responses import ErrorEvent
from . import metrics
from .config import ClusterConfig, deployment_name
from .loopback import bind_replica
from .pages import page_hashes, prompt_bytes, session_hash
from .relay import RelayedRequest, ResponseHead
from .routing import Keys, routers

SESSION_HEADER = b"x-session-id"
_REQUEST_HEADER = b"x-request-id"  # Ray's proxy adds one to requests that have none, and sends it back
_FIRST_SECONDS = 2.0  # for a replica to answer the first question for health
_ASK_SECONDS = 10.0  # for the answers of all replicas
_RETRY_SECONDS = 1  # a request whose replica is gone finds another one at once
_SMALL_BODY_BYTES = 1 << 16
_DRAIN_POLL_SECONDS = 0.05
# What Ray and Ray Serve raise instead of an answer.
_FAILURES = (RayError, BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError)
_log = logging.getLogger("shaderlm.ray")


class Ingress:
    """What Ray Serve runs in front of the models. `handles`: of each model's deployment, by its name."""

    def __init__(self, config: dict[str, Any], handles: dict[str, Any]) -> None:
        bind_replica()
        self._config = msgspec.convert(config, ClusterConfig)
        self._handles = handles
        self._log = RequestLog(self._config.log_file, self._config.log_format, verbose=self._config.verbose)

    async def drain(self, seconds: float) -> int:
        """No more requests: they get a 503. Returns how many are not over after so many seconds."""
        return await self._front.drain(seconds)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve calls this once: the application that its proxy talks to."""
        config = self._config
        name = serve.get_replica_context().replica_id.unique_id
        self._front = Front(config, self._handles, limits_of(config.limits), name)
        guarded = Access(
            self._front, config.keys, Origins(config.cors_origins, has_keys=bool(config.keys)), config.host
        )
        return RequestIds(Logged(guarded, self._log))


class RequestIds:
    """Gives each request a name, which the logs of all processes have."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            sent = dict(scope["headers"]).get(_REQUEST_HEADER, b"").decode("latin-1")
            # A client's own name may be anything, and would be in the log.
            usable = 0 < len(sent) <= 64 and sent.replace("-", "").replace("_", "").isalnum() and sent.isascii()
            scope.update({REQUEST: sent if usable else str(uuid4()), PROCESS: "ingress"})
        await self._app(scope, receive, send)


class Front:
    """The application behind the keys: one request after the other goes to a replica of its model."""

    def __init__(self, config: ClusterConfig, handles: Mapping[str, Any], limits: Limits, name: str) -> None:
        """`name`: of this front, where there may be several."""
        self._config, self._limits, self._name = config, limits, name
        self._large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        self._streams = {name: handle.options(method_name="relay", stream=True) for name, handle in handles.items()}
        self._handles = handles
        self._names = {alias: name for name, model in config.models.items() for alias in (*model.aliases, name)}
        self._default = next(iter(config.models))
        self._requests, self._ending = 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        scope[ROUTE] = route_of(scope["path"])
        self._requests += 1
        try:
            response = await self._answer(scope, receive, send)
        except ClientDisconnect:
            return
        except ApiError as problem:
            response = error_response(problem, scope["path"])
        finally:
            self._requests -= 1
        if response is not None:
            await response(scope, receive, send)

    async def drain(self, seconds: float) -> int:
        """No more requests. Returns how many are not over after so many seconds."""
        self._ending = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._requests and loop.time() < end:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        return self._requests

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """A response, or None where it is sent already."""
        if self._ending:
            raise unavailable(ENDING)
        try:
            if (response := await self._of_all(scope)) is not None:
                return response
        except _FAILURES as problem:
            raise _error(problem, scope[REQUEST]) from problem
        sent = Request(scope, receive)
        async with self._large_bodies if has_large_body(sent) else nullcontext():  # as one server does
            body = await read_body(sent, self._limits)
            request = _relayed(scope, body)
            small = len(body) <= _SMALL_BODY_BYTES  # a large one takes long to read, and all streams would wait
            name, keys = self._route(request) if small else await asyncio.to_thread(self._route, request)
        await self._relay(name, replace(request, keys=keys), scope, receive, send)
        return None

    # One replica ---------------------------------------------------------------------------------------------

    def _route(self, request: RelayedRequest) -> tuple[str, Keys]:
        """The model, and what the router knows of the prompt. A body that is no object is the replica's to refuse."""
        body: Any = {}
        if request.body:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                body = msgspec.json.decode(request.body)
        body = body if isinstance(body, dict) else {}
        name = self._model(body.get("model"), request.path)
        client = None if self._config.models[name].share_prefixes else request.key
        session = dict(request.headers).get(SESSION_HEADER, b"").decode("latin-1")
        pages = page_hashes(prompt_bytes(body), client, name)
        return name, Keys(session_hash(session, client, name) if session else None, tuple(pages))

    def _model(self, model: object, path: str) -> str:
        if model is None and path.removeprefix("/v1").startswith("/models/"):
            model = path.removeprefix("/v1").removeprefix("/models/")
        if model is None or len(self._config.models) == 1:  # the only model knows all of its names
            return self._default
        if not isinstance(model, str) or model not in self._names:
            there = ", ".join(map(repr, self._config.models))
            raise ApiError(404, f"the model {model!r} is not served here; there are {there}", param="model")
        return self._names[model]

    async def _relay(self, name: str, request: RelayedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._streams[name].remote(request)
        listening = asyncio.create_task(_cancel_when_gone(receive, parts))
        head: ResponseHead | None = None
        try:
            async for part in parts:
                if isinstance(part, ResponseHead):
                    head = part
                    await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
                else:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except (RequestCancelledError, TaskCancelledError):
            return  # nobody reads it
        except _FAILURES as problem:
            error = _error(problem, request.id)
            if head is None:
                raise error from problem
            if not _is_stream(head):
                raise
            await send({"type": "http.response.body", "body": _event(error, request.path), "more_body": True})
        except asyncio.CancelledError:
            parts.cancel()
            raise
        finally:
            listening.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    # All replicas --------------------------------------------------------------------------------------------

    async def _of_all(self, scope: Scope) -> Response | None:
        """The answer to what is asked of all replicas or models; None: one replica answers."""
        path, config = scope[ROUTE], self._config
        if scope["method"] != "GET":
            return None
        if path == "/health":
            return await self._health()
        if path == "/metrics" and config.metrics:
            return await self._metrics(scope)
        if path == "/slots" and config.slots:
            return await self._slots(scope)
        if path == "/v1/models" and len(config.models) > 1:
            return await self._models(scope)
        return None

    async def _health(self) -> Response:
        """Does every model have a replica?"""
        absent = [name for name in self._handles if not await self._replicas(name)]
        if absent:
            raise unavailable(f"no replica of {', '.join(absent)} is there yet; try again in a few seconds")
        return _json(Health("ok"))

    async def _replicas(self, name: str) -> int:
        """How many a router sees: no replica is asked."""
        deployment = deployment_name(name)
        if deployment not in routers:  # before the first request, which makes the router
            with suppress(TimeoutError, *_FAILURES):
                async with asyncio.timeout(_FIRST_SECONDS):
                    await self._one(name, _own_request("/health"))
        return len(routers[deployment].replica_names) if deployment in routers else 0

    async def _ask(self, name: str, request: RelayedRequest) -> list[tuple[str, int, bytes]]:
        """Answers of all replicas of a model: name, status and body. One that ends meanwhile is left out."""
        asked = self._handles[name].broadcast("whole", request)
        try:
            answers = await asked.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        except TimeoutError:
            late = f"not all replicas of {name} answered within {_ASK_SECONDS:g} s"
            raise unavailable(f"{late}; try again in a few seconds") from None
        return [each for each in answers if isinstance(each, tuple)]

    async def _one(self, name: str, request: RelayedRequest) -> tuple[int, bytes]:
        """The whole answer of one replica of a model: status and body."""
        status, parts = 500, list[bytes]()
        async for part in self._streams[name].remote(request):
            if isinstance(part, ResponseHead):
                status = part.status
            else:
                parts.append(part)
        return status, b"".join(parts)

    async def _metrics(self, scope: Scope) -> Response:
        texts = list[tuple[str, str]]()
        for name in self._handles:
            for replica, status, body in await self._ask(name, _relayed(scope, b"")):
                if status == 200:
                    texts.append((replica, body.decode()))
        there = {name: routers[deployment_name(name)] for name in self._handles if deployment_name(name) in routers}
        counts = {name: router.routing.counts for name, router in there.items()}
        sizes = {name: len(router.replica_names) for name, router in there.items()}
        return Response(metrics.merge(texts, self._name, counts, sizes), media_type=CONTENT_TYPE)

    async def _slots(self, scope: Scope) -> Response:
        slots = list[Any]()
        request = replace(_relayed(scope, b""), query=b"")  # a full replica is no answer: all together may not be full
        for name in self._handles:
            for _, status, body in await self._ask(name, request):
                slots += msgspec.json.decode(body) if status == 200 else []
        for number, slot in enumerate(slots):  # each replica counts from 0
            slot["id"] = number
        if b"fail_on_no_slot=1" in scope["query_string"].split(b"&") and all(each["is_processing"] for each in slots):
            raise ApiError(503, "all slots are busy")
        return _json(slots)

    async def _models(self, scope: Scope) -> Response:
        """Of each model the list of one replica, all in one."""
        listed = list[Any]()
        for name in self._handles:
            status, body = await self._one(name, _relayed(scope, b""))
            if status != 200:
                raise unavailable(f"the replica of {name} that was asked cannot answer; try again in a few seconds")
            listed += msgspec.json.decode(body)["data"]
        return _json({"object": "list", "data": listed})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _relayed(scope: Scope, body: bytes) -> RelayedRequest:
    client = scope.get("client")
    return RelayedRequest(
        scope["method"],
        scope["path"],
        scope["query_string"],
        [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        body,
        None if client is None else (client[0], client[1]),
        scope.get(CLIENT),
        scope[REQUEST],
    )


def _own_request(path: str) -> RelayedRequest:
    return RelayedRequest("GET", path, b"", [], b"", None, None, "ingress")


async def _cancel_when_gone(receive: Receive, parts: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    parts.cancel()


def _error(problem: Exception, request: str) -> ApiError:
    """What a problem between here and a replica is to a client."""
    if isinstance(problem, BackPressureError):
        wait = math.ceil(getattr(problem, "retry_after_s", None) or _RETRY_SECONDS)
        most: int = problem.args[1]
        message = f"the queue of {most:,} is full; try again later"
        return ApiError(429, message, headers={"Retry-After": str(wait)})
    if isinstance(problem, (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)):
        _log.warning("the replica of request %s is gone: %s", request, type(problem).__name__)
        message = "the replica that computed this answer has ended; send the request again"
        return ApiError(503, message, headers={"Retry-After": str(_RETRY_SECONDS)})
    _log.error("request %s failed on its replica", request, exc_info=problem)
    return ApiError(500, "the server failed while it answered; its log has the reason")


def _is_stream(head: ResponseHead) -> bool:
    return dict(head.headers).get(b"content-type", b"").startswith((b"text/event-stream", LINES.encode()))


def _event(error: ApiError, path: str) -> bytes:
    """The error as the last event of a stream, in the shape of its API."""
    if path.startswith("/api/"):
        return encode(error.ollama_body()) + b"\n"
    if path.startswith("/v1/messages"):
        return sse(error.anthropic_body(), "error")
    if path.removeprefix("/v1").startswith("/responses"):
        return sse(ErrorEvent(code=error.type, message=str(error), param=error.param), "error")
    return sse(error.body(), "error")
