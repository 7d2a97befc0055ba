"""Files of the page at `/`: whatever lies in `assets/`, `index.html` first. What they show and how is theirs."""

from __future__ import annotations

import mimetypes
from functools import cache
from importlib.resources import files

from starlette.responses import Response

from .errors import ApiError

# Nothing is fetched from elsewhere, and no other page may show this one.
_POLICY = "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@cache
def _assets() -> dict[str, bytes]:
    folder = files(__package__) / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} if folder.is_dir() else {}


def asset(name: str) -> Response:
    """One of the files, by its name."""
    found = _assets().get(name)
    if found is None:
        raise ApiError(404, f"there is no file {name!r} of the page")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(found, media_type=kind, headers=headers)
