"""Which models are kept on this machine, and their removal: the default one, the hub's cache, quantised copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import embedded, hub, quantize
from .find import SHORT_NAMES


@dataclass(frozen=True)
class Kept:
    """A model that is here. `name` is what `load` takes; the bytes are those on disk."""

    name: str
    nbytes: int
    path: Path


def kept() -> list[Kept]:
    """All of them, by name. Repositories of the hub count if they have weights that can be read."""
    quantize.remove_leftovers()
    found = []
    default = embedded.cache_folder() / embedded.FILE
    if default.exists():
        found.append(Kept(embedded.NAME, default.stat().st_size, default))
    found += [Kept(name, path.stat().st_size, path) for name, path in quantize.copies().items()]
    for repo in _repositories():
        if any(_weights(file.file_name) for rev in repo.revisions for file in rev.files):
            found.append(Kept(f"{hub.PREFIX}{repo.repo_id}", repo.size_on_disk, Path(repo.repo_path)))
    return sorted(found, key=lambda each: each.name.lower())


def remove(name: str) -> int:
    """Remove a model; the bytes that this frees."""
    wanted = SHORT_NAMES.get(name, name)
    found = {each.name: each for each in kept()}
    if wanted not in found:
        raise ModelError(f"there is no model {name!r} to remove; kept are {', '.join(found) or 'none'}")
    if not wanted.startswith(hub.PREFIX):
        found[wanted].path.unlink()
        return found[wanted].nbytes
    from huggingface_hub import scan_cache_dir

    repo_id = wanted.removeprefix(hub.PREFIX)
    commits = [rev.commit_hash for repo in _repositories() if repo.repo_id == repo_id for rev in repo.revisions]
    strategy = scan_cache_dir().delete_revisions(*commits)
    strategy.execute()
    return int(strategy.expected_freed_size)


def _repositories() -> list[Any]:
    """The models that the hub's package has cached; nothing where it has no cache yet. It keeps datasets there, too."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _weights(name: str) -> bool:
    return name.lower().endswith((".gguf", ".safetensors"))
