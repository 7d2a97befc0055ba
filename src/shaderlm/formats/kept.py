"""Which models are kept on this machine, and their removal: the default one, the hub's cache, quantised copies."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelError
from . import embedded, hub, quantize
from .find import SHORT_NAMES
from .gguf import PART_NAME, first_parts, part_paths
from .hub_transfer import folder_of, folders, unfinished, unfinished_name


@dataclass(frozen=True)
class Kept:
    """A model that is here. `name` is what `load` takes; the bytes are those on disk."""

    name: str
    nbytes: int
    path: Path


class _File(NamedTuple):
    """A file of a repository: its name there, where it is, and the content that files of equal content share."""

    name: str
    path: Path
    blob: Path
    nbytes: int


def kept() -> list[Kept]:
    """All of them, by name. A repository counts if it has .safetensors; of others, each GGUF checkpoint does."""
    quantize.remove_leftovers()
    found = []
    default = embedded.cache_folder() / embedded.FILE
    if default.exists():
        found.append(Kept(embedded.NAME, default.stat().st_size, default))
    found += [Kept(name, path.stat().st_size, path) for name, path in quantize.copies().items()]
    for repo in _repositories():
        name, files = f"{hub.PREFIX}{repo.repo_id}", _files(repo)
        if any(_is_weight(file.name) for file in files):
            others = [file for file in files if not file.name.lower().endswith(".gguf")]
            found.append(Kept(name, _size(others), Path(repo.repo_path)))
        for first in dict.fromkeys(first_parts(file.name for file in files)):
            parts = _parts(files, first)
            found.append(Kept(f"{name}/{first}", _size(parts), parts[0].path))
    return sorted(found, key=lambda each: each.name.lower())


def interrupted() -> list[Kept]:
    """Downloads from the hub that are not complete, by name: of a GGUF file, or of the other files of a repository."""
    found: dict[str, Kept] = {}
    for repo, folder in folders().items():
        for path in _not_in_snapshots(folder):
            file = unfinished_name(path) or ""
            name = f"{hub.PREFIX}{repo}" + (f"/{file}" if file.lower().endswith(".gguf") else "")
            before = found[name].nbytes if name in found else 0
            found[name] = Kept(name, before + path.stat().st_size, folder)
    return sorted(found.values(), key=lambda each: each.name.lower())


def remove(name: str) -> int:
    """Remove a model, or all of a repository; the bytes that this frees."""
    try:
        return _remove(name)
    except OSError as problem:
        raise ModelError(f"{name} cannot be removed: {problem.strerror or problem}") from None


def _remove(name: str) -> int:
    wanted = SHORT_NAMES.get(name, name)
    if wanted.startswith(hub.PREFIX):
        freed = _remove_from_hub(wanted.removeprefix(hub.PREFIX))
        if freed is not None:
            return freed
    found = {each.name: each for each in kept()}
    if wanted not in found:
        raise ModelError(f"there is no model {name!r} to remove; kept are {', '.join(found) or 'none'}")
    found[wanted].path.unlink()
    return found[wanted].nbytes


def _remove_from_hub(wanted: str) -> int | None:
    """Remove a repository, or one GGUF checkpoint of it; None if it is not there."""
    for repo in _repositories():
        files, first = _files(repo), wanted.removeprefix(f"{repo.repo_id}/")
        if wanted == repo.repo_id and any(_is_weight(file.name) or first_parts([file.name]) for file in files):
            return _remove_repository(repo)
        if first != wanted and first in first_parts(file.name for file in files):
            gone = _parts(files, first)
            rest = [file for file in files if file not in gone]
            if not unfinished(repo.repo_id) and not any(
                _is_weight(file.name) or file.name.lower().endswith(".gguf") for file in rest
            ):
                return _remove_repository(repo)
            shared = {file.blob for file in rest}
            for file in gone:
                file.path.unlink()
                if file.blob not in shared:
                    file.blob.unlink(missing_ok=True)
            return _size(file for file in gone if file.blob not in shared)
    repo_id, name = "/".join(wanted.split("/")[:2]), "/".join(wanted.split("/")[2:])
    if repo_id not in folders():
        return None
    return _remove_unfinished(repo_id, name) if name else _remove_without_weights(repo_id)


def _remove_repository(repo: Any) -> int:
    _remove_folder(Path(repo.repo_path))
    return int(repo.size_on_disk)


def _remove_unfinished(repo_id: str, name: str) -> int | None:
    """What an interrupted download of a GGUF checkpoint has left; None if there is nothing."""
    part = PART_NAME.fullmatch(name.rpartition("/")[2])
    names = [name] if part is None else [path.name for path in part_paths(Path(name), int(part[3]))]
    parts = [path for each in names for path in unfinished(repo_id, each)]
    nbytes = sum(path.stat().st_size for path in parts)
    for path in parts:
        path.unlink()
    return nbytes if parts else None


def _remove_without_weights(repo_id: str) -> int | None:
    """A repository whose download was interrupted: contents that no snapshot has yet; None if there is none."""
    folder = folder_of(repo_id)
    if not _not_in_snapshots(folder):
        return None
    nbytes = sum(path.stat().st_size for path in (folder / "blobs").iterdir())
    _remove_folder(folder)
    return nbytes


def _not_in_snapshots(folder: Path) -> list[Path]:
    """Contents of a repository in the cache that no snapshot has yet."""
    used = {path.resolve() for path in (folder / "snapshots").rglob("*") if path.is_file()}
    return [path for path in (folder / "blobs").glob("*") if path.is_file() and path.resolve() not in used]


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder.resolve())
    if folder.is_symlink():
        folder.unlink()


def _repositories() -> list[Any]:
    """The models that the hub's package has cached; nothing where it has no cache yet. It keeps datasets there, too."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    except (OSError, ValueError) as problem:
        raise ModelError(f"the hub's cache cannot be read: {problem}") from None


def _files(repo: Any) -> list[_File]:
    return [
        _File(
            Path(file.file_path).relative_to(rev.snapshot_path).as_posix(),
            Path(file.file_path),
            Path(file.blob_path),
            file.size_on_disk,
        )
        for rev in repo.revisions
        for file in rev.files
    ]


def _parts(files: Iterable[_File], first: str) -> list[_File]:
    """The files of a GGUF checkpoint, in all revisions, by the name of its first part."""
    part = PART_NAME.fullmatch(first)
    return sorted(
        file
        for file in files
        if file.name == first
        or (part and (other := PART_NAME.fullmatch(file.name)) and (other[1], other[3]) == (part[1], part[3]))
    )


def _size(files: Iterable[_File]) -> int:
    return sum({file.blob: file.nbytes for file in files}.values())


def _is_weight(name: str) -> bool:
    return name.lower().endswith(".safetensors")
