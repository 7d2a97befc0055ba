"""Ollama's routes about models: those that are served, and those that are fetched to be served by another start."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..engine import LanguageModel
from ..errors import ModelError, ShaderlmError
from ..formats.local_models import remove
from ..text import call_format
from .errors import ApiError, api_error
from .generation import check_supported
from .ollama import LINES, plain_name, thinks
from .pulls import Pulls, pull_source
from .served import ServedModel
from .service import Service
from .types import ollama as types

VERSION = "0.32.0"  # whose API this is: clients ask before they use what older ones did not have
_FOREVER = "2200-01-01T00:00:00Z"  # Ollama's own programs print dates so far away as "Forever"
_POLL_SECONDS = 0.1
_log = logging.getLogger("shaderlm.server")


# What is served ------------------------------------------------------------------------------------------


def served_models(service: Service) -> list[ServedModel]:
    """The models that are loaded."""
    service.check_model()
    return [each.served for each in service.models.loaded() if each.served is not None]


def tags(service: Service) -> types.OllamaTags:
    """All models that can be asked."""
    return types.OllamaTags([_model(each) for each in served_models(service)])


def running(service: Service) -> types.OllamaRunningModels:
    """All models that are loaded."""
    return types.OllamaRunningModels([_running(each) for each in served_models(service)])


def _model(served: ServedModel) -> types.OllamaModel:
    report = served.model.report
    return types.OllamaModel(
        name=served.name,
        model=served.name,
        modified_at=_modified_at(served),
        size=report.file_bytes,
        digest=_digest(served),
        details=_details(served),
        capabilities=_capabilities(served),
    )


def _running(served: ServedModel) -> types.OllamaRunningModel:
    report = served.model.report
    return types.OllamaRunningModel(
        name=served.name,
        model=served.name,
        size=report.weight_bytes,
        digest=_digest(served),
        details=_details(served),
        expires_at=_FOREVER,
        size_vram=report.weight_bytes if report.backend else 0,  # without WebGPU the CPU computes
        context_length=served.context,
    )


def show(served: ServedModel, body: types.OllamaShowRequest) -> types.OllamaShowResponse:
    """What a model is."""
    served.require_name(plain_name(served, _name(body)))
    model, report = served.model, served.model.report
    config, kind = model.config, report.architecture
    words = {"repetition_penalty": "repeat_penalty"}
    values = {words.get(name, name): value for name, value in served.sampling_defaults.items()}
    parameters = {"num_ctx": served.context, **values}
    template = model.chat_template
    lines = [f"FROM {report.path}", *(f"PARAMETER {name} {value}" for name, value in parameters.items())]
    return types.OllamaShowResponse(
        modelfile="\n".join(lines) + "\n",
        parameters="\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        template="" if template is None else str(template.source),
        details=_details(served),
        model_info={
            "general.architecture": kind,
            "general.basename": report.own_name or report.name,
            "general.parameter_count": report.parameters,
            f"{kind}.context_length": served.context,
            f"{kind}.embedding_length": config.hidden,
            f"{kind}.block_count": config.layers,
            f"{kind}.attention.head_count": config.heads,
            f"{kind}.attention.head_count_kv": config.kv_heads,
            f"{kind}.vocab_size": config.vocabulary,
        },
        capabilities=_capabilities(served),
        modified_at=_modified_at(served),
    )


def _details(served: ServedModel) -> types.OllamaDetails:
    report = served.model.report
    unit, divisor = ("B", 1e9) if report.parameters >= 1e9 else ("M", 1e6)
    return types.OllamaDetails(
        format="safetensors" if report.path.is_dir() else "gguf",
        family=report.architecture,
        families=[report.architecture],
        parameter_size=f"{report.parameters / divisor:.1f}{unit}",
        quantization_level=next(iter(report.types)).upper(),
    )


def _capabilities(served: ServedModel) -> list[str]:
    """In Ollama's words."""
    found = ["completion"]
    if _calls_tools(served.model):
        found.append("tools")
    if thinks(served):
        found.append("thinking")
    if served.embedding:
        found.append("embedding")
    return found


def _calls_tools(model: LanguageModel) -> bool:
    template = model.chat_template
    if template is None:
        return False
    try:
        call_format(str(template.source), knows_tools=template.knows_tools)
    except ShaderlmError:  # a form that is not known, or a broken template
        return False
    return True


def _digest(served: ServedModel) -> str:
    """Not of the content, which would take minutes: of what changes with it."""
    report = served.model.report
    text = f"{report.path}\n{report.file_bytes}\n{_modified_at(served)}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _modified_at(served: ServedModel) -> str:
    seconds = float(served.created)
    with suppress(OSError):  # synthetic, or removed meanwhile
        seconds = served.model.report.path.stat().st_mtime
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def _name(body: types.OllamaModelRequest) -> str:
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is missing; this route needs it", param="model")
    return name


# What is fetched -----------------------------------------------------------------------------------------


def _is_served(service: Service, name: str) -> bool:
    """Is it a model of this server?"""
    if not service.models.is_one:
        return service.models.get(name) is not None
    return service.served.knows(plain_name(service.served, name))


def _pulls(service: Service) -> Pulls:
    service.check_ending()
    if service.pulls is None:
        raise ApiError(501, "this server fetches and removes no models; start it with --pull")
    return service.pulls


async def pull(service: Service, body: types.OllamaPullRequest, request: Request) -> Response:
    """Fetch a model, with lines that say how far it is. One that runs here is there already."""
    check_supported(body)
    service.check_model()
    name = _name(body)
    lines = _there(name) if _is_served(service, name) else _progress(service, _pulls(service), pull_source(name))
    if body.stream is not False:
        return StreamingResponse(_encoded(lines), media_type=LINES)
    async with aclosing(lines):
        async for _ in lines:
            if await request.is_disconnected():
                break
    return Response(msgspec.json.encode(types.OllamaProgress(status="success")), media_type="application/json")


async def _encoded(lines: AsyncIterator[types.OllamaProgress]) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            yield msgspec.json.encode(line) + b"\n"
    except ApiError as problem:
        yield msgspec.json.encode(problem.ollama_body()) + b"\n"


async def _there(name: str) -> AsyncGenerator[types.OllamaProgress]:
    yield types.OllamaProgress(status=f"{name} is served here")
    yield types.OllamaProgress(status="success")


async def _progress(service: Service, pulls: Pulls, source: str) -> AsyncGenerator[types.OllamaProgress]:
    """What a pull does, until it is over. It ends with the last request that waits for it."""
    yield types.OllamaProgress(status=f"pulling {source}")
    pull, shown = pulls.join(source), ("", 0, 0)
    try:
        is_over = False
        while not is_over:
            is_over = pull.is_over  # before the last numbers are read
            if pull.progress != shown:
                shown = label, done, total = pull.progress
                digest = f"sha256:{hashlib.sha256(label.encode()).hexdigest()}"
                yield types.OllamaProgress(status=label, digest=digest, total=total, completed=done)
            service.check_ending()
            await asyncio.sleep(0 if is_over else _POLL_SECONDS)
    finally:
        pulls.leave(pull)
    if pull.problem is not None:
        error = api_error(pull.problem, "request")
        if error.status == 500:
            _log.error("a pull failed", exc_info=pull.problem)
        raise error
    names = f"{service.served.name} alone" if service.models.is_pinned else "the models that it was started with"
    next_step = f"this server serves {names}, `shaderlm serve -m {source}` serves this one"
    yield types.OllamaProgress(status=f"it is kept here; {next_step}")
    yield types.OllamaProgress(status="success")


async def delete(service: Service, body: types.OllamaModelRequest) -> types.OllamaStatus:
    """Remove a model that this server has fetched."""
    pulls, name = _pulls(service), _name(body)
    service.check_model()
    if _is_served(service, name):
        raise ApiError(400, f"{name} is served here; end the server before it is removed", param="model")
    source = pull_source(name)
    if source not in pulls.fetched:
        how = f"`shaderlm rm {source}` removes it"
        raise ApiError(400, f"{name} was not fetched by this server, which therefore keeps it; {how}", param="model")
    try:
        await asyncio.to_thread(remove, source)
    except ModelError as problem:
        raise ApiError(404, str(problem), param="model") from None
    finally:
        pulls.fetched.discard(source)
    return types.OllamaStatus()


async def copy(service: Service, body: types.OllamaCopyRequest) -> types.OllamaStatus:
    """Names are given when the server starts."""
    service.check_model()
    raise ApiError(400, f"models are not copied here; --alias {body.destination} gives the model another name")
