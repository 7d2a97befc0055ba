"""A tensor of a tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class VisionTensor:
    """A tensor as the tower wants it. `load` reads all of it."""

    shape: tuple[int, ...]
    kind: str
    load: Callable[[], F32]
