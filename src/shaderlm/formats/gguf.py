"""GGUF files: a mapped file → metadata and named tensors. Knows no model, no GPU, no text rules.

The file is mapped, never read whole. `gguf_header.py` reads and checks the header.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from .checkpoint import Checkpoint
from .gguf_header import TensorInfo, read_header
from .mapped import map_file, unmap

__all__ = ["GgufFile", "TensorInfo"]


class GgufFile(Checkpoint):
    """An open GGUF file."""

    def __init__(self, path: Path, data: mmap.mmap, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]):
        super().__init__(path, len(data), metadata, tensors)
        self._data = data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file and check its header; anything that is not a whole GGUF file is a ModelError."""
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(f"expected the path of a .gguf file, got {type(path).__name__}")
        where = Path(path)
        data = map_file(where, "a .gguf file")
        try:
            _check_magic(where, data)
            metadata, tensors = read_header(where, data)
            return cls(where, data, metadata, tensors)
        except BaseException:
            unmap(data)
            raise

    def _read(self, info: TensorInfo, first: int, end: int) -> NDArray[np.uint8]:
        row_bytes = info.nbytes // math.prod(info.shape[:-1])
        flat = np.frombuffer(self._data, np.uint8, (end - first) * row_bytes, info.offset + first * row_bytes)
        return flat.reshape(end - first, row_bytes)

    def _release(self) -> None:
        unmap(self._data)


# Other files that users may give: the first bytes, what the file is, what to do.
_OTHER_FILES = (
    (b"PK\x03\x04", "a ZIP archive, perhaps a PyTorch checkpoint or a wheel: a .gguf file is needed"),
    (b"\x80\x02", "a Python pickle, perhaps an old PyTorch checkpoint: a .gguf file is needed"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"<!doctype", "an HTML page: download the file itself, not the page that shows it"),
    (b"<html", "an HTML page: download the file itself, not the page that shows it"),
    (b"<?xml", "an XML answer of a server: download it again"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive: unpack it first"),
    (b"tjgg", "a GGML file of before 2023-08: it must be converted to GGUF"),
    (b"lmgg", "a GGML file of before 2023-08: it must be converted to GGUF"),
    (b"\0\0\0\0\0\0\0\0", "all zeros at its start, perhaps an interrupted download: download it again"),
    (b"{", "JSON text, perhaps a configuration or a server's answer: a .gguf file is needed"),
)


def _check_magic(path: Path, data: mmap.mmap) -> None:
    begin = data[:64]
    if begin[:4] == b"GGUF":
        return
    if len(begin) > 9 and begin[8:9] == b"{" and 2 <= int.from_bytes(begin[:8], "little") <= len(data) - 8:
        looks = "a safetensors file: it must be converted to GGUF"
    else:
        text = begin.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
        # Pickles and archives are told by exact bytes, text by its first word whatever its case.
        known = [what for start, what in _OTHER_FILES if begin.startswith(start) or text.startswith(start)]
        looks = known[0] if known else f"nothing known, it begins with the bytes {begin[:8].hex(' ')}"
    raise ModelError(f"{path} is not a GGUF file; it looks like {looks}")
