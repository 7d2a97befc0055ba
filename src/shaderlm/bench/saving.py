"""Writes results to files: checked before anything is measured, and all or nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..errors import InputError


def check_place(path: Path) -> None:
    """Can a file be written there? Better known before the first minute of measuring than after the last."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise InputError(f"cannot write {path}: it is not a file")  # a device would be replaced by one
        if target.exists() and not os.access(target, os.W_OK):
            raise InputError(f"cannot write {path}: permission denied")
        temporary = _beside(target)
        temporary.open("x").close()
        temporary.unlink()
    except OSError as problem:
        hint = "give a path in a folder that exists and may be written"
        raise InputError(f"cannot write {path}: {problem.strerror}; {hint}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file, all or nothing: whoever reads it sees what was there before or what is there now."""
    target = Path(os.path.realpath(path))  # of a link, the file it points to is replaced
    temporary = _beside(target)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as problem:
        raise InputError(f"cannot write {path}: {problem.strerror}") from problem
    finally:
        with suppress(OSError):
            temporary.unlink()


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")
