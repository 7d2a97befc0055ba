"""Orders of the rows of a matrix that makes heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def paired_rows(rows: NDArray[np.int64], width: int, rotary: int) -> NDArray[np.int64]:
    """Which rows of a matrix with halves these are of one with pairs, for heads of `width` rows.

    Rope turns the rows i and i + rotary / 2 of a head together. In the matrix with pairs they are 2i and 2i + 1. Rows
    from `rotary` on stay where they are.
    """
    at = rows % width
    return rows - at + np.where(at < rotary, at % 2 * (rotary // 2) + at // 2, at)
