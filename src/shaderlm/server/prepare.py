"""From a route and a body to a request that the engine can run. Knows no HTTP library: batch jobs use it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from .chat import Chat
from .completions import Completions
from .embeddings import Embeddings
from .errors import ApiError, api_error, undecodable
from .generation import Prepared
from .limits import check_limits
from .served import ServedModel
from .types.openai import ChatRequest, CompletionRequest, EmbeddingRequest

Body = TypeVar("Body")

# Route → the type of its body, and what prepares it. OpenAI's routes: those of batch files.
ROUTES: dict[str, tuple[Any, Callable[[ServedModel, Any], Prepared]]] = {
    "/v1/chat/completions": (ChatRequest, Chat),
    "/v1/completions": (CompletionRequest, Completions),
    "/v1/embeddings": (EmbeddingRequest, Embeddings),
}


def decode(body: bytes, kind: type[Body]) -> Body:
    """A body as a struct. What is wrong with it is an ApiError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise undecodable(problem) from None


def checked(served: ServedModel, body: bytes, kind: type[Body]) -> Body:
    """The same, within the limits of the server."""
    found = decode(body, kind)
    check_limits(found, served.limits)
    return found


def prepare(served: ServedModel, url: str, body: bytes) -> Prepared:
    """Decode, check and tokenise the body of a request. What is wrong with it is an ApiError."""
    if url not in ROUTES:
        raise ApiError(404, f"there is no {url!r}; there are {', '.join(ROUTES)}", param="url")
    kind, make = ROUTES[url]
    try:
        return make(served, checked(served, body, kind))
    except Exception as problem:
        error = api_error(problem, "request", url)
        if error.status == 500:
            raise
        raise error from problem
