"""How a tensor of a file lies on a device: nearly always as it is. bf16, which no kernel reads, is turned into f16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gguf import SUPPORTED, GgufFile

# Of matrices; bf16 has a wider range than f16, see `device_format`.
ON_DEVICE = {kind: "f16" if kind == "bf16" else kind for kind in SUPPORTED}
_LARGEST_BF16_IN_F16 = 0x477F  # bits of 65,280


def device_format(file: GgufFile, name: str) -> str:
    """The format on a device. Vectors are f32; bf16 matrices are f16 if every number fits, else f32."""
    info = file.tensors[name]
    if len(info.shape) == 1:
        return "f32"
    raw = file.raw(name)  # refuses types that are not supported
    if info.kind == "bf16" and (raw.view(np.uint16) & 0x7FFF).max() > _LARGEST_BF16_IN_F16:
        return "f32"
    return ON_DEVICE[info.kind]


def rows_for_device(file: GgufFile, name: str, kind: str, first: int, end: int) -> NDArray[Any]:
    """Rows of a tensor in a device's format: blocks as GGUF stores them, or dense f32 or f16."""
    if file.tensors[name].kind != kind:
        dense = file.dense(name, first, end)
        return dense.astype(np.float16) if kind == "f16" else dense
    raw = file.raw(name, first, end)
    return raw.view({"f32": np.float32, "f16": np.float16}.get(kind, np.uint8))
