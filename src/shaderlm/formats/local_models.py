"""Which models are kept on this machine, and their removal: the default one, the hub's cache, quantised copies.

The hub's package can list its cache, too, but leaves out a repository in which anything is damaged.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelError
from . import default_model, hub, quantize
from .gguf import PART_NAME, all_parts, first_parts
from .hf.folder import FILES
from .hub_transfer import folders, unfinished
from .safetensors import INDEX
from .short_names import SHORT_NAMES

_OF_CACHE = ("snapshots", "refs", "blobs", ".no_exist")  # what the package keeps of a repository


@dataclass(frozen=True)
class LocalModel:
    """A model that is here. `name` is what `load` takes; the bytes are those on disk."""

    name: str
    nbytes: int
    path: Path


class _CachedFile(NamedTuple):
    """A file of a repository: its name there, where it is, and the content that files of equal content share."""

    name: str
    path: Path
    blob: Path
    nbytes: int


def complete() -> list[LocalModel]:
    """All of them, by name. A repository counts if it has .safetensors; of others, each GGUF checkpoint does."""
    quantize.remove_leftovers()
    models = []
    default = default_model.cache_folder() / default_model.FILE
    if default.exists():
        models.append(LocalModel(default_model.NAME, default.stat().st_size, default))
    models += [LocalModel(name, path.stat().st_size, path) for name, path in quantize.copies().items()]
    for repo, folder in folders().items():
        name, files = f"{hub.PREFIX}{repo}", _files(folder)
        if any(_is_safetensors(file.name) for file in files):
            others = [file for file in files if not _is_gguf(file.name)]
            models.append(LocalModel(name, _size(others), folder))
        for first in first_parts(file.name for file in files):
            parts = _parts(files, first)
            models.append(LocalModel(f"{name}/{first}", _size(parts), parts[0].path))
    return sorted(models, key=lambda each: each.name.lower())


def interrupted() -> list[LocalModel]:
    """Downloads from the hub that are not complete, by name: of a GGUF file, or of a repository without weights yet."""
    downloads: dict[str, LocalModel] = {}
    for repo, folder in folders().items():
        files, names = _files(folder), unfinished(folder)
        for path in _not_in_snapshots(folder, files):
            of = names.get(path, "")
            if _is_gguf(of) or not _is_model(files):  # `rm` of a repository would remove the model, too
                name = f"{hub.PREFIX}{repo}" + (f"/{of}" if _is_gguf(of) else "")
                before = downloads[name].nbytes if name in downloads else 0
                downloads[name] = LocalModel(name, before + path.stat().st_size, folder)
    return sorted(downloads.values(), key=lambda each: each.name.lower())


def remove(name: str) -> int:
    """Remove a model, or all of a repository; the bytes that this frees."""
    try:
        return _remove(name)
    except OSError as problem:
        raise ModelError(f"{name} cannot be removed: {problem.strerror or problem}") from None


def _remove(name: str) -> int:
    full_name = SHORT_NAMES[name].model if name in SHORT_NAMES else name
    if full_name.startswith(hub.PREFIX):
        parts = full_name.removeprefix(hub.PREFIX).split("/")
        folder, file = folders().get("/".join(parts[:2])), "/".join(parts[2:])
        freed = None
        if folder is not None:
            freed = _remove_checkpoint(folder, file) if file else _remove_repository(folder)
        if freed is not None:
            return freed
    models = {each.name: each for each in complete()}
    if full_name not in models:
        raise ModelError(f"there is no model {name!r} to remove; kept are {', '.join(models) or 'none'}")
    models[full_name].path.unlink()
    return models[full_name].nbytes


# The hub's cache -----------------------------------------------------------------------------------------


def _remove_repository(folder: Path) -> int | None:
    """Remove a model, or what is there of one; None if there are only files of other programs."""
    files = _files(folder)
    parts = _not_in_snapshots(folder, files)
    if not files and not parts:
        return None
    if _is_model(files) or _is_beside(files):
        nbytes = _size(files) + sum(path.stat().st_size for path in parts)
        _remove_folder(folder)
        return nbytes
    return _unlink(parts) if parts else None


def _remove_checkpoint(folder: Path, name: str) -> int | None:
    """Remove one GGUF checkpoint of a repository, or what there is of its parts; None if it is not there."""
    files = _files(folder)
    if name not in first_parts(file.name for file in files):
        names = all_parts(name)
        rests = [path for path, of in unfinished(folder).items() if of in names]
        return _unlink(rests) if rests else None
    gone = _parts(files, name)
    rest = [file for file in files if file not in gone]
    if not unfinished(folder) and _is_beside(rest):
        return _remove_repository(folder)
    blobs = (folder / "blobs").resolve()
    unshared = {file.blob for file in gone if file.blob.is_relative_to(blobs)} - {file.blob for file in rest}
    copied = sum(file.nbytes for file in gone if not file.path.is_symlink())  # a link is of no size
    for file in gone:
        file.path.unlink()
    return copied + _unlink(unshared)


def _unlink(paths: Iterable[Path]) -> int:
    freed = 0
    for path in paths:
        with suppress(FileNotFoundError):
            nbytes = path.stat().st_size
            path.unlink()
            freed += nbytes
    return freed


def _remove_folder(folder: Path) -> None:
    """What the package has put there. The folder may be a link to another disk, and have other files, too."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, f"{folder} may not be changed")
    for part in _OF_CACHE:
        if (folder / part).is_symlink():
            (folder / part).unlink()
        elif (folder / part).exists():
            shutil.rmtree(folder / part)
    if not any(folder.iterdir()):
        folder.resolve().rmdir()
        if folder.is_symlink():
            folder.unlink()


def _files(folder: Path) -> list[_CachedFile]:
    """The files of a repository, in all its revisions, whose contents are there."""
    return [
        _CachedFile(path.relative_to(snapshot).as_posix(), path, path.resolve(), path.stat().st_size)
        for snapshot in sorted((folder / "snapshots").glob("*"))
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    ]


def _not_in_snapshots(folder: Path, files: Iterable[_CachedFile]) -> list[Path]:
    """Contents of a repository that are those of none of its files yet."""
    used = {file.blob for file in files}
    return [path for path in (folder / "blobs").glob("*") if path.is_file() and path.resolve() not in used]


def _parts(files: Iterable[_CachedFile], first: str) -> list[_CachedFile]:
    """The files of a GGUF checkpoint, in all revisions, by the name of its first part."""
    part = PART_NAME.fullmatch(first)
    return sorted(
        file
        for file in files
        if file.name == first
        or (part and (other := PART_NAME.fullmatch(file.name)) and (other[1], other[3]) == (part[1], part[3]))
    )


def _size(files: Iterable[_CachedFile]) -> int:
    return sum({file.blob: file.nbytes for file in files}.values())


def _is_model(files: Iterable[_CachedFile]) -> bool:
    return any(_is_safetensors(file.name) or _is_gguf(file.name) for file in files)


def _is_beside(files: Iterable[_CachedFile]) -> bool:
    """Are they only what comes with weights?"""
    return all(file.name in (*FILES, INDEX) for file in files)


def _is_safetensors(name: str) -> bool:
    return name.lower().endswith(".safetensors")


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")
