"""The folder of an export, made beside the wanted one and renamed at the end: all or nothing."""

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


@contextmanager
def new_folder(folder: Path, own: Collection[str], nbytes: int, force: bool) -> Iterator[Path]:
    """A folder that takes the place of `folder` at the end. Where anything fails, nothing is left of it.

    own: names that an export has, beside its weights. A folder with others is never replaced; an export is, if `force`.
    nbytes: what will be written, about.
    """
    folder = Path(os.path.abspath(folder))
    _check(folder, own, force)
    made = folder.with_name(f".{folder.name[:100]}.{os.getpid()}.partial")
    try:
        free = shutil.disk_usage(folder.parent).free
        if free < nbytes:
            raise InputError(f"cannot write {folder}: it takes {size(nbytes)}, and {size(free)} are free there")
        made.mkdir()
        yield made
        _put_in_place(made, folder)
    except OSError as problem:
        raise InputError(f"cannot write {folder}: {problem.strerror or problem}") from problem
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check(folder: Path, own: Collection[str], force: bool) -> None:
    if not folder.parent.is_dir():
        raise InputError(f"cannot write {folder}: there is no folder {folder.parent}; make it first")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"cannot write {folder}: it is a file; give a folder")
    there = sorted(path.name for path in folder.iterdir())
    others = [name for name in there if name not in own and not _WEIGHTS.fullmatch(name)]
    if others:
        more = " …" if len(others) > 3 else ""
        raise InputError(f"{folder} has other files ({', '.join(others[:3])}{more}); give a new or an empty folder")
    if there and not force:
        raise InputError(f"{folder} holds an export; --force replaces it")


def _put_in_place(made: Path, folder: Path) -> None:
    """A folder cannot be replaced at once: the old one goes aside first, and comes back if the new one cannot come."""
    old = folder.with_name(f"{made.name}.old")
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
