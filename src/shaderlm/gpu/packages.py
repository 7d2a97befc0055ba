"""The packages of the implementations, and which version of a package is installed. Nothing of it is imported."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

PACKAGES = {"wgpu": "wgpu", "dawn": "wgpudawn"}  # by implementation of WebGPU


def folder_of(package: str) -> Path | None:
    """Where a package is installed; None if it is not."""
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(locations[0]) if locations else None


@lru_cache(maxsize=8)
def version_of(package: str) -> str | None:
    """The version of a package, by the folder that pip writes beside it: `importlib.metadata` takes 20 ms to import."""
    folder = folder_of(package)
    if folder is None:
        return None
    beside = [path.name for path in folder.parent.glob(f"{package}-*.dist-info")]
    if len(beside) == 1:
        return beside[0].removeprefix(f"{package}-").removesuffix(".dist-info")
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
