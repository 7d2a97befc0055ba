"""The weights of a product as onnxruntime's MatMulNBits takes them: packed numbers, scales, and what has to be added.

y = Σ scale · (number · x) + offset · Σ x, block by block. MatMulNBits does the first sum; the second is a product of
the sums of x over blocks with the offsets.

It has two ways, each fast for some numbers only. With inputs in f32, numbers of 4 bits are fast on x86. Numbers of 8
bits are not: there they are 16 · high + low, two numbers of 4 bits, and x is read twice. The other way rounds inputs to
8 bits in blocks. That alone changes a model too much (see docs/log.md), so x is the sum of two such numbers, 16 bits
together, and they are two rows of the product: `fast` takes this way where it is faster.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...formats.block_numbers import NUMBER_SHAPES, BlockNumbers, block_numbers
from ...graph.graph import Tensor
from ..weights import Source, rows_of

_PIECE = 1 << 20  # weights that stay in a core's cache while they are repacked
FEW_ROWS = 3  # with inputs in f32: a product of one row took 8.5 ms, of four 29 ms, which unpack all weights first
INT8_INPUTS, F32_INPUTS = 4, 1  # accuracy levels of MatMulNBits: inputs rounded to 8 bits, or in f32
# With numbers of 4 bits and one row, inputs in f32 took 1.5 times as long as rounded ones on x86, 7 times on ARM.
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


class ProductShape(NamedTuple):
    """Of a packed product: what merged products share."""

    bits: int  # of the numbers that MatMulNBits reads
    group: int
    repeats: int  # of x: twice where a number is taken in two halves
    offsets: bool
    level: int  # of accuracy

    def weight_bytes(self, n: int, k: int) -> int:
        """Bytes of numbers, scales and offsets of [n, k], as onnxruntime keeps them.

        Where it rounds inputs on x86, it keeps scales twice, and sums beside them.
        """
        groups = k // self.group
        copies = 3 if self.level == INT8_INPUTS and _IS_X86 else 1
        factors = self.repeats * copies + self.offsets
        return n * (self.repeats * k * self.bits // 8 + 4 * groups * factors)


def product_shape(kind: str, k: int, precision: str) -> ProductShape | None:
    """How rows of k weights of a format are multiplied; None for formats that are not packed here."""
    shape = NUMBER_SHAPES.get(kind)
    if shape is None or k % shape.group:
        return None
    if precision == "fast" and not (shape.bits == 4 and _IS_X86):
        return ProductShape(shape.bits, shape.group, 1, shape.offsets, INT8_INPUTS)
    if shape.bits == 4:
        return ProductShape(4, shape.group, 1, shape.offsets, F32_INPUTS)
    return ProductShape(4, shape.group, 2, True, F32_INPUTS)


@dataclass(frozen=True)
class PackedProduct:
    """Arrays of [N, K]: numbers [N, groups, bytes], scales [N, groups], offsets [N, groups of K]."""

    numbers: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None


def pack_product(weights: Sequence[Tensor], shape: ProductShape, source: Source) -> PackedProduct:
    """The rows of these weights, one below the other."""
    n, k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    groups = k // shape.group
    numbers = np.empty((n, shape.repeats * groups, shape.group * shape.bits // 8), np.uint8)
    scales = np.empty((n, shape.repeats * groups), np.float32)
    offsets = np.empty((n, groups), np.float32) if shape.offsets else None
    at, step = 0, max(2, _PIECE // k // 2 * 2)
    for weight in weights:
        about: dict[str, Any] = {"tensors": weight.parts, "interleaved": weight.interleaved, "format": weight.format}
        for first in range(0, weight.shape[0], step):
            end = min(first + step, weight.shape[0])
            piece = block_numbers(rows_of(about, first, end, source), weight.format)
            if shape.repeats == 2:
                piece = _halves(piece)
            rows = slice(at + first, at + end)
            numbers[rows] = piece.numbers.reshape(end - first, *numbers.shape[1:])
            scales[rows] = piece.scales
            if offsets is not None and piece.offsets is not None:
                offsets[rows] = piece.offsets
        at += weight.shape[0]
    return PackedProduct(numbers, scales, offsets)


def _halves(whole: BlockNumbers) -> BlockNumbers:
    """Bytes of number + 128 as 16 · (high − 8) + (low − 8) + 8: rows twice as long, of four bits."""
    high, low = whole.numbers >> np.uint8(4), whole.numbers & 15
    both = np.concatenate([high, low], axis=1)
    offsets = 8 * whole.scales if whole.offsets is None else whole.offsets + 8 * whole.scales
    numbers: NDArray[np.uint8] = both[:, ::2] | both[:, 1::2] << np.uint8(4)
    return BlockNumbers(numbers, np.concatenate([16 * whole.scales, whole.scales], axis=1), offsets)


def dense_bytes(tensor: Tensor) -> int:
    """Of a weight in f32."""
    return 4 * math.prod(tensor.shape)
