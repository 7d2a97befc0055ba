"""The header of a GGUF file, before its tensors: read fast, and checked before anything is used.

Knows bytes and limits; what keys and tensors mean is for others. Written because gguf.GGUFReader takes seconds for a
vocabulary of 49,000 tokens (4.3 s, this 0.08 s). Every length and count is held against the file's size before use.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .weight_formats import WEIGHT_FORMATS

# GGML's number → name, weights per block, bytes per block. Types that cannot be read are looked up in the gguf package
# only when they are met, since its import takes 0.2 s.
_TYPES = {form.gguf_type: (form.name, form.block_weights, form.block_bytes) for form in WEIGHT_FORMATS.values()}

# GGUF's value types that are plain numbers, as NumPy calls them. 7 is bool, 8 a string, 9 an array.
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# The least that an entry takes: key length, key, type, value; name length, name, rank, one dimension, type, offset.
_MIN_PAIR_BYTES, _MIN_TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
# A damaged length must not fill the memory. The largest real vocabularies have about 10⁶ strings in all.
_MAX_ELEMENTS, _MAX_STRING = 1 << 24, 1 << 24
_MAX_DEPTH, _MAX_ALIGNMENT = 4, 1 << 20
_DOWNLOAD_AGAIN = "the file is truncated or damaged; download it again"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in NumPy's order: [N, K] for a matrix, [n] for a vector."""

    name: str
    shape: tuple[int, ...]
    kind: str  # GGML's type in lower case: "f32", "q4_1", …
    offset: int  # from the start of the file
    nbytes: int


class _Header:
    """Reads values one after the other and never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.size = path, data, len(data)
        self.at = 4  # behind the magic
        self.elements_left = _MAX_ELEMENTS

    def broken(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def take(self, count: int, what: str) -> int:
        """Where the next `count` bytes begin, once it is known that they are there."""
        start = self.at
        if count > self.size - start:
            raise self.broken(
                f"{what} at byte {start} needs {count} bytes, {self.size - start} are left; {_DOWNLOAD_AGAIN}"
            )
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def count(self, what: str, min_bytes: int) -> int:
        """How many entries of `min_bytes` or more follow: never more than the file could hold."""
        count = self.u64(what)
        if count * min_bytes > self.size - self.at:
            raise self.broken(f"{what} is {count}, but only {self.size - self.at} bytes follow; {_DOWNLOAD_AGAIN}")
        return count

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        data, size, at, length = self.data, self.size, self.at, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                if at > size or at - start > _MAX_STRING:
                    raise self.broken(
                        f"{what} at byte {start} has {at - start} bytes, {size - start} follow; {_DOWNLOAD_AGAIN}"
                    )
                strings.append(data[start:at].decode())
        except struct.error:
            raise self.broken(f"the file ends inside {what}; {_DOWNLOAD_AGAIN}") from None
        except UnicodeDecodeError:
            raise self.broken(f"{what} at byte {start} is not UTF-8; {_DOWNLOAD_AGAIN}") from None
        self.at = at
        return strings

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, 1)
        return self.numbers(kind, 1, what)[0]

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self.broken(f"{what} has the unknown value type {kind}; {_DOWNLOAD_AGAIN}")
        dtype = np.dtype(_SCALARS[kind])
        numbers = (
            np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize, what)) if count else np.empty(0)
        )
        if kind != _BOOL:
            return list(numbers.tolist())
        if (numbers > 1).any():
            raise self.broken(f"{what} must hold booleans (bytes 0 or 1), it holds {numbers.max()}; {_DOWNLOAD_AGAIN}")
        return list(numbers.astype(bool).tolist())

    def array(self, what: str, depth: int) -> list[Any]:
        kind = self.u32(what)
        min_bytes = 8 if kind == _STRING else 12 if kind == _ARRAY else 1
        count = self.count(f"the length of {what}", min_bytes)
        self.elements_left -= count
        if self.elements_left < 0 or depth > _MAX_DEPTH:
            raise self.broken(
                f"{what} has {count} elements, nested {depth} deep; at most {_MAX_ELEMENTS} in all metadata, "
                f"{_MAX_DEPTH} deep, can be real: {_DOWNLOAD_AGAIN}"
            )
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            return [self.array(what, depth + 1) for _ in range(count)]
        return self.numbers(kind, count, what)


def read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors of a mapped file that begins with GGUF's magic; what cannot be right is a ModelError."""
    header = _Header(path, data)
    _check_version(header)
    tensor_count = header.count("the number of tensors", _MIN_TENSOR_BYTES)
    pair_count = header.count("the number of metadata entries", _MIN_PAIR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = header.string("a metadata key")
        if not key or key in metadata:
            raise header.broken(
                f"the metadata key {_short(key)} is {'there twice' if key else 'empty'}; {_DOWNLOAD_AGAIN}"
            )
        metadata[key] = header.value(header.u32(f"the type of {_short(key)}"), f"metadata {_short(key)}")
    alignment = _alignment(header, metadata)
    entries = [_entry(header) for _ in range(tensor_count)]
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, dims, number, offset in entries:
        if not name or name in tensors:
            raise header.broken(
                f"the tensor name {_short(name)} is {'there twice' if name else 'empty'}; {_DOWNLOAD_AGAIN}"
            )
        if offset % alignment:
            raise header.broken(
                f"tensor {_short(name)} begins at {offset}, not a multiple of {alignment}; {_DOWNLOAD_AGAIN}"
            )
        tensors[name] = _tensor(header, name, dims, number, start + offset)
    _check_places(header, tensors)
    return metadata, tensors


def _check_places(header: _Header, tensors: dict[str, TensorInfo]) -> None:
    """No byte belongs to two tensors."""
    placed = sorted(tensors.values(), key=lambda each: each.offset)
    for before, after in pairwise(placed):
        if before.offset + before.nbytes > after.offset:
            names = f"the tensors {_short(before.name)} and {_short(after.name)}"
            raise header.broken(f"{names} overlap; {_DOWNLOAD_AGAIN}")


def _check_version(header: _Header) -> None:
    version = header.u32("the version")
    if version in (2, 3):
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        raise header.broken("the file is big-endian GGUF, which is not supported; download the little-endian file")
    raise header.broken(f"GGUF version {version} is not supported, 2 and 3 are; use a newer or newly converted file")


def _alignment(header: _Header, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise header.broken(
            f"general.alignment must be a power of two up to 2²⁰, it is {_short(alignment)}; {_DOWNLOAD_AGAIN}"
        )
    return alignment


# Files of Falcon-H1 call it so; everywhere else it has a suffix.
_NORM = re.compile(r"blk\.\d{1,4}\.ffn_norm")


def _entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name = header.string("a tensor's name")
    if _NORM.fullmatch(name):
        name += ".weight"
    what = f"the entry of tensor {_short(name)}"
    rank = header.u32(what)
    if not 1 <= rank <= 4:
        raise header.broken(f"tensor {_short(name)} must have 1 to 4 dimensions, it has {rank}; {_DOWNLOAD_AGAIN}")
    dims = tuple(header.u64(what) for _ in range(rank))
    return name, dims, header.u32(what), header.u64(what)


def _tensor(header: _Header, name: str, dims: tuple[int, ...], number: int, offset: int) -> TensorInfo:
    """GGUF writes the fastest dimension first; `shape` has it last."""
    called, size = f"tensor {_short(name)}", math.prod(dims)
    if not 0 < size < 1 << 63:
        raise header.broken(f"{called} has the impossible dimensions {list(dims)}; {_DOWNLOAD_AGAIN}")
    known = _TYPES.get(number) or _other_type(number)
    if known is None:
        raise header.broken(f"{called} has the unknown type number {number}; supported are {', '.join(WEIGHT_FORMATS)}")
    kind, block, block_bytes = known
    if dims[0] % block:
        raise header.broken(
            f"{called}: rows of {kind} must be a multiple of {block} long, got {dims[0]}; {_DOWNLOAD_AGAIN}"
        )
    nbytes = size // block * block_bytes
    if offset + nbytes > header.size:
        there = max(0, header.size - offset)
        raise header.broken(
            f"{called} needs {nbytes} bytes, {there} are there: the file is truncated; download it again"
        )
    return TensorInfo(name, dims[::-1], kind, offset, nbytes)


def _other_type(number: int) -> tuple[str, int, int] | None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with suppress(ValueError, KeyError):
        kind = GGMLQuantizationType(number)
        return (kind.name.lower(), *GGML_QUANT_SIZES[kind])
    return None


def _short(value: Any) -> str:
    """What the file holds there, on one line of at most 64 characters."""
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:60]}…"
