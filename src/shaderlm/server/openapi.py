"""The OpenAPI document, made from the table of routes and the types of their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..version import __version__
from .ollama import LINES
from .routes import Endpoint
from .types.anthropic import AnthropicErrorResponse
from .types.common import ErrorResponse
from .types.ollama import OllamaErrorResponse

_MEANINGS = {
    400: "The request is wrong: the message says where",
    401: "The server needs a key",
    403: "Pages of this origin may not use the server",
    404: "There is no such model, or no such response",
    413: "The body is too large",
    429: "As many requests run and wait as may; Retry-After says when to try again",
    500: "The server failed",
    501: "The route is off; the message names the option that switches it on",
    503: "The model is being loaded, the server is about to end, or its device is lost",
}
_EVERYWHERE = (401, 403, 500, 503)
_WITH_BODY = (400, 413)
_PARAMETERS = {
    "id": {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},
    "model": {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}},
    "response_id": {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}},
    "model_name": {
        "name": "model",
        "in": "query",
        "required": False,
        "description": "Of several models, which one",
        "schema": {"type": "string"},
    },
    "action": {
        "name": "action",
        "in": "query",
        "required": True,
        "schema": {"type": "string", "enum": ["save", "restore", "erase"]},
    },
    "fail_on_no_slot": {
        "name": "fail_on_no_slot",
        "in": "query",
        "required": False,
        "description": "1: a 503 if no slot is free",
        "schema": {"type": "string", "enum": ["0", "1"]},
    },
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.2, the first version that describes the events of streams: every route, every field, every status."""
    named = [kind for each in endpoints for kind in (each.body, each.response, *each.events, _error(each))]
    types = [kind for kind in named if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schema_of)
    return {
        "openapi": "3.2.0",
        "info": {"title": "shaderlm", "version": __version__, "description": "Text generation on any GPU"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(each: Endpoint, schema_of: dict[str, Any]) -> dict[str, Any]:
    def content(kind: Any, media_type: str = "application/json") -> dict[str, Any]:
        return {media_type: {"schema": {"type": "string"} if kind is None else schema_of[str(kind)]}}

    answers = content(each.response, each.media_type)
    if each.events and each.api == "Ollama":
        kinds = [schema_of[str(kind)] for kind in (*each.events, _error(each))]
        answers[LINES] = {"itemSchema": {"anyOf": kinds}}
    elif each.events:
        answers["text/event-stream"] = {"itemSchema": _event(each, schema_of)}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": answers}}
    for status in _statuses(each):
        responses[str(status)] = {"description": _MEANINGS[status], "content": content(_error(each))}
    operation: dict[str, Any] = {
        "operationId": f"{each.method.lower()}{each.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": each.summary,
        "tags": [each.api],
        "responses": responses,
    }
    if each.body is not None:
        operation["requestBody"] = {"required": True, "content": content(each.body)}
    if each.parameters:
        operation["parameters"] = [_PARAMETERS[name] for name in each.parameters]
    return operation


def _event(each: Endpoint, schema_of: dict[str, Any]) -> dict[str, Any]:
    """An event as the document sees it: its data is text, which is JSON."""
    kinds = [schema_of[str(kind)] for kind in (*each.events, _error(each))]
    data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    if each.done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string", **data}},
        "required": ["data"],
    }


def _error(each: Endpoint) -> type[msgspec.Struct]:
    """The type of an error's body."""
    shapes: dict[str, type[msgspec.Struct]] = {"Anthropic": AnthropicErrorResponse, "Ollama": OllamaErrorResponse}
    return shapes.get(each.api, ErrorResponse)


def _statuses(each: Endpoint) -> Iterable[int]:
    return sorted({*_EVERYWHERE, *each.errors, *(_WITH_BODY if each.body is not None else ())})
