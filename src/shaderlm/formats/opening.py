"""A path → an open checkpoint: a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..errors import InputError, ModelError
from .checkpoint import Checkpoint
from .gguf import GgufFile, all_parts


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open what `find` found. Anything that is not a whole checkpoint is a ModelError."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"expected the path of a .gguf file or of a folder, got {type(path).__name__}")
    if not os.path.isdir(path):
        return GgufFile.open(path)
    from .hf.folder import Folder  # late: it takes 15 ms to import

    try:
        return Folder.open(Path(path))
    except ModelError as problem:
        if str(path) in str(problem):
            raise
        raise ModelError(f"{path}: {problem}") from None


def checkpoint_bytes(path: Path) -> int:
    """The size of the files of a checkpoint, whose weights are not opened; 0: it is not whole, or gone."""
    from .safetensors import checkpoint_files  # late, as above

    with suppress(OSError, ModelError):
        files = checkpoint_files(path) if path.is_dir() else map(Path, all_parts(str(path)))
        return sum(each.stat().st_size for each in files)
    return 0
