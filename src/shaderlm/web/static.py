"""Files that every export has, whatever the model: the runtime, and what it imports."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def runtime_files() -> dict[str, bytes]:
    """Name → bytes: whatever lies in `assets/`."""
    folder = files(__package__) / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} if folder.is_dir() else {}
