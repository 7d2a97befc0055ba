"""Ollama's routes about models: those that are served, and those that are fetched to be served by another start."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..errors import ModelError, ShaderlmError
from ..formats.local_models import remove
from ..text import ChatTemplate
from .durations import date_of
from .errors import ApiError, api_error
from .generation import check_supported
from .model_facts import ModelFacts, facts_of
from .model_routes import exactly
from .models import HostedModel
from .ollama import LINES, knows_thoughts, plain_name
from .pulls import Pulls, pull_source
from .served import ServedModel
from .service import Service
from .types import ollama as types

VERSION = "0.32.0"  # whose API this is: clients ask before they use what older ones did not have
_FOREVER = "2200-01-01T00:00:00Z"  # Ollama's own programs print dates so far away as "Forever"
_POLL_SECONDS = 0.1
_log = logging.getLogger("shaderlm.server")


# What is served ------------------------------------------------------------------------------------------


def tags(service: Service) -> types.OllamaTags:
    """All models that can be asked."""
    return types.OllamaTags([_model(service.facts.facts(each)) for each in service.models.all()])


def running(service: Service) -> types.OllamaRunningModels:
    """All models that are loaded."""
    loaded = [(each, each.served) for each in service.models.all()]
    return types.OllamaRunningModels([_running(each, served) for each, served in loaded if served is not None])


def _model(facts: ModelFacts) -> types.OllamaModel:
    return types.OllamaModel(
        name=facts.name,
        model=facts.name,
        modified_at=_modified_at(facts),
        size=facts.file_bytes,
        digest=_digest(facts),
        details=_details(facts),
        capabilities=_capabilities(facts),
    )


def _running(model: HostedModel, served: ServedModel) -> types.OllamaRunningModel:
    report, facts = served.model.report, facts_of(served)
    return types.OllamaRunningModel(
        name=facts.name,
        model=facts.name,
        size=report.weight_bytes,
        digest=_digest(facts),
        details=_details(facts),
        expires_at=date_of(model.expires_at) if model.expires_at is not None else _FOREVER,
        size_vram=report.weight_bytes if report.backend else 0,  # without WebGPU the CPU computes
        context_length=served.context,
    )


async def show(service: Service, body: types.OllamaShowRequest) -> types.OllamaShowResponse:
    """What a model is. It is not loaded for that."""
    service.check_model()
    model = await exactly(service, _name(body))
    return await service.prepare(lambda: shown(service.facts.facts(model)))


def shown(facts: ModelFacts) -> types.OllamaShowResponse:
    """The same of what is known."""
    words = {"repetition_penalty": "repeat_penalty"}
    values = {words.get(name, name): value for name, value in facts.sampling.items()}
    parameters = {"num_ctx": facts.context, **values}
    lines = [f"FROM {facts.path}", *(f"PARAMETER {name} {value}" for name, value in parameters.items())]
    return types.OllamaShowResponse(
        modelfile="\n".join(lines) + "\n",
        parameters="\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        template="" if facts.template is None else str(facts.template.source),
        details=_details(facts),
        model_info=_info(facts),
        capabilities=_capabilities(facts),
        modified_at=_modified_at(facts),
    )


def _info(facts: ModelFacts) -> dict[str, Any]:
    config = facts.config
    if config is None:
        return {}
    kind = config.architecture
    return {
        "general.architecture": kind,
        "general.basename": facts.own_name or facts.name,
        "general.parameter_count": facts.parameters,
        f"{kind}.context_length": facts.context,
        f"{kind}.embedding_length": config.hidden,
        f"{kind}.block_count": config.layers,
        f"{kind}.attention.head_count": config.heads,
        f"{kind}.attention.head_count_kv": config.kv_heads,
        f"{kind}.vocab_size": config.vocabulary,
    }


def _details(facts: ModelFacts) -> types.OllamaDetails:
    unit, divisor = ("B", 1e9) if facts.parameters >= 1e9 else ("M", 1e6)
    family = "" if facts.config is None else facts.config.architecture
    return types.OllamaDetails(
        format="safetensors" if facts.path is not None and facts.path.is_dir() else "gguf",
        family=family,
        families=[family] if family else [],
        parameter_size=f"{facts.parameters / divisor:.1f}{unit}",
        quantization_level=next(iter(facts.types), "").upper(),
    )


def _capabilities(facts: ModelFacts) -> list[str]:
    """In Ollama's words."""
    capabilities = ["completion"]
    if _calls_tools(facts.template):
        capabilities.append("tools")
    if knows_thoughts(facts.template):
        capabilities.append("thinking")
    if facts.embedding:
        capabilities.append("embedding")
    if facts.vision:
        capabilities.append("vision")
    return capabilities


def _calls_tools(template: ChatTemplate | None) -> bool:
    if template is None:
        return False
    try:
        template.call_form  # noqa: B018 (says whether there is one)
    except ShaderlmError:  # a form that is not known, or a broken template
        return False
    return True


def _digest(facts: ModelFacts) -> str:
    """Not of the content, which would take minutes: of what changes with it."""
    text = f"{facts.path}\n{facts.file_bytes}\n{_modified_at(facts)}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _modified_at(facts: ModelFacts) -> str:
    seconds = 0.0
    if facts.path is not None:
        with suppress(OSError):  # synthetic, or removed meanwhile
            seconds = facts.path.stat().st_mtime
    return date_of(seconds)


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
    model = service.models.all()[0]
    return name.removesuffix(":latest") == model.name if model.served is None else _knows(model.served, name)


def _knows(served: ServedModel, name: str) -> bool:
    return served.knows(plain_name(served, name))


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
