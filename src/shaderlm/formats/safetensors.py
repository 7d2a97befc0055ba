"""safetensors: one mapped file, or the parts that model.safetensors.index.json names → named tensors. Knows no model.

A file is: the header's length in 8 bytes, the header in JSON, the tensors' bytes, one after the other without gaps.
Every length, offset and shape is held against the file's size before anything is used.
"""

from __future__ import annotations

import math
import mmap
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .gguf_header import TensorInfo
from .json_files import parse_json, read_json
from .mapped import map_file, mapped_rows, unmap

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

# safetensors' name → ours, and bytes per number. Those that are no weight formats are parts of quantised weights.
_DTYPES = {
    "F32": ("f32", 4),
    "F16": ("f16", 2),
    "BF16": ("bf16", 2),
    "F64": ("f64", 8),
    "F8_E4M3": ("f8_e4m3", 1),
    "F8_E5M2": ("f8_e5m2", 1),
    "I64": ("i64", 8),
    "I32": ("i32", 4),
    "I16": ("i16", 2),
    "I8": ("i8", 1),
    "U64": ("u64", 8),
    "U32": ("u32", 4),
    "U16": ("u16", 2),
    "U8": ("u8", 1),
    "BOOL": ("bool", 1),
}
_NUMPY = {
    kind: np.dtype(f"<{'f' if kind in ('f16', 'f32', 'f64') else 'i' if kind[0] == 'i' else 'u'}{width}")
    for kind, width in _DTYPES.values()
}
_MAX_HEADER = 8 << 20  # a checkpoint with 36,000 tensors has 5 MB
_MAX_INDEX = 64 << 20
_MAX_RANK = 8
_METADATA = "__metadata__"
_DOWNLOAD_AGAIN = "the file is truncated or damaged; download it again"


class Safetensors:
    """The tensors of one file or of several that belong together, all mapped."""

    def __init__(self, files: Mapping[Path, mmap.mmap], tensors: Mapping[str, tuple[Path, TensorInfo]]) -> None:
        self._files = dict(files)
        self._where = {name: path for name, (path, _) in tensors.items()}
        self.tensors = MappingProxyType({name: info for name, (_, info) in tensors.items()})
        self.size = sum(map(len, files.values()))

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return list(self._files)

    @classmethod
    def open(cls, folder: Path) -> Safetensors:
        """The checkpoint in a folder: model.safetensors if it has one, else the parts of its index."""
        index, file_of = folder / INDEX, _index(folder)
        paths = _paths(folder, file_of)
        files: dict[Path, mmap.mmap] = {}
        tensors: dict[str, tuple[Path, TensorInfo]] = {}
        try:
            for path in paths:
                part = f", which {INDEX} names; download the rest" if file_of else ""
                files[path] = map_file(path, f"a .safetensors file{part}")
                for name, info in read_header(path, files[path]).items():
                    if name in tensors:
                        raise ModelError(f"{path}: tensor {reprlib.repr(name)} is in {tensors[name][0].name} too")
                    tensors[name] = (path, info)
            for name, file in file_of.items():
                if name not in tensors or tensors[name][0] != folder / file:
                    raise ModelError(f"{index}: there is no tensor {reprlib.repr(name)} in {file}; download both again")
            return cls(files, tensors)
        except BaseException:
            for data in files.values():
                unmap(data)
            raise

    def raw(self, name: str, first: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Rows `first` … `end` as they lie in the file: a read-only view [rows, bytes per row]; a vector is one row."""
        info = self.tensors[name]
        rows = math.prod(info.shape[:-1])
        end = rows if end is None else end
        assert 0 <= first <= end <= rows
        row_bytes = info.nbytes // rows if rows else 0
        return mapped_rows(self._files[self._where[name]], info.offset, row_bytes, first, end)

    def numbers(self, name: str) -> NDArray[Any]:
        """A tensor in its shape, a read-only view. Numbers that NumPy does not have come as whole numbers."""
        info = self.tensors[name]
        return self.raw(name).reshape(-1).view(_NUMPY[info.kind]).reshape(info.shape)

    def close(self) -> None:
        """Let go of the files. Arrays that `raw` gave out keep them mapped until they are gone."""
        for data in self._files.values():
            unmap(data)
        self._files.clear()


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that `Safetensors.open` would open. Others may lie beside them, such as the same weights once more."""
    return _paths(folder, _index(folder))


def _index(folder: Path) -> dict[str, str]:
    """Tensor → file; nothing for a folder with one file."""
    index = folder / INDEX
    return weight_map(index) if index.exists() and not (folder / SINGLE).exists() else {}


def _paths(folder: Path, file_of: Mapping[str, str]) -> list[Path]:
    return sorted({folder / file for file in file_of.values()}) or [_single(folder)]


def _single(folder: Path) -> Path:
    """The one file of a folder without an index, whatever its name."""
    usual = folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if usual.exists() or not files:
        return usual
    if len(files) > 1:
        raise ModelError(
            f"{folder} has {len(files)} .safetensors files, but neither {SINGLE} nor {INDEX}, which names the parts of "
            "a checkpoint; download the whole folder again"
        )
    return files[0]


def weight_map(index: Path) -> dict[str, str]:
    """Tensor → file, from the index. Files lie beside it."""
    file_of = read_json(index, _MAX_INDEX).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ModelError(f"{index}: weight_map must name the file of every tensor; it is {reprlib.repr(file_of)}")
    for name, file in file_of.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\:\0")
        if not plain:
            raise ModelError(
                f"{index}: tensor {reprlib.repr(name)} must be in a .safetensors file of the same folder, it is in "
                f"{reprlib.repr(file)}"
            )
    return file_of


# The header ----------------------------------------------------------------------------------------------


def read_header(path: Path, data: mmap.mmap) -> dict[str, TensorInfo]:
    """The tensors of a mapped file; what cannot be right is a ModelError."""
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 10 or data[8:9] != b"{":
        looks = f"it begins with the bytes {data[:8].hex(' ')}"
        raise ModelError(f"{path} is not a safetensors file: {looks}; download it again")
    if length > size - 8:
        raise ModelError(f"{path}: the header has {length} bytes, {size - 8} follow; {_DOWNLOAD_AGAIN}")
    if length > _MAX_HEADER:
        raise ModelError(f"{path}: the header has {length:,} bytes; at most {_MAX_HEADER:,} can be read")
    header = parse_json(data[8 : 8 + length], f"{path}: the header")
    header.pop(_METADATA, None)  # texts about the file
    start = 8 + length
    tensors = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    _check_gaps(path, list(tensors.values()), start, size)
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    called = f"{path}: tensor {reprlib.repr(name)}"
    if not name or not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{called} must have dtype, shape and data_offsets, it has {reprlib.repr(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ModelError(f"{called} has the dtype {reprlib.repr(dtype)}; known are {', '.join(_DTYPES)}")
    if not _whole(shape) or len(shape) > _MAX_RANK:
        raise ModelError(f"{called} has the impossible shape {reprlib.repr(shape)}; {_DOWNLOAD_AGAIN}")
    if not _whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{called} has the impossible data_offsets {reprlib.repr(offsets)}; {_DOWNLOAD_AGAIN}")
    kind, width = _DTYPES[dtype]
    nbytes = math.prod(shape) * width
    if offsets[1] - offsets[0] != nbytes:
        raise ModelError(
            f"{called} of the shape {reprlib.repr(shape)} needs {nbytes} bytes, {offsets[1] - offsets[0]} are given; "
            f"{_DOWNLOAD_AGAIN}"
        )
    return TensorInfo(name, tuple(shape), kind, start + offsets[0], nbytes)


def _whole(numbers: Any) -> bool:
    """Is it a list of whole numbers that a file could have?"""
    return isinstance(numbers, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in numbers)


def _check_gaps(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """Tensors follow each other up to the end of the file: none lies in another, and nothing is between them."""
    at = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            what = "overlaps another" if info.offset < at else f"leaves a gap of {info.offset - at} bytes before it"
            raise ModelError(f"{path}: tensor {reprlib.repr(info.name)} {what}; {_DOWNLOAD_AGAIN}")
        at += info.nbytes
    if at != size:
        missing = f"{at - size} bytes are missing" if at > size else f"{size - at} bytes too many are there"
        raise ModelError(f"{path}: {missing} at its end; {_DOWNLOAD_AGAIN}")
