"""Files that the package writes: where its caches and its state are, and writing that is all or nothing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .errors import InputError, ModelError


def cache_directory() -> Path:
    """Where caches are: $SHADERLM_CACHE, or the platform's place. It need not exist yet."""
    return _directory("SHADERLM_CACHE", "caches", "Library/Caches", "XDG_CACHE_HOME", ".cache")


def state_directory() -> Path:
    """Where is kept what no command can make again, such as a history: $SHADERLM_STATE, or the platform's place."""
    return _directory("SHADERLM_STATE", "a history", "Library/Application Support", "XDG_STATE_HOME", ".local/state")


def _directory(variable: str, contents: str, macos: str, xdg: str, home: str) -> Path:
    """The one that `variable` names, else the platform's: `macos` and `home` lie below the home directory."""
    path = os.environ.get(variable)
    try:
        if path:
            return Path(path).expanduser().absolute()
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "shaderlm"
        if sys.platform == "darwin":
            return Path.home() / macos / "shaderlm"
        place = Path(os.environ.get(xdg, ""))
        return (place if place.is_absolute() else Path.home() / home) / "shaderlm"  # the standard: no relative ones
    except RuntimeError:  # no home directory
        named = f" as in {path!r}" if path else ""
        raise ModelError(f"there is no home directory for {contents}{named}; set {variable} to a directory") from None


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """An `opener` for `open`: a file that is new can be read by its owner alone."""
    return os.open(path, flags, 0o600)


@contextmanager
def atomic_write(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` at the end, in an existing directory.

    Readers see the old contents or the new ones. If anything fails, the old file stays and nothing is left beside it.
    private: others can not read it.
    """
    target = Path(os.path.realpath(path))  # of a link, the file it points to is replaced
    temporary = _temporary(target)
    try:
        with open(temporary, "wb", opener=open_private if private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name[:100]}.{os.getpid()}.{threading.get_ident()}")


def atomic_write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Text in UTF-8, in place of what `path` holds."""
    with atomic_write(path, private=private) as file:
        file.write(text.encode())


def write_named(path: Path, text: str) -> None:
    """Write a file that the user named; an InputError where that fails."""
    try:
        atomic_write_text(path, text)
    except OSError as problem:
        raise InputError(f"cannot write {path}: {problem.strerror}") from problem


def check_writable(path: Path) -> None:
    """Refuse a path to which no file can be written: better before the first minute of work than after the last."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise InputError(f"cannot write {path}: it is not a file")  # a device would be replaced by one
        if target.exists() and not os.access(target, os.W_OK):
            raise InputError(f"cannot write {path}: permission denied")
        temporary = _temporary(target)
        temporary.open("x").close()
        temporary.unlink()
    except OSError as problem:
        hint = "give a path in a folder that exists and may be written"
        raise InputError(f"cannot write {path}: {problem.strerror}; {hint}") from None
