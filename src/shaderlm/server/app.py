"""The application: routes, each with its types, and what happens to errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..errors import ShaderlmError
from . import anthropic, llama_server
from .access import CLIENT, Access, Origins, error_response
from .chat import Chat, conversation_of
from .completions import Completions
from .embeddings import Embeddings
from .errors import ApiError, api_error
from .limits import Limits
from .metrics import CONTENT_TYPE
from .openapi import Endpoint, Handler, document
from .page import asset
from .prepare import checked
from .request_log import ROUTE, Logged, RequestLog
from .responses import Responses
from .served import ServedModel
from .service import Service
from .streaming import respond
from .types.anthropic import CountTokensRequest, CountTokensResponse, Event, MessageResponse, MessagesRequest
from .types.llama_server import (
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaDelta,
    Props,
    Slot,
    TokenizeRequest,
    TokenizeResponse,
)
from .types.openai import (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    Model,
    ModelList,
    ModelMeta,
)
from .types.responses import Response as OpenAIResponse
from .types.responses import ResponseEvent, ResponsesRequest
from .web import Export

LARGE_BODY_BYTES = 1 << 20
# One prompt of this size takes a millisecond, mostly: less than threads that want Python's lock at the same time.
SMALL_BODY_BYTES = 2 << 10
# Grammars are made of the first ones; each value of the others is checked, for each prompt.
_SLOW_FIELDS = (
    *("tools", "response_format", "json_schema", "grammar", "text", "output_config"),
    *("logit_bias", "stop_token_ids", "n"),
)


Value = TypeVar("Value")
_log = logging.getLogger("shaderlm.server")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, if it is not too large and comes in time."""
    most = limits.body_bytes
    too_large = ApiError(413, f"the body has more than {most:,} bytes, which is the most; send less")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body took more than {limits.body_seconds:g} s to arrive; send it faster") from None
    return b"".join(parts)


async def _computed(service: Service, request: Request, compute: Callable[[ServedModel, bytes], Value]) -> Value:
    """What a thread makes of a body. Few large bodies are in memory at the same time."""
    served, length = service.served, request.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= LARGE_BODY_BYTES:
        raw = await read_body(request, service.limits)
        return await service.prepared(compute, served, raw)
    async with service.large_bodies:
        raw = await read_body(request, service.limits)
        return await service.prepared(compute, served, raw)


def is_quick(body: Any) -> bool:
    """Is a small body prepared at once? Templates are not, nor are several prompts or choices."""
    asked = (getattr(body, name, None) for name in _SLOW_FIELDS)
    return isinstance(getattr(body, "prompt", None), str) and all(value is None for value in asked)


def _generating(kind: Any, make: Any) -> Handler:
    """A route that runs the engine. Decoding, templates and tokenising are done in a thread, unless they are short."""

    async def handler(service: Service, request: Request) -> Response:
        service.check_queue()
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) <= SMALL_BODY_BYTES:
            served = service.served
            body = checked(served, await read_body(request, service.limits), kind)
            quick = is_quick(body)
            prepared = make(served, body) if quick else await service.prepared(make, served, body)
        else:
            prepared = await _computed(service, request, lambda served, raw: make(served, checked(served, raw, kind)))
        return await respond(service, prepared, request)

    return handler


def _computing(kind: Any, compute: Callable[[ServedModel, Any], Any]) -> Handler:
    """A route that computes its answer from the body alone."""

    async def handler(service: Service, request: Request) -> Response:
        def computed(served: ServedModel, raw: bytes) -> Response:
            return _json(compute(served, checked(served, raw, kind)))

        return await _computed(service, request, computed)

    return handler


# Routes without a body -----------------------------------------------------------------------------------


async def _health(service: Service, request: Request) -> Response:
    if service.has_model:
        service.served  # noqa: B018 (a 503 while it is being loaded)
    service.check_ending()
    return _json(Health("ok"))


def _model(served: ServedModel) -> Model:
    report, config = served.model.report, served.model.config
    sizes = ModelMeta(
        served.context, report.max_context, config.hidden, report.parameters, config.vocabulary, report.tensor_bytes
    )
    return Model(served.name, "model", served.created, "shaderlm", sizes)


async def _models(service: Service, request: Request) -> Response:
    return _json(ModelList("list", [_model(service.served)]))


async def _one_model(service: Service, request: Request) -> Response:
    service.served.check_name(request.path_params["model"])
    return _json(_model(service.served))


async def _props(service: Service, request: Request) -> Response:
    return _json(llama_server.props(service.served))


async def _slots(service: Service, request: Request) -> Response:
    if not service.has_slots:
        raise ApiError(501, "/slots is off; start the server with --slots")
    found = llama_server.slots(service.served, request.scope[CLIENT])
    if request.query_params.get("fail_on_no_slot") == "1" and all(slot.is_processing for slot in found):
        raise ApiError(503, "all slots are busy")
    return _json(found)


async def _metrics(service: Service, request: Request) -> Response:
    if not service.has_metrics:
        raise ApiError(501, "/metrics is off; start the server with --metrics")
    return Response(service.metrics.text(service.served), media_type=CONTENT_TYPE)


def _apply_template(served: ServedModel, body: ChatRequest) -> ApplyTemplateResponse:
    return ApplyTemplateResponse(conversation_of(body).text(served.model))


@cache
def _document() -> bytes:
    return msgspec.json.encode(document(ENDPOINTS))


async def _openapi(request: Request) -> Response:
    return Response(_document(), media_type="application/json")


async def _page(request: Request) -> Response:
    return asset(request.path_params.get("name", "index.html"))


async def _to_web(request: Request) -> Response:
    return RedirectResponse("web/")  # relative: the server may be behind a proxy, below any path


def _own_routes(service: Service, web: Export | None) -> list[Route]:
    """What is no API: its description, the page, and an export. Without a model the export is all there is."""

    async def hosted(request: Request) -> Response:
        assert web is not None
        return web.response(request.path_params["path"], request)

    found = [Route("/openapi.json", _openapi, methods=["GET"]), Route("/assets/{name}", _page, methods=["GET"])]
    found.append(Route("/", _page if service.has_model else _to_web, methods=["GET"]))
    if web is not None:
        found.append(Route("/web", _to_web, methods=["GET"]))
        found.append(Route("/web/{path:path}", hosted, methods=["GET"]))
    return found


_CHAT = _generating(ChatRequest, Chat)
_COMPLETIONS = _generating(CompletionRequest, Completions)
_EMBEDDINGS = _generating(EmbeddingRequest, Embeddings)
_RESPONSES = _generating(ResponsesRequest, Responses)
_MESSAGES = _generating(MessagesRequest, anthropic.Messages)
_LLAMA = _generating(LlamaCompletionRequest, llama_server.LlamaCompletions)

ENDPOINTS: list[Endpoint] = [
    Endpoint("GET", "/v1/models", "The models that are served", _models, "OpenAI", response=ModelList),
    Endpoint(
        "GET",
        "/v1/models/{model}",
        "One model",
        _one_model,
        "OpenAI",
        response=Model,
        errors=(404,),
        parameters=("model",),
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation",
        _CHAT,
        "OpenAI",
        ChatRequest,
        ChatResponse,
        (ChatChunk,),
        done=True,
        errors=(404, 429),
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        "Continue texts",
        _COMPLETIONS,
        "OpenAI",
        CompletionRequest,
        CompletionResponse,
        (CompletionResponse,),
        done=True,
        errors=(404, 429),
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        "Embed texts",
        _EMBEDDINGS,
        "OpenAI",
        EmbeddingRequest,
        EmbeddingResponse,
        errors=(404, 429, 501),
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        "Answer text or items",
        _RESPONSES,
        "OpenAI",
        ResponsesRequest,
        OpenAIResponse,
        (ResponseEvent,),
        errors=(404, 429),
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        "Answer a conversation",
        _MESSAGES,
        "Anthropic",
        MessagesRequest,
        MessageResponse,
        (Event,),
        errors=(404, 429),
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of a prompt",
        _computing(CountTokensRequest, anthropic.count_tokens),
        "Anthropic",
        CountTokensRequest,
        CountTokensResponse,
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/completion",
        "Continue a text",
        _LLAMA,
        "llama-server",
        LlamaCompletionRequest,
        LlamaCompletion,
        (LlamaDelta, LlamaCompletion),
        errors=(404, 429),
    ),
    Endpoint(
        "POST",
        "/tokenize",
        "Token ids of a text",
        _computing(TokenizeRequest, llama_server.tokenize),
        "llama-server",
        TokenizeRequest,
        TokenizeResponse,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        "The text of token ids",
        _computing(DetokenizeRequest, llama_server.detokenize),
        "llama-server",
        DetokenizeRequest,
        DetokenizeResponse,
    ),
    Endpoint(
        "POST",
        "/apply-template",
        "The prompt of a conversation",
        _computing(ChatRequest, _apply_template),
        "llama-server",
        ChatRequest,
        ApplyTemplateResponse,
    ),
    Endpoint("GET", "/props", "What is served, and how", _props, "llama-server", response=Props),
    Endpoint(
        "GET",
        "/slots",
        "What runs and waits",
        _slots,
        "llama-server",
        response=list[Slot],
        errors=(501,),
        parameters=("fail_on_no_slot",),
    ),
    Endpoint("GET", "/health", "Is the model loaded?", _health, "llama-server", response=Health),
    Endpoint(
        "GET",
        "/metrics",
        "Numbers for Prometheus",
        _metrics,
        "llama-server",
        errors=(501,),
        media_type=CONTENT_TYPE.partition(";")[0],
    ),
]


# The application -----------------------------------------------------------------------------------------


def _route(service: Service, endpoint: Endpoint) -> Route:
    async def answer(request: Request) -> Response:
        request.scope[ROUTE] = endpoint.path
        return await endpoint.handler(service, request)

    path = endpoint.path.replace("{model}", "{model:path}")  # names may have slashes
    return Route(path, answer, methods=[endpoint.method])


def _on_error(request: Request, problem: Exception) -> Response:
    if isinstance(problem, HTTPException):
        return error_response(_routing_error(request, problem), request.url.path)
    if isinstance(problem, ClientDisconnect):
        return Response(status_code=400)  # nobody reads it
    error = api_error(problem, "request", request.url.path)
    if error.status == 500 and isinstance(problem, ShaderlmError):  # uvicorn logs the others
        _log.error("%s failed", request.url.path, exc_info=problem)
    return error_response(error, request.url.path)


def _routing_error(request: Request, problem: HTTPException) -> ApiError:
    if problem.status_code == 405:
        allowed = (problem.headers or {}).get("Allow", "")
        message = f"{request.url.path} does not take {request.method}; it takes {allowed}"
        return ApiError(405, message, headers={"Allow": allowed})
    return ApiError(404, f"there is no {request.url.path}; /openapi.json lists what there is")


def make_app(
    service: Service,
    *,
    keys: Sequence[str] = (),
    origins: Origins,
    host: str = "127.0.0.1",
    web: Export | None = None,
    log: RequestLog | None = None,
) -> ASGIApp:
    """The application over a service that may still load its model. `web`: what `/web/` has."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    expected = (ApiError, ShaderlmError, RecursionError, HTTPException, ClientDisconnect)
    app = Starlette(
        routes=[*(_route(service, endpoint) for endpoint in ENDPOINTS), *_own_routes(service, web)],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((*expected, Exception), _on_error),
    )
    guarded = Access(app, keys, origins, host)
    return guarded if log is None else Logged(guarded, log)
