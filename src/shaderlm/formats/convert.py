"""Tensor types that no kernel reads, turned into one that kernels do; and the table of what becomes what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import pack_q8_0
from .gguf import GgufFile

# The format on the device of each type in a file. bf16 has a wider range than f16: see `device_format`.
ON_DEVICE: Mapping[str, str] = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "f16",
    "q4_0": "q4_0",
    "q4_1": "q4_1",
    "q5_0": "q8_0",
    "q5_1": "q8_0",
    "q8_0": "q8_0",
    "q4_k": "q4_k",
    "q5_k": "q8_0",
    "q6_k": "q6_k",
}
_LARGEST_BF16_IN_F16 = 0x477F  # bits of 65,280


def device_format(file: GgufFile, name: str) -> str:
    """How a tensor will lie on the device. Vectors are f32; bf16 matrices are f16 if every number fits."""
    info = file.tensors[name]
    if len(info.shape) == 1:
        return "f32"
    raw = file.raw(name)  # refuses types that are not supported
    if info.kind == "bf16" and (raw.view(np.uint16) & 0x7FFF).max() > _LARGEST_BF16_IN_F16:
        return "f32"
    return ON_DEVICE[info.kind]


def rows_for_device(file: GgufFile, name: str, kind: str, first: int, end: int) -> NDArray[Any]:
    """Rows of a tensor in a device's format: blocks as GGUF stores them, or dense f32 or f16."""
    stored = file.tensors[name].kind
    if stored == kind:
        raw = file.raw(name, first, end)
        return raw.view(np.float32 if kind == "f32" else np.float16) if kind in ("f32", "f16") else raw
    if stored == "q5_0" and kind == "q8_0":
        return _q5_0_as_q8_0(file.raw(name, first, end))
    dense = file.dense(name, first, end)
    if kind == "q8_0":
        return pack_q8_0(dense)
    return dense.astype(np.float16) if kind == "f16" else dense


def _q5_0_as_q8_0(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same numbers: scale · (q − 16) with q in 5 bits is scale · q' with q' in a signed byte."""
    blocks = rows.reshape(len(rows), -1, 22)  # f16 scale, 32 high bits, 32 low nibbles
    high = np.unpackbits(blocks[:, :, 2:6], axis=2, bitorder="little")
    low = np.concatenate([blocks[:, :, 6:] & 15, blocks[:, :, 6:] >> 4], axis=2)
    q = (low | high << 4).astype(np.int8) - np.int8(16)
    return np.concatenate([blocks[:, :, :2], q.view(np.uint8)], axis=2).reshape(len(rows), -1)
