"""Files that every export has, whatever the model: the runtime with what it imports, and the page."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from ..page import export_files


@cache
def static_files() -> dict[str, bytes]:
    """Path in the folder → bytes: whatever lies in `assets/`, and the page."""
    folder = files(__package__) / "assets"
    return {**{file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}, **export_files()}
