"""Routes about the models themselves: which there are, and loading and closing them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ..errors import ShaderlmError
from .durations import date_of
from .errors import ApiError
from .models import HostedModel
from .served import ServedModel
from .service import Service
from .types.llama_server import ModelRequest, Success
from .types.openai import Architecture, ListedModel, Model, ModelList, ModelMeta, ModelStatus

ANY = "*"  # as llama-server: all models


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def described(model: HostedModel) -> Model:
    """What the list says of a model."""
    source, problem = model.source, model.problem
    until = "" if model.expires_at is None else date_of(model.expires_at)
    error = "" if problem is None else str(problem) if isinstance(problem, ShaderlmError) else type(problem).__name__
    status = ModelStatus(model.state, problem is not None, error, model.leases + model.waiting, until)
    path = UNSET if model.path is None else str(model.path)
    if model.served is None:
        names = [model.name, *source.aliases]
        return Model(model.name, "model", 0, "shaderlm", names, [*source.tags], status=status, path=path)
    return _loaded(model.served, status, path)


def _loaded(served: ServedModel, status: ModelStatus, path: Any) -> Model:
    report, config = served.model.report, served.model.config
    meta = ModelMeta(
        served.context, report.max_context, config.hidden, report.parameters, config.vocabulary, report.tensor_bytes
    )
    names, tags = [*(served.names or (served.name,))], [*served.tags]
    reads: list[Any] = ["text", *(["image"] if served.model.vision is not None else [])]
    kind = Architecture(reads, ["text"])
    return Model(served.name, "model", served.created, "shaderlm", names, tags, meta, status, path, kind)


def _listed(model: HostedModel) -> ListedModel:
    listed = ListedModel(model.name, model.name, "model", [*model.source.tags])
    if (served := model.served) is not None:
        listed.name = listed.model = served.name
        listed.capabilities = ["completion", "multimodal"] if served.model.vision is not None else ["completion"]
    return listed


async def models(service: Service, request: Request) -> Response:
    """All of them."""
    service.check_model()
    await service.models.refresh()
    there = service.models.all()
    return _json(ModelList("list", [described(each) for each in there], [_listed(each) for each in there]))


async def one_model(service: Service, request: Request) -> Response:
    """One of them, by any of its names."""
    service.check_model()
    return _json(described(await exactly(service, request.path_params["model"])))


async def exactly(service: Service, name: str) -> HostedModel:
    """The model of a name. The only one has names, too, though it answers to any."""
    model = await service.models.find(name)
    if service.models.is_one and model.served is not None:
        model.served.require_name(name if model.served.knows(name) else name.removesuffix(":latest"))
    return model


def changing(change: Callable[[Service, HostedModel], None]) -> Callable[[Service, ModelRequest], Any]:
    """A route that loads or closes a model, and does not wait for that."""

    async def changed(service: Service, body: ModelRequest) -> Success:
        service.check_ending()
        service.check_model()
        model = await exactly(service, body.model)
        check_changeable(service, model)
        change(service, model)
        return Success()

    return changed


def check_changeable(service: Service, model: HostedModel, param: str = "model") -> None:
    """The only model stays, unless it may sleep."""
    if service.models.is_pinned:
        message = f"this server has the one model {model.name!r} and keeps it loaded; end the server to free its memory"
        raise ApiError(400, message, param=param)


load = changing(lambda service, model: service.models.load(model))
unload = changing(lambda service, model: service.models.unload(model))
