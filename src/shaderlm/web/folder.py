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
def new_folder(folder: Path, own: Collection[str], last: str, nbytes: int, force: bool) -> Iterator[Path]:
    """A folder that takes the place of `folder` at the end. Where anything fails, nothing is left of it.

    A process that is killed leaves its folder: the next export to the same place removes it.

    own: names that an export has, beside its weights. A folder with others is never replaced; an export is, if `force`.
    last: the file that makes an export of a folder. nbytes: what will be written, about.
    """
    folder = Path(os.path.realpath(folder))
    check(folder, own, force)
    for left in (*_left_over(folder, folder.name), *_left_over(folder.parent, folder.name)):
        shutil.rmtree(left, ignore_errors=True)
    # An empty folder stays the same one: it may be a mount point, or where a shell is.
    inside = _is_empty(folder)
    name = f".{folder.name[:_NAME_LENGTH]}.{os.getpid()}.partial"
    made = folder / name if inside else folder.with_name(name)
    try:
        free = shutil.disk_usage(made.parent).free
        if free < nbytes:
            raise InputError(f"cannot write {folder}: it takes {size(nbytes)}, and {size(free)} are free there")
        made.mkdir()
        yield made
        if inside:
            others = sorted(path.name for path in folder.iterdir() if path != made)
            if others:
                raise InputError(f"{folder} has got other files meanwhile ({', '.join(others[:3])}); try again")
            _move_up(made, last)
        else:
            check(folder, own, force)  # again: others may have written there meanwhile
            _replace(made, folder)
    except OSError as problem:
        raise InputError(f"cannot write {folder}: {problem.strerror or problem}") from problem
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _left_over(place: Path, name: str) -> list[Path]:
    """Partial folders of exports to `name` whose processes are gone. An export that one has replaced stays."""
    found = []
    for path in place.iterdir() if place.is_dir() else ():
        match = _PARTIAL.fullmatch(path.name)
        if not match or match[1] != name[:_NAME_LENGTH] or _is_running(int(match[2])):
            continue
        if path.is_dir() and not path.is_symlink():
            found.append(path)
    return found


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


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def check(folder: Path, own: Collection[str], force: bool) -> None:
    """Refuse what cannot be written to: a file, a folder with other files, an export unless `force`."""
    if not folder.parent.is_dir():
        raise InputError(f"cannot write {folder}: there is no folder {folder.parent}; make it first")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"cannot write {folder}: it is a file; give a folder")
    left = _left_over(folder, folder.name)
    there = sorted(path.name for path in folder.iterdir() if path not in left)
    others = [name for name in there if name not in own and not _WEIGHTS.fullmatch(name)]
    if others:
        more = " …" if len(others) > 3 else ""
        raise InputError(f"{folder} has other files ({', '.join(others[:3])}{more}); give a new or an empty folder")
    if there and not force:
        raise InputError(f"{folder} holds an export; --force replaces it")


def _move_up(made: Path, last: str) -> None:
    """What a folder holds into the one that it is in."""
    moved: list[Path] = []
    try:
        for path in sorted(made.iterdir(), key=lambda each: (each.name == last, each.name)):
            moved.append(path.rename(made.parent / path.name))
    except BaseException:
        for path in reversed(moved):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def _replace(made: Path, folder: Path) -> None:
    """A folder cannot be replaced at once: the old one goes aside first, and comes back if the new one cannot come."""
    old = made.with_name(f"{made.name}.old")
    if folder.exists():
        folder.rename(old)
    try:
        made.rename(folder)
    except BaseException:
        if old.exists():
            with suppress(OSError):
                old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
