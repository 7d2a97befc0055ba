"""The models of a folder of models, by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import ModelError
from .gguf import PART_NAME, first_parts
from .hf.folder import name_of

_BESIDE = "mmproj"  # files for images, which lie beside models


def models_in(folder: Path) -> dict[str, Path]:
    """Its GGUF files, Hugging Face folders, and folders with one GGUF file, sorted by name. No file is opened."""
    try:
        found = [(path, path.is_dir()) for path in folder.iterdir() if not path.name.startswith(".")]
        models = {name_of(path): inner for path, is_dir in found if is_dir and (inner := _in_folder(path)) is not None}
        models |= {_stem(name): folder / name for name in _ggufs(path.name for path, is_dir in found if not is_dir)}
    except OSError as problem:
        raise ModelError(f"the folder of models {folder} cannot be read: {problem.strerror or problem}") from None
    return dict(sorted(models.items()))


def _in_folder(folder: Path) -> Path | None:
    """A model in a folder of its own, if there is one."""
    names = [path.name for path in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return folder
    files = _ggufs(names)
    return folder / files[0] if len(files) == 1 else None


def _ggufs(names: Iterable[str]) -> list[str]:
    return [name for name in first_parts(names) if not name.lower().startswith(_BESIDE)]


def _stem(name: str) -> str:
    part = PART_NAME.fullmatch(name)
    return name.removesuffix(Path(name).suffix) if part is None else part[1]
