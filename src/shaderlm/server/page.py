"""Files of the page at `/`, and of the export at `/web/`, as responses."""

from __future__ import annotations

from starlette.responses import Response

from ..page import POLICY, TYPES, assets
from .errors import ApiError

HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


def asset(name: str) -> Response:
    """One of the files of the page, by its name."""
    content = assets().get(name)
    if content is None:
        raise ApiError(404, f"there is no file {name!r} of the page")
    return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
