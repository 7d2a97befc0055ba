"""Writes GGUF files: a header of known tensors, then their bytes, in pieces. Knows no model.

Numbers are kept as they are: a fraction that f32 does not have is written as f64.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from .weight_formats import WEIGHT_FORMATS

ALIGNMENT = 32
_VERSION = 3
# GGUF's numbers of value types, and how they are packed.
_U8, _U32, _I32, _BOOL, _STRING, _ARRAY = 0, 4, 5, 7, 8, 9
_NUMBERS = {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Planned(NamedTuple):
    """A tensor to be written: NumPy's shape, and the name of a weight format."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """On disk, without padding."""
        form = WEIGHT_FORMATS[self.kind]
        return math.prod(self.shape) // form.block_weights * form.block_bytes


def header(metadata: Mapping[str, Any], tensors: Sequence[Planned]) -> bytes:
    """All that comes before the tensors' bytes. What GGUF has no type for becomes JSON text."""
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    at = 0
    for tensor in tensors:
        parts += [_text(tensor.name), struct.pack("<I", len(tensor.shape))]
        parts += [struct.pack("<Q", size) for size in reversed(tensor.shape)]
        parts.append(struct.pack("<IQ", WEIGHT_FORMATS[tensor.kind].gguf_type, at))
        at += tensor.nbytes + padding(tensor.nbytes)
    unpadded = b"".join(parts)
    return unpadded + bytes(padding(len(unpadded)))


def padding(nbytes: int) -> int:
    """How many bytes follow so many, so that the next tensor is aligned."""
    return -nbytes % ALIGNMENT


def write_tensor(file: IO[bytes], tensor: Planned, pieces: Iterable[bytes]) -> None:
    """The bytes of the next tensor."""
    done = 0
    for piece in pieces:
        file.write(piece)
        done += len(piece)
    assert done == tensor.nbytes, (tensor, done)
    file.write(bytes(padding(done)))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _type_of(value)
        if kind == _U32 and max(value, default=0) < 1 << 31:
            kind = _I32  # as converters write lists: some readers take no other
        if kind is not None:
            body = b"".join(map(_text, value)) if kind == _STRING else _packed(kind, value)
            return struct.pack("<IIQ", _ARRAY, kind, len(value)) + body
    elif isinstance(value, bytes):
        return struct.pack("<IIQ", _ARRAY, _U8, len(value)) + value
    elif isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    else:
        kind = _type_of([value])
        if kind is not None:
            return struct.pack("<I", kind) + _packed(kind, [value])
    return _value(json.dumps(value))


def _packed(kind: int, values: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{_NUMBERS[kind]}", *values)


def _type_of(values: Sequence[Any]) -> int | None:
    """The type that has all of these values as they are; None if there is none."""
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return _STRING
    if kinds == {bool}:
        return _BOOL
    if kinds <= {int}:
        low, high = min(values, default=0), max(values, default=0)
        known = [(_U32, 0, 1 << 32), (_I32, -(1 << 31), 1 << 31), (11, -(1 << 63), 1 << 63), (10, 0, 1 << 64)]
        return next((kind for kind, least, end in known if least <= low and high < end), None)
    if kinds <= {int, float}:
        with np.errstate(over="ignore"):
            exact = all(math.isnan(value) or float(np.float32(value)) == value for value in values)
        return 6 if exact else 12
    return None
