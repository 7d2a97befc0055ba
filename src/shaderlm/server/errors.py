"""Errors as clients see them: status, type and message, in the shapes of the APIs. Knows no HTTP library."""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

from ..errors import ContextSizeError, DeviceError, InputError, ModelError, QueueFullError, UnavailableError
from .types.anthropic import AnthropicError, AnthropicErrorResponse
from .types.common import ErrorBody, ErrorResponse
from .types.ollama import OllamaErrorResponse
from .types.openai import ChatRequest, CompletionRequest

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
# Where Anthropic has another word for it.
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 501: "api_error", 503: "overloaded_error"}
ENDING = "the server is about to end; try again when it is there again"
RETRY_SECONDS = 5  # while a model is loaded


class ApiError(Exception):
    """An answer that is an error. `param` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        prompt_tokens: int | None = None,
        context: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.type = status, param, kind or TYPES[status]
        self.prompt_tokens, self.context, self.headers = prompt_tokens, context, headers or {}

    def body(self) -> ErrorResponse:
        """OpenAI's shape."""
        return ErrorResponse(ErrorBody(str(self), self.type, self.param, self.status, self.prompt_tokens, self.context))

    def anthropic_body(self) -> AnthropicErrorResponse:
        """Anthropic's shape."""
        kind = _ANTHROPIC_TYPES.get(self.status, TYPES[self.status])
        return AnthropicErrorResponse(type="error", error=AnthropicError(kind, str(self)))

    def ollama_body(self) -> OllamaErrorResponse:
        """Ollama's shape."""
        return OllamaErrorResponse(str(self))


def unsupported(param: str, instead: str) -> ApiError:
    """A field that is known and cannot be honoured."""
    return ApiError(400, f"{param} is not supported; {instead}", param=param)


def unavailable(message: str) -> ApiError:
    """What works again a little later."""
    return ApiError(503, message, headers={"Retry-After": str(RETRY_SECONDS)})


# Which field of a route is the prompt, where it is not `prompt`.
_PROMPT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
    "/chat/completions": "messages",
    "/responses": "input",
    "/embedding": "content",
    "/embeddings": "content",
}


def api_error(
    problem: BaseException, phase: Literal["request", "generation"] = "generation", path: str = ""
) -> ApiError:
    """What a problem is to a client. While a request is prepared, what is wrong is the request."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, ContextSizeError):
        return _too_long(problem, path)
    if isinstance(problem, UnavailableError):  # it speaks to Python's users
        return unavailable(ENDING)
    if isinstance(problem, QueueFullError):
        return ApiError(429, str(problem), headers={"Retry-After": str(math.ceil(problem.retry_after))})
    if isinstance(problem, DeviceError):
        return unavailable(f"the device failed: {problem}")
    if isinstance(problem, RecursionError):
        return ApiError(400, "the request is nested too deeply; use fewer levels of lists and objects")
    if isinstance(problem, InputError) or (phase == "request" and isinstance(problem, ModelError)):
        return ApiError(400, str(problem), param=_field(str(problem)))
    return ApiError(500, "the server failed while it answered; its log has the reason")


def _too_long(problem: ContextSizeError, path: str) -> ApiError:
    tokens, context, limit = problem.prompt_tokens, problem.context, problem.max_context
    number = f"at least {tokens:,}" if problem.at_least else f"{tokens:,}"
    longer = "use a model with a longer one"
    if context < limit:
        longer = f"start the server with a larger --ctx-size (up to {limit:,})"
    elif not limit:
        longer = "start the server with more --kv-memory"
    # Clients look for these words: they compact the conversation and try again.
    said = f"the prompt has {number} tokens, which exceeds the available context size of {context:,}"
    if path.startswith("/v1/messages"):
        said = f"prompt is too long: {number} tokens > {context:,} maximum"
    return ApiError(
        400,
        f"{said}; shorten the prompt, or {longer}",
        kind="exceed_context_size_error",
        param=_PROMPT_FIELDS.get(path, "prompt"),
        prompt_tokens=tokens,
        context=context,
    )


_FIELD = re.compile(r"(?:a token(?: id)? of )?([a-z]+(?:_[a-z]+)*)\b")
_FIELDS = {field for kind in (ChatRequest, CompletionRequest) for field in kind.__struct_fields__}


def _field(message: str) -> str | None:
    """The option that an InputError of the engine begins with."""
    if message.startswith("the schema of the parameters"):
        return "tools"
    match = _FIELD.match(message)
    return match[1] if match and match[1] in _FIELDS else None


_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")


# Parts of a message that are no text, as the APIs call them.
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images of this kind"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("document", "file", "input_file"), "files"),
}
_WRONG_KIND = re.compile(r"Invalid (?:enum )?value '(\w+)'")

_MISSING = re.compile(r"Object missing required field `(\w+)`")


def undecodable(problem: Exception) -> ApiError:
    """A body that is no JSON, or that has a value which its field does not take."""
    if isinstance(problem, RecursionError):
        return api_error(problem)
    message = str(problem)
    if not isinstance(problem, msgspec.ValidationError):
        return ApiError(400, f"the body must be JSON in UTF-8: {message}")
    place = _PLACE.search(message)
    param = place[1] if place and place[1] else None
    missing = _MISSING.match(message)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(400, f"{param} is missing; this route needs it", param=param)
    reason = _PLACE.sub("", message).replace("`", "")
    kind = _WRONG_KIND.match(message)
    if kind is not None and kind[1] in _MEDIA and param is not None and param.endswith("].type"):
        return ApiError(400, f"this model does not take {_MEDIA[kind[1]]}; send text alone", param=param)
    if param is None:
        return ApiError(400, f"the body is not what this route takes: {reason}")
    return ApiError(400, f"{param}: {reason[0].lower()}{reason[1:]}", param=param)
