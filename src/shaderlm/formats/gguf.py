"""GGUF files: a mapped file → metadata and named tensors. Knows no model, no GPU, no text rules.

The file is mapped, never read whole. `gguf_header.py` reads and checks the header.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from .checkpoint import Checkpoint
from .gguf_header import TensorInfo, read_header
from .mapped import map_file, mapped_rows, unmap

__all__ = ["GgufFile", "TensorInfo"]

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_MAX_PARTS = 4096


class GgufFile(Checkpoint):
    """An open GGUF file, with the other parts if it is one of several."""

    def __init__(self, path: Path, parts: Sequence[Shard]) -> None:
        self._parts = parts
        self._where = {name: part.data for part in parts for name in part.tensors}
        tensors = {name: info for part in parts for name, info in part.tensors.items()}
        super().__init__(path, sum(len(part.data) for part in parts), parts[0].metadata, tensors)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file and check its header; anything that is not a whole GGUF file is a ModelError."""
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(f"expected the path of a .gguf file, got {type(path).__name__}")
        where = Path(path)
        parts: list[Shard] = []
        try:
            parts.append(_open_part(where))
            count = parts[0].metadata.get("split.count", 1)
            if isinstance(count, int) and count > 1:
                others = part_paths(where, count)
                unmap(parts.pop().data)
                for each in others:  # one by one: the last ones may be missing
                    parts.append(_open_part(each))
                _check_parts(others, parts)
            return cls(where, parts)
        except BaseException:
            for part in parts:
                unmap(part.data)
            raise

    def files(self) -> list[Path]:
        """All parts."""
        return [part.path for part in self._parts]

    def _read(self, info: TensorInfo, first: int, end: int) -> NDArray[np.uint8]:
        row_bytes = info.nbytes // math.prod(info.shape[:-1])
        return mapped_rows(self._where[info.name], info.offset, row_bytes, first, end)

    def _release(self) -> None:
        self._where.clear()
        for part in self._parts:
            unmap(part.data)


# Parts ---------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """A file that is mapped, and its header."""

    path: Path
    data: mmap.mmap
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def part_paths(path: Path, count: int) -> list[Path]:
    """The paths of all parts, from that of one; their names say which they are."""
    named = PART_NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count or count > _MAX_PARTS:
        raise ModelError(
            f"{path} is one of {count} parts of a checkpoint; the parts must lie beside each other and be named "
            f"NAME-00001-of-{min(count, _MAX_PARTS):05}.gguf and so on"
        )
    return [path.with_name(f"{named[1]}-{i + 1:05}-of-{count:05}{named[4]}") for i in range(count)]


def all_parts(name: str) -> list[str]:
    """The names of all parts of a checkpoint, from that of one; of a file that is no part, its own."""
    part = PART_NAME.fullmatch(name.rpartition("/")[2])
    return [name] if part is None else [path.as_posix() for path in part_paths(Path(name), int(part[3]))]


def first_parts(names: Iterable[str]) -> list[str]:
    """The GGUF files among these, in order; of one in several parts, the first part."""
    parts = {name: PART_NAME.fullmatch(name.rpartition("/")[2]) for name in names if name.lower().endswith(".gguf")}
    return sorted(name for name, part in parts.items() if part is None or int(part[2]) == 1)


def _open_part(path: Path) -> Shard:
    part = PART_NAME.fullmatch(path.name)
    data = map_file(
        path, "a .gguf file" if part is None else f"all {int(part[3])} parts in one folder; download the rest"
    )
    try:
        _check_magic(path, data)
        return Shard(path, data, *read_header(path, data))
    except BaseException:
        unmap(data)
        raise


def _check_parts(paths: Sequence[Path], parts: Sequence[Shard]) -> None:
    """They belong together: numbered, of the same count, without a tensor twice, with as many as the first one says."""
    seen: dict[str, Path] = {}
    for i, (path, part) in enumerate(zip(paths, parts, strict=True)):
        number, count = (part.metadata.get(f"split.{key}") for key in ("no", "count"))
        if (number, count) != (i, len(parts)):
            raise ModelError(
                f"{path} must be part {i} of {len(parts)}, it says that it is {number!r:.20} of {count!r:.20}; "
                "download all parts again"
            )
        for name in part.tensors:
            if name in seen:
                raise ModelError(f"{path}: tensor {name!r:.64} is in {seen[name].name} too; download all parts again")
            seen[name] = path
    expected = parts[0].metadata.get("split.tensors.count", len(seen))
    if expected != len(seen):
        raise ModelError(f"{paths[0]} says that there are {expected!r:.20} tensors, the parts have {len(seen)}")


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
        looks = "a safetensors file: give the folder that it lies in, with its config.json"
    else:
        text = begin.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
        # Pickles and archives are told by exact bytes, text by its first word whatever its case.
        known = [what for start, what in _OTHER_FILES if begin.startswith(start) or text.startswith(start)]
        is_text = begin[:16].isascii() and begin[:16].decode().isprintable()
        begins = f"{begin[:16].decode()!r}" if is_text else f"the bytes {begin[:8].hex(' ')}"
        looks = known[0] if known else f"{'text' if is_text else 'nothing known'}, it begins with {begins}"
    raise ModelError(f"{path} is not a GGUF file; it looks like {looks}")
