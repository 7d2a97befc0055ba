"""The folder of an export, made under another name and put in its place at the end: all or nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InputError
from ..gpu.caps import size

_WEIGHTS = re.compile(r"weights-\d{3,}\.bin")
_NAME_LENGTH = 100  # of a name, in that of its partial folder
_PARTIAL = re.compile(r"\.(.+)\.(\d+)\.partial", re.S)


@contextmanager
def new_folder(folder: Path, known: Collection[str], last: str, nbytes: int, force: bool) -> Iterator[Path]:
    """A folder that takes the place of `folder` at the end. Where anything fails, nothing is left of it.

    A process that is killed leaves its folder: the next export to the same place removes it.

    known: names that an export has, beside its weights. A folder with others is never replaced; an export is, if
    `force`.
    last: the file that makes an export of a folder. nbytes: what will be written, about.
    """
    folder = Path(os.path.realpath(folder))
    check(folder, known, force)
    for path in (*_left_over(folder, folder.name), *_left_over(folder.parent, folder.name)):
        shutil.rmtree(path, ignore_errors=True)
    # An empty folder stays the same one: it may be a mount point, or where a shell is.
    inside = folder.is_dir() and not any(folder.iterdir())
    name = f".{folder.name[:_NAME_LENGTH]}.{os.getpid()}.partial"
    partial = folder / name if inside else folder.with_name(name)
    try:
        free = shutil.disk_usage(partial.parent).free
        if free < nbytes:
            raise InputError(f"cannot write {folder}: it takes {size(nbytes)}, and {size(free)} are free there")
        partial.mkdir()
        yield partial
        if inside:
            others = sorted(path.name for path in folder.iterdir() if path != partial)
            if others:
                raise InputError(f"{folder} has got other files meanwhile ({', '.join(others[:3])}); try again")
            _move_up(partial, last)
        else:
            check(folder, known, force)  # again: others may have written there meanwhile
            _replace(partial, folder)
    except OSError as problem:
        raise InputError(f"cannot write {folder}: {problem.strerror or problem}") from problem
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _left_over(place: Path, name: str) -> list[Path]:
    """Partial folders of exports to `name` whose processes are gone. An export that one has replaced stays."""
    return [
        path
        for path in (place.iterdir() if place.is_dir() else ())
        if (match := _PARTIAL.fullmatch(path.name))
        and match[1] == name[:_NAME_LENGTH]
        and not _is_running(int(match[2]))
        and path.is_dir()
        and not path.is_symlink()
    ]


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # nobody knows: os.kill would end it
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def check(folder: Path, known: Collection[str], force: bool) -> None:
    """Refuse what cannot be written to: a file, a folder with other files, an export unless `force`."""
    if not folder.parent.is_dir():
        raise InputError(f"cannot write {folder}: there is no folder {folder.parent}; make it first")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"cannot write {folder}: it is a file; give a folder")
    partial = _left_over(folder, folder.name)
    names = sorted(path.name for path in folder.iterdir() if path not in partial)
    others = [name for name in names if name not in known and not _WEIGHTS.fullmatch(name)]
    if others:
        more = " …" if len(others) > 3 else ""
        raise InputError(f"{folder} has other files ({', '.join(others[:3])}{more}); give a new or an empty folder")
    if names and not force:
        raise InputError(f"{folder} holds an export; --force replaces it")


def _move_up(partial: Path, last: str) -> None:
    """What a folder holds into the one that it is in."""
    moved: list[Path] = []
    try:
        for path in sorted(partial.iterdir(), key=lambda each: (each.name == last, each.name)):
            moved.append(path.rename(partial.parent / path.name))
    except BaseException:
        for path in reversed(moved):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def _replace(partial: Path, folder: Path) -> None:
    """A folder cannot be replaced at once: the old one goes aside first, and comes back if the new one cannot come."""
    old = partial.with_name(f"{partial.name}.old")
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except BaseException:
        if old.exists():
            with suppress(OSError):
                old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
