"""GGUF files: a mapped file → metadata and named tensors. Knows no model, no GPU, no text rules.

The file is mapped, never read whole. `gguf_header.py` reads and checks the header.
"""

from __future__ import annotations

import difflib
import math
import mmap
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from .gguf_header import TensorInfo, read_header
from .mapped import map_file, unmap
from .unpack import unpack
from .weight_formats import WEIGHT_FORMATS

__all__ = ["GgufFile", "TensorInfo"]


class GgufFile:
    """An open checkpoint. Use it as a context manager, or call `close()`."""

    def __init__(self, path: Path, data: mmap.mmap, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]):
        self.path = path
        self.size = len(data)
        self.metadata = MappingProxyType(dict(metadata))
        self.tensors = MappingProxyType(dict(tensors))
        self._data: mmap.mmap | None = data

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

    def raw(self, name: str, first: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Rows `first` … `end` as they lie in the file: a read-only view [rows, bytes per row]; a vector is one row."""
        info, rows = self._info(name), self._rows(name)
        first, end = _range(name, first, rows if end is None else end, rows)
        if self._data is None:
            raise InputError(f"{self.path} is closed: read its tensors before close()")
        row_bytes = info.nbytes // rows
        flat = np.frombuffer(self._data, np.uint8, (end - first) * row_bytes, info.offset + first * row_bytes)
        return flat.reshape(end - first, row_bytes)

    def dense(self, name: str, first: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Rows `first` … `end` in float32: [rows, K], a vector [n]. A new array."""
        info, blocks = self._info(name), self.raw(name, first, end)
        if len(blocks) == 0:  # gguf's own functions do not take nothing
            return np.empty(0 if len(info.shape) == 1 else (0, info.shape[-1]), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale is the file's, not the caller's
            rows = unpack(blocks, info.kind).reshape(len(blocks), info.shape[-1])
        return rows.reshape(-1) if len(info.shape) == 1 else rows

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            close = difflib.get_close_matches(str(name), self.tensors, 1)
            hint = f"; did you mean {close[0]}?" if close else f" among its {len(self.tensors)}"
            raise ModelError(f"{self.path}: there is no tensor {name!r}{hint}")
        if info.kind not in WEIGHT_FORMATS:
            raise ModelError(
                f"{self.path}: tensor {name} has the type {info.kind}, which is not supported; use a file of the types "
                f"{', '.join(WEIGHT_FORMATS)}"
            )
        return info

    def _rows(self, name: str) -> int:
        return math.prod(self.tensors[name].shape[:-1])

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """While this is entered, every ModelError names the file."""
        try:
            yield
        except ModelError as problem:
            if str(self.path) in str(problem):
                raise
            raise ModelError(f"{self.path}: {problem}") from None

    def close(self) -> None:
        """Let go of the file. Arrays that `raw` gave out keep it mapped until they are gone."""
        if self._data is not None:
            unmap(self._data)
            self._data = None

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _range(name: str, first: Any, end: Any, rows: int) -> tuple[int, int]:
    try:
        start, stop = operator.index(first), operator.index(end)
    except TypeError:
        raise InputError(f"{name}: rows must be whole numbers, got {first!r} … {end!r}") from None
    if not 0 <= start <= stop <= rows:
        raise InputError(f"{name}: rows must satisfy 0 ≤ first ≤ end ≤ {rows}, got {start} … {stop}")
    return start, stop


# The file ------------------------------------------------------------------------------------------------


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
