"""From a route and a body to a request that the engine can run. Knows no HTTP library: batch jobs use it, too."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .chat import Chat
from .completions import Completions
from .embeddings import Embeddings
from .errors import ApiError, api_error, undecodable
from .limits import Limits, check_limits
from .routes import Prepared
from .served import ServedModel

Body = TypeVar("Body")

# OpenAI's routes: those of batch files.
ROUTES: dict[str, type[Prepared]] = {kind.route.path: kind for kind in (Chat, Completions, Embeddings)}


def decode(raw: bytes, kind: type[Body]) -> Body:
    """A body as a struct. What is wrong with it is an ApiError."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise undecodable(problem) from None


def read(limits: Limits, raw: bytes, kind: type[Body]) -> Body:
    """The same, within the limits of the server."""
    body = decode(raw, kind)
    check_limits(body, limits)
    return body


def prepare(served: ServedModel, url: str, raw: bytes) -> Prepared:
    """Decode, check and tokenise the body of a request. What is wrong with it is an ApiError."""
    if url not in ROUTES:
        raise ApiError(404, f"there is no {url!r}; there are {', '.join(ROUTES)}", param="url")
    kind = ROUTES[url]
    try:
        return kind(served, read(served.limits, raw, kind.route.body))
    except Exception as problem:
        error = api_error(problem, "request", url)
        if error.status == 500:
            raise
        raise error from problem
