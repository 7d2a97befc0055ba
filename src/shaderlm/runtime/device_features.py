"""Features of pictures in buffers of the device that reads them, and how rows of them come into a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gpu import Buffer, Copy, Device
from .image_rows import FeatureRows


class DeviceFeatures:
    """Of a picture, [tokens, levels · out] in a buffer, which lives as long as this."""

    def __init__(self, device: Device, buffer: Buffer, tokens: int) -> None:
        self._device, self.buffer, self._tokens = device, buffer, tokens

    def __len__(self) -> int:
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Of the device's memory."""
        return int(self.buffer.size)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Read back: for those who compare them."""
        values = self._device.read(self.buffer, self.nbytes).view(np.float32).reshape(self._tokens, -1)
        return values if dtype is None else values.astype(dtype)


def put_features(device: Device, rows: Iterable[FeatureRows], target: Buffer) -> None:
    """Into the input of a step, one below the other, in the order of submissions."""
    copies, at = [], 0
    for features, first, count in rows:
        row = features.nbytes // len(features)  # bytes
        if isinstance(features, DeviceFeatures):
            copies.append(Copy(features.buffer, target, count * row, first * row, at))
        else:
            device.write(target, np.asarray(features)[first : first + count], at)
        at += count * row
    if copies:
        device.copy(*copies)
