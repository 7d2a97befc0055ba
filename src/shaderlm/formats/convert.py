"""How a tensor of a file lies on a device: nearly always as it is. bf16, which no kernel reads, is turned into f16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gguf import GgufFile
from .weight_formats import WEIGHT_FORMATS

_LARGEST_BF16_IN_F16 = 0x477F  # bits of 65,280
_SMALLEST_NORMAL_F16 = 0x3880  # bits of 2^-14
_PIECE = 1 << 20  # numbers of a tensor looked at together: 2 MiB, and as much for a copy


def device_format(file: GgufFile, name: str) -> str:
    """The format on a device. Vectors are f32; bf16 matrices are f16 where that is harmless, else f32.

    Harmless: the largest magnitude of the matrix is at most 65,280, so that every number fits, and at least 2^-14, or
    all are 0. f16 then holds every number of 2^-17 and above exactly, and rounds smaller ones to multiples of 2^-24:
    an error of at most 2^-25 (numbers up to that become 0), which is no more than 2^-11 of the largest number, f16's
    own precision. In products of 4,096 weights of ordinary size (0.02) it shows as 2e-8 of the result; summing in f32
    costs 4e-7.
    """
    info = file.tensors[name]
    if len(info.shape) == 1:
        return "f32"
    raw = file.raw(name)  # refuses types that are not supported
    if info.kind == "bf16" and not _fits_f16(raw.view(np.uint16).reshape(-1)):
        return "f32"
    return WEIGHT_FORMATS[info.kind].on_device


def _fits_f16(numbers: NDArray[np.uint16]) -> bool:
    """Piece by piece: the matrix lies in the file and may be larger than memory."""
    largest = 0
    for first in range(0, len(numbers), _PIECE):
        largest = max(largest, int((numbers[first : first + _PIECE] & 0x7FFF).max()))  # without the sign; NaN is huge
        if largest > _LARGEST_BF16_IN_F16:
            return False
    return largest == 0 or largest >= _SMALLEST_NORMAL_F16


def rows_for_device(file: GgufFile, name: str, kind: str, first: int, end: int) -> NDArray[Any]:
    """Rows of a tensor in a device's format: blocks as GGUF stores them, or dense f32 or f16."""
    if file.tensors[name].kind != kind:
        return file.dense(name, first, end).astype(WEIGHT_FORMATS[kind].dtype, copy=False)
    return file.raw(name, first, end).view(WEIGHT_FORMATS[kind].dtype or np.uint8)
