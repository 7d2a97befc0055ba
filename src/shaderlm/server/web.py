"""An export of `shaderlm export-web`, hosted at `/web/`: its files, and no others of its folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ..errors import InputError
from ..page import TYPES, listed_files
from .errors import ApiError
from .page import HEADERS

_AGAIN = "make it with: shaderlm export-web MODEL DIR"


class _File(Struct):
    name: str
    bytes: int


class _Model(Struct):
    name: str = "a model"


class _Plan(Struct):
    """What is read of plan.json."""

    files: list[_File]
    model: _Model = msgspec.field(default_factory=_Model)


class Export:
    """The folder of an export. It may be replaced by a newer one while the server runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: tuple[tuple[int, int], ...] = ()
        self._names: frozenset[str] = frozenset()
        plan = self._plan()
        self.name = plan.model.name
        listed = self._listed(plan)
        if "index.html" not in listed and (folder / "sw.js").is_file():
            raise InputError(f"--web {folder} is not a whole export: sw.js does not list the page; {_AGAIN}")
        for name in sorted(listed):
            if self._path(name) is None:
                raise InputError(f"--web {folder} is not a whole export: {name} is missing; {_AGAIN}")
        for file in plan.files:
            size = (folder / file.name).stat().st_size
            if size != file.bytes:
                sizes = f"{file.name} has {size:,} bytes, plan.json says {file.bytes:,}"
                raise InputError(f"--web {folder} is not a whole export: {sizes}; {_AGAIN}")

    def _plan(self) -> _Plan:
        try:
            return msgspec.json.decode((self.folder / "plan.json").read_bytes(), type=_Plan)
        except (OSError, ValueError):
            message = f"--web {self.folder} is not an export: it has no plan.json of one; {_AGAIN}"
            raise InputError(message) from None

    def _listed(self, plan: _Plan) -> frozenset[str]:
        """What the plan and the service worker name."""
        try:
            worker = (self.folder / "sw.js").read_text(encoding="utf-8")
        except (OSError, ValueError):
            worker = ""
        return frozenset((*listed_files(worker), *(file.name for file in plan.files), "plan.json", "sw.js"))

    def _current_names(self) -> frozenset[str]:
        """Read again when the export is another one."""
        try:
            states = [(self.folder / name).stat() for name in ("plan.json", "sw.js")]
            seen = tuple((state.st_mtime_ns, state.st_size) for state in states)
            if seen != self._seen:
                self._names, self._seen = self._listed(self._plan()), seen
        except (OSError, InputError):
            raise ApiError(503, f"the export in {self.folder.name} is being replaced, or was removed") from None
        return self._names

    def _path(self, name: str) -> Path | None:
        """A file of the export. Names that lead out of its folder, directly or by a link, are none of it."""
        path = self.folder / name
        inside = path.resolve().is_relative_to(self.folder.resolve())
        return path if inside and path.is_file() and path.suffix[1:] in TYPES else None

    def response(self, name: str, request: Request) -> Response:
        """A file, or a range of it, or a 304."""
        name = name or "index.html"
        path = self._path(name) if name in self._current_names() else None
        if path is None:
            raise ApiError(404, f"there is no file {name!r} in the export at /web/")
        response = FileResponse(path, media_type=TYPES[path.suffix[1:]], headers=HEADERS, stat_result=path.stat())
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if response.headers["etag"] in known or known == ["*"]:
            headers = {name: response.headers[name] for name in ("etag", "last-modified", "cache-control")}
            return Response(status_code=304, headers=headers)
        return response
