"""Files of the page at `/`: whatever lies in `assets/`, `index.html` first. What they show and how is theirs."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import Response

from .errors import ApiError

# Nothing is fetched from elsewhere, and no other page may show this one.
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

# Not from the system's table of types, which on some machines calls scripts plain text.
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def _assets() -> dict[str, bytes]:
    folder = files(__package__) / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def asset(name: str) -> Response:
    """One of the files, by its name."""
    found = _assets().get(name)
    if found is None:
        raise ApiError(404, f"there is no file {name!r} of the page")
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(found, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)
