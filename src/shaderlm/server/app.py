"""The application: routes, each with its types, and what happens to errors."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
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
from . import anthropic, llama_server, ollama, ollama_models, slots
from .access import CLIENT, Access, Origins, error_response
from .chat import Chat, conversation_of
from .completions import Completions
from .embeddings import Embeddings, LlamaEmbeddings
from .errors import ApiError, api_error
from .header_case import HeaderCase
from .images import Images, check_count, check_sees, is_address, urls_of
from .infill import Infill
from .leases import releasing, use_model
from .limits import Limits
from .metrics import CONTENT_TYPE, metrics_text
from .model_routes import check_changeable, load, models, one_model, unload
from .openapi import document
from .page import asset
from .prepare import decode, read
from .request_log import ROUTE, Logged, RequestLog
from .responses import Responses, count_tokens
from .routes import Endpoint, Prepared, keep_seconds, model_of
from .served import ServedModel
from .service import Service
from .streaming import respond
from .types.anthropic import CountTokensRequest, CountTokensResponse
from .types.llama_server import (
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    ModelRequest,
    Props,
    Slot,
    SlotFileRequest,
    SlotFileResponse,
    Success,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from .types.ollama import (
    OllamaCopyRequest,
    OllamaModelRequest,
    OllamaProgress,
    OllamaPullRequest,
    OllamaRunningModels,
    OllamaShowRequest,
    OllamaShowResponse,
    OllamaStatus,
    OllamaTags,
    OllamaVersion,
)
from .types.openai import ChatRequest, Model, ModelList
from .types.responses import DeletedResponse, ResponsesRequest
from .types.responses import Response as StoredResponse
from .web import Export

_LONGEST_PATH = 100  # characters that are compared with those of routes
LARGE_BODY_BYTES = 1 << 20
NAMES_BYTES = 64 << 10  # of a body that only names a model or a file
# One prompt of this size takes a millisecond, mostly: less than threads that want Python's lock at the same time.
SMALL_BODY_BYTES = 2 << 10
# Grammars are made of the first ones; each value of the others is checked, for each prompt.
_SLOW_FIELDS = (
    *("tools", "response_format", "json_schema", "grammar", "text", "output_config", "format"),
    *("logit_bias", "stop_token_ids", "n"),
)


Value = TypeVar("Value")
Handler = Callable[[Service, Request], Awaitable[Response]]
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


async def _small_body(service: Service, request: Request, kind: type[Value]) -> Value:
    """A body that has names alone: a large one is not even read, for nothing limits how many there are. It may be empty
    if nothing is required.
    """
    limits = replace(service.limits, body_bytes=min(service.limits.body_bytes, NAMES_BYTES))
    return decode(await read_body(request, limits) or b"{}", kind)


def has_large_body(request: Request) -> bool:
    """Or one whose size is not known before it is read."""
    length = request.headers.get("content-length", "" if "transfer-encoding" in request.headers else "0")
    return not length.isdecimal() or int(length) > LARGE_BODY_BYTES


async def _compute(
    service: Service, request: Request, body_type: Any, compute: Callable[[ServedModel, Any], Value], *, images: bool
) -> Value:
    """What a thread makes of a body. Few large bodies are in memory at the same time, while models are loaded, too."""
    async with service.large_bodies if has_large_body(request) else nullcontext():
        raw = await read_body(request, service.body_limits(images=images))
        if service.models.is_pinned:
            served = service.served
            return await service.prepare(lambda: compute(served, read(service.limits, raw, body_type)))
        body = await service.prepare(read, service.limits, raw, body_type)
        served = await use_model(service, request, model_of(body))
        return await service.prepare(compute, served, body)


def is_quick(body: Any) -> bool:
    """Is a small body prepared at once? Templates are not, nor are several prompts or choices."""
    slow = any(getattr(body, name, None) is not None for name in _SLOW_FIELDS)
    slow = slow or not getattr(body, "raw", True)  # Ollama's prompts are rendered by a template, too
    prompt = getattr(body, "prompt", None)
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt))
    return is_one and not slow


def _generating(kind: type[Prepared]) -> Handler:
    """A route that runs the engine. Decoding, templates and tokenising are done in a thread, unless they are short."""

    async def handler(service: Service, request: Request) -> Response:
        service.check_queue()
        length = request.headers.get("content-length", "")
        is_small = length.isdecimal() and int(length) <= SMALL_BODY_BYTES
        async with service.large_bodies if has_large_body(request) else nullcontext():
            raw = await read_body(request, service.body_limits(images=kind.reads_images))
            decoding = service.limits, raw, kind.route.body
            body = read(*decoding) if is_small else await service.prepare(read, *decoding)
            if kind.unloads(body):
                return await _unloaded(service, kind, body)
            served = await use_model(service, request, body.model, keep_seconds(body))
            is_now, client = is_small and is_quick(body), request.scope[CLIENT]
            whole = body
            if getattr(body, "previous_response_id", None) is not None:
                whole = await service.prepare(kind.recall, body, service.responses, client)
            given: tuple[Any, ...] = (served, whole)
            pictures = [*urls_of(whole)] if kind.reads_images else []
            if kind.reads_images:
                given += (Images(served, client, await _fetched(service, served, pictures)),)
            prepared = kind(*given) if is_now else await service.prepare(kind, *given, images=bool(pictures))
            prepared.remember(body, service.responses, client)
        return await respond(service, prepared, request)

    return handler


async def _fetched(
    service: Service, served: ServedModel, pictures: Sequence[tuple[str, str]]
) -> dict[str, bytes] | None:
    """What is at the addresses of pictures; None: this server fetches nothing."""
    addresses = [pair for pair in pictures if is_address(pair[1])]
    if service.fetcher is None or not addresses:
        return None
    check_sees(served, addresses[0][0])
    check_count(len(pictures), addresses[-1][0])
    return await service.fetcher.fetch(addresses)


async def _unloaded(service: Service, kind: type[Prepared], body: Any) -> Response:
    """Ollama's way to close a model, which is not loaded for that."""
    model = await service.models.find(body.model)
    check_changeable(service, model, "keep_alive")
    service.models.unload(model)
    return _json(kind.unloaded(model.name))


# Routes without a body -----------------------------------------------------------------------------------


async def _health(service: Service, request: Request) -> Response:
    if service.has_model:
        service.check_model()
    service.check_ending()
    return _json(Health("ok"))


async def _asked(service: Service, request: Request) -> ServedModel:
    """The model of a route without a body."""
    return await use_model(service, request, request.query_params.get("model"))


async def _props(service: Service, request: Request) -> Response:
    served = await _asked(service, request)
    return _json(llama_server.props(served, slots=service.has_slots, metrics=service.has_metrics))


async def _tokenizer_info(service: Service, request: Request) -> Response:
    return _json(llama_server.tokenizer_info(await _asked(service, request)))


async def _slots(service: Service, request: Request) -> Response:
    if not service.has_slots:
        raise ApiError(501, "/slots is off; start the server with --slots")
    service.check_model()
    models, name = service.models.loaded(), request.query_params.get("model")
    if name is not None:  # of one that is not loaded, there are none
        models = [each for each in (await service.models.find(name),) if each.served is not None]
    loaded = [each.served for each in models if each.served is not None]
    places = [slot for served in loaded for slot in llama_server.slots(served, request.scope[CLIENT])]
    if request.query_params.get("fail_on_no_slot") == "1" and all(slot.is_processing for slot in places):
        raise ApiError(503, "all slots are busy")
    return _json(places)


async def _metrics(service: Service, request: Request) -> Response:
    if not service.has_metrics:
        raise ApiError(501, "/metrics is off; start the server with --metrics")
    service.check_model()
    headers = {"Process-Start-Time-Unix": str(int(service.started))}
    return Response(metrics_text(service.numbers()), headers=headers, media_type=CONTENT_TYPE)


def _input_tokens(served: ServedModel, body: ChatRequest) -> CountTokensResponse:
    served.check_name(body.model)
    return CountTokensResponse(len(conversation_of(body, Images(served)).ids(served)))


async def _stored_response(service: Service, request: Request) -> Response:
    stored = service.responses.response(request.scope[CLIENT], request.path_params["response_id"])
    return Response(stored, media_type="application/json")


async def _forget_response(service: Service, request: Request) -> Response:
    response_id = request.path_params["response_id"]
    service.responses.remove(request.scope[CLIENT], response_id)
    return _json(DeletedResponse(id=response_id))


async def _slot(service: Service, request: Request) -> Response:
    body = await _small_body(service, request, SlotFileRequest)
    served = await _asked(service, request)
    action, client = request.query_params.get("action", ""), request.scope[CLIENT]
    number = request.path_params["id"]
    return _json(await service.prepare(slots.change, served.slots, number, action, body.filename, client))


async def _rerank(service: Service, request: Request) -> Response:
    raise ApiError(501, "this server has no model that ranks documents")


async def _lora_adapters(service: Service, request: Request) -> Response:
    service.check_model()
    return _json([])


def _of_models(compute: Callable[[Service], Any]) -> Handler:
    """Ollama's lists. What a template can do, a process of its own says."""

    async def handler(service: Service, request: Request) -> Response:
        service.check_model()
        await service.models.refresh()
        return _json(await service.prepare(compute, service))

    return handler


async def _version(service: Service, request: Request) -> Response:
    if not service.has_model:
        service.check_model()  # a 501: nothing is computed here
    return _json(OllamaVersion(ollama_models.VERSION))


async def _pull(service: Service, request: Request) -> Response:
    body = await _small_body(service, request, OllamaPullRequest)
    return await ollama_models.pull(service, body, request)


def _apply_template(served: ServedModel, body: ChatRequest) -> ApplyTemplateResponse:
    return ApplyTemplateResponse(conversation_of(body, Images(served)).text(served))


@cache
def _document() -> bytes:
    return msgspec.json.encode(document(ENDPOINTS))


async def _openapi(request: Request) -> Response:
    return Response(_document(), media_type="application/json")


async def _page(request: Request) -> Response:
    return asset(request.path_params.get("name", "index.html"))


async def _to_web(request: Request) -> Response:
    return RedirectResponse("web/")  # relative: the server may be behind a proxy, below any path


def _static_routes(service: Service, web: Export | None) -> list[Route]:
    """What is no API: its description, the page, and an export. Without a model the export is all there is."""

    async def hosted(request: Request) -> Response:
        assert web is not None
        return web.response(request.path_params["path"], request)

    routes = [
        Route("/openapi.json", _openapi),
        Route("/assets/{name}", _page),
        Route("/", _page if service.has_model else _to_web),
    ]
    if web is not None:
        routes += [Route("/web", _to_web), Route("/web/{path:path}", hosted)]
    return routes


_GENERATING: tuple[type[Prepared], ...] = (
    *(Chat, Completions, Embeddings, Responses, anthropic.Messages),
    *(llama_server.LlamaCompletions, Infill, LlamaEmbeddings),
    *(ollama.Chat, ollama.Generate, ollama.Embed, ollama.Embeddings),
)


def _get(path: str, summary: str, handler: Handler, response: Any = None, **options: Any) -> Endpoint:
    return Endpoint(path, summary, response=response, method="GET", handler=handler, **options)


def _about(path: str, summary: str, body: Any, response: Any, change: Any, **options: Any) -> Endpoint:
    """A route about models, which runs none."""

    async def handler(service: Service, request: Request) -> Response:
        return _json(await change(service, await _small_body(service, request, body)))

    return Endpoint(path, summary, body, response, handler=handler, **options)


def _post(
    path: str, summary: str, body: Any, response: Any, compute: Any, *, images: bool = False, **options: Any
) -> Endpoint:
    """A route that computes its answer from the body alone. `images`: there may be pictures in it."""

    async def handler(service: Service, request: Request) -> Response:
        answer = lambda served, body: _json(compute(served, body))  # noqa: E731
        return await _compute(service, request, body, answer, images=images)

    return Endpoint(path, summary, body, response, handler=handler, **options)


ENDPOINTS: list[Endpoint] = [
    *(replace(kind.route, handler=_generating(kind), errors=(404, 429, *kind.route.errors)) for kind in _GENERATING),
    _get("/v1/models", "The models that are served", models, ModelList, api="OpenAI", aliases=("/models",)),
    _get(
        *("/v1/models/{model}", "One model", one_model, Model),
        api="OpenAI",
        errors=(404,),
        parameters=("model",),
        aliases=("/models/{model}",),
    ),
    _about("/models/load", "Load a model", ModelRequest, Success, load, errors=(404,)),
    _about("/models/unload", "Close a model once its requests are over", ModelRequest, Success, unload, errors=(404,)),
    _post(
        *("/v1/messages/count_tokens", "Count the tokens of a prompt", CountTokensRequest, CountTokensResponse),
        compute=anthropic.count_tokens,
        images=True,
        api="Anthropic",
        errors=(404,),
    ),
    _post(
        *("/v1/chat/completions/input_tokens", "Count the tokens of a prompt", ChatRequest, CountTokensResponse),
        compute=_input_tokens,
        images=True,
        api="OpenAI",
        errors=(404,),
        aliases=("/chat/completions/input_tokens",),
    ),
    _post(
        *("/v1/responses/input_tokens", "Count the tokens of a prompt", ResponsesRequest, CountTokensResponse),
        compute=count_tokens,
        images=True,
        api="OpenAI",
        errors=(404,),
        aliases=("/responses/input_tokens",),
    ),
    *(
        Endpoint(
            *("/v1/responses/{response_id}", summary, None, kind),
            method=method,
            handler=handler,
            api="OpenAI",
            errors=(404,),
            parameters=("response_id",),
            aliases=("/responses/{response_id}",),
        )
        for method, summary, kind, handler in (
            ("GET", "A response that is kept", StoredResponse, _stored_response),
            ("DELETE", "Forget a response", DeletedResponse, _forget_response),
        )
    ),
    _post("/tokenize", "Token ids of a text", TokenizeRequest, TokenizeResponse, llama_server.tokenize),
    _post("/detokenize", "The text of token ids", DetokenizeRequest, DetokenizeResponse, llama_server.detokenize),
    _get("/tokenizer_info", "Special tokens and the chat template", _tokenizer_info, TokenizerInfo, api="vLLM"),
    _post(
        *("/apply-template", "The prompt of a conversation", ChatRequest, ApplyTemplateResponse, _apply_template),
        images=True,
    ),
    _get("/props", "What is served, and how", _props, Props, errors=(404,), parameters=("model_name",)),
    _get(
        *("/slots", "What runs and waits", _slots, list[Slot]),
        errors=(404, 501),
        parameters=("fail_on_no_slot", "model_name"),
    ),
    Endpoint(
        *("/slots/{id}", "Save, restore or erase a slot", SlotFileRequest, SlotFileResponse),
        handler=_slot,
        errors=(404, 501),
        parameters=("id", "action", "model_name"),
    ),
    Endpoint("/rerank", "Rank documents", handler=_rerank, errors=(501,), aliases=("/v1/rerank",)),
    _get("/lora-adapters", "Adapters: none", _lora_adapters, list[Any]),
    _get("/health", "Is the model loaded?", _health, Health, aliases=("/v1/health",)),
    _get("/metrics", "Numbers for Prometheus", _metrics, errors=(501,), media_type=CONTENT_TYPE.partition(";")[0]),
    _get("/api/tags", "The models that are served", _of_models(ollama_models.tags), OllamaTags, api="Ollama"),
    _get("/api/ps", "The models that are loaded", _of_models(ollama_models.running), OllamaRunningModels, api="Ollama"),
    _get("/api/version", "The version of the API", _version, OllamaVersion, api="Ollama"),
    _about(
        *("/api/show", "What a model is", OllamaShowRequest, OllamaShowResponse, ollama_models.show),
        api="Ollama",
        errors=(404,),
    ),
    _about(
        *("/api/copy", "Not here: a model has its names from the start", OllamaCopyRequest, OllamaStatus),
        ollama_models.copy,
        api="Ollama",
    ),
    Endpoint(
        *("/api/pull", "Fetch a model", OllamaPullRequest, OllamaProgress, (OllamaProgress,)),
        api="Ollama",
        errors=(404, 501),
        handler=_pull,
    ),
    _about(
        *("/api/delete", "Remove a model that was fetched here", OllamaModelRequest, OllamaStatus),
        ollama_models.delete,
        method="DELETE",
        api="Ollama",
        errors=(404, 501),
    ),
]


# The application -----------------------------------------------------------------------------------------


def _routes(service: Service, endpoint: Endpoint) -> list[Route]:
    async def answer(request: Request) -> Response:
        request.scope[ROUTE] = endpoint.path
        response: Response = await endpoint.handler(service, request)
        return response

    return [
        Route(
            path.replace("{model}", "{model:path}"), releasing(answer), methods=[endpoint.method]
        )  # names may have slashes
        for path in endpoint.paths
    ]


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
    return ApiError(
        404, f"there is no {request.url.path}; {_nearest(request.url.path)}/openapi.json lists what there is"
    )


def _nearest(path: str) -> str:
    """The route that a client may mean; "" if none is like this path."""
    known = [each for endpoint in ENDPOINTS for each in endpoint.paths]
    near = difflib.get_close_matches(path[:_LONGEST_PATH], known, 1, 0.8)
    return f"did you mean {near[0]}? " if near else ""


def route_of(path: str) -> str:
    """The route that a path belongs to, as the log names it; "-" if there is none."""
    for endpoint in ENDPOINTS:
        for each in endpoint.paths:
            name, _, parameter = each.partition("{")
            if path == name or (parameter and path.startswith(name) and len(path) > len(name)):
                return endpoint.path
    return "-"


def make_routes(service: Service, *, web: Export | None = None) -> ASGIApp:
    """All routes over a service, for requests that were let in: their scope says who asks."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    expected = (ApiError, ShaderlmError, RecursionError, HTTPException, ClientDisconnect)
    return Starlette(
        routes=[
            *(route for endpoint in ENDPOINTS for route in _routes(service, endpoint)),
            *_static_routes(service, web),
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((*expected, Exception), _on_error),
    )


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
    guarded = Access(make_routes(service, web=web), keys, origins, host)
    return HeaderCase(guarded if log is None else Logged(guarded, log))
