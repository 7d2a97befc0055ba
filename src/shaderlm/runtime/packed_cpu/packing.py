"""The weights of a matrix, from the blocks of a file to the arrays that products read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...compile.plan import WeightSource
from ...formats.block_numbers import block_numbers
from ..weights import Source, dense, rows_of
from .lowering import Product

_PIECE = 1 << 20  # weights that stay in a core's cache while they are repacked


def pack(product: Product, source: Source, on_bytes: Callable[[int], None]) -> dict[str, NDArray[Any]]:
    """Arrays by name. `on_bytes` is told how many bytes are done, piece by piece."""
    weight, kind = product.weight, product.kind
    if kind is None:
        array = dense([replace(weight, format="f32")], source)[weight.name]
        on_bytes(array.nbytes)
        return {f"{weight.name}.numbers": array}
    n, k = weight.shape
    factor = np.float16 if kind.half else np.float32
    arrays: dict[str, NDArray[Any]] = {
        "numbers": np.empty((n, k * kind.bits // 8), np.uint8),
        "scales": np.empty((n, k // kind.group), factor),
    }
    if kind.offsets:
        arrays["offsets"] = np.empty((n, k // kind.group), factor)
    rows = WeightSource(weight.parts, weight.interleaved, weight.format)
    step = max(2, _PIECE // k // 2 * 2)
    for first in range(0, n, step):
        end = min(first + step, n)
        piece = block_numbers(rows_of(rows, first, end, source), weight.format)
        for name, array in arrays.items():
            array[first:end] = getattr(piece, name)
        on_bytes(sum(array[first:end].nbytes for array in arrays.values()))
    return {f"{weight.name}.{name}": array for name, array in arrays.items()}


def release_freed_memory() -> None:
    """Give what was freed back to the system: glibc keeps the copies that packing left behind."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
