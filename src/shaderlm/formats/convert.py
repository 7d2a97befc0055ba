"""How a tensor of a file lies on a device: a matrix as it is stored, a vector in f32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint
from .weight_formats import WEIGHT_FORMATS


def device_format(file: Checkpoint, name: str) -> str:
    """The format on a device. Vectors are f32."""
    info = file.info(name)
    return info.kind if len(info.shape) > 1 else "f32"


def rows_for_device(file: Checkpoint, name: str, kind: str, first: int, end: int) -> NDArray[Any]:
    """Rows of a tensor in a device's format: as GGUF stores them, or dense in f32."""
    if file.tensors[name].kind != kind:
        rows = file.dense(name, first, end).reshape(end - first, -1)
        return rows.astype(WEIGHT_FORMATS[kind].dtype, copy=False)
    return file.raw(name, first, end).view(WEIGHT_FORMATS[kind].dtype or np.uint8)
