"""Small safetensors files for tests, written by hand, so that they can be wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "int64": "I64", "uint8": "U8"} | {
    "int8": "I8"
}


def header(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The header of these tensors, one after the other; uint16 stands for the bits of bf16."""
    at, entries = 0, {}
    for name, array in tensors.items():
        end = at + array.nbytes
        entries[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    return entries


def to_bytes(entries: object, data: bytes) -> bytes:
    """A whole file of a header, which may be JSON text already, and data."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    path.write_bytes(to_bytes(header(tensors), b"".join(array.tobytes() for array in tensors.values())))
    return path


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bf16, cut off."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
