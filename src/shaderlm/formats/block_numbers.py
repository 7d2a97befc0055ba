"""Blocks of weights → whole numbers with a scale, and perhaps an offset, for every few of them. Nothing is rounded.

weight = scale · (number − zero) + offset. `unpack` gives the weights themselves; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .unpack import IQ4_VALUES, MXFP4_VALUES, high_bits, q3_k_scales, two_bits
from .weight_formats import WEIGHT_FORMATS

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class NumberShape(NamedTuple):
    """How rows are stored: weight = scale · (number − zero) + offset, the last two for every `group` of numbers.

    Numbers of 4 bits are 0 … 15, those of 8 bits −128 … 127.
    """

    bits: int
    group: int
    half: bool = False  # scales and offsets are f16, as in the file; otherwise f32
    offsets: bool = False
    zero: int = 0


class BlockNumbers(NamedTuple):
    """Rows [N, K]. Of 4 bits, the first half of a group lies in the low halves of its bytes."""

    numbers: U8  # [N, K · bits / 8]
    scales: NDArray[Any]  # [N, K / group]
    offsets: NDArray[Any] | None  # the same


NUMBER_SHAPES: Mapping[str, NumberShape] = {
    "q4_0": NumberShape(4, 32, half=True, zero=8),
    "q4_1": NumberShape(4, 32, half=True, offsets=True),
    "q5_0": NumberShape(8, 32, half=True),
    "q5_1": NumberShape(8, 32, half=True, offsets=True),
    "q8_0": NumberShape(8, 32, half=True),
    "q2_k": NumberShape(4, 16, offsets=True),
    "q3_k": NumberShape(4, 16, zero=4),
    "q4_k": NumberShape(4, 32, offsets=True),
    "q5_k": NumberShape(8, 32, offsets=True),
    "q6_k": NumberShape(8, 16),
    "mxfp4": NumberShape(8, 32),
    "iq4_nl": NumberShape(8, 32, half=True),
    "iq4_xs": NumberShape(8, 32),
}


def block_numbers(rows: U8, kind: str) -> BlockNumbers:
    """Of rows as a file stores them, uint8 [N, bytes]. `kind` is one of NUMBER_SHAPES."""
    form, count = WEIGHT_FORMATS[kind], len(rows)
    blocks = rows.reshape(count, -1, form.block_bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite scale is the file's
        numbers, scales, offsets = _READERS[kind](blocks)
    dtype = np.float16 if NUMBER_SHAPES[kind].half else np.float32
    flat = None if offsets is None else np.ascontiguousarray(offsets, dtype).reshape(count, -1)
    return BlockNumbers(
        np.ascontiguousarray(numbers).reshape(count, -1).view(np.uint8),
        np.ascontiguousarray(scales, dtype).reshape(count, -1),
        flat,
    )


_Read = tuple[U8, Any, Any]


def _f16(blocks: U8, at: int) -> NDArray[np.float16]:
    """The f16 at this byte of each block, [N, blocks, 1]."""
    return blocks[:, :, at : at + 2].view(np.float16)


def _half(blocks: U8, at: int) -> F32:
    """The same in f32."""
    return _f16(blocks, at).astype(np.float32)


def _nibbles(numbers: U8, group: int) -> U8:
    """Numbers from 0 to 15 in bytes → two by two, the halves of a group above each other."""
    halves = numbers.reshape(*numbers.shape[:2], -1, 2, group // 2)
    pairs: U8 = halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)
    return pairs


def _split(quants: U8) -> U8:
    """Bytes with number i below number i + 16 → numbers, [N, blocks, 16] → [N, blocks, 32]."""
    return np.concatenate([quants & 15, quants >> 4], axis=2)


def _q4_0(blocks: U8) -> _Read:
    return blocks[:, :, 2:], _f16(blocks, 0), None


def _q4_1(blocks: U8) -> _Read:
    return blocks[:, :, 4:], _f16(blocks, 0), _f16(blocks, 2)


def _fives(high: U8, quants: U8) -> U8:
    """Four bytes with the highest bits of 32 numbers, 16 with the others → numbers from 0 to 31."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=2, bitorder="little")
    return _split(quants) | bits << np.uint8(4)


def _q5_0(blocks: U8) -> _Read:
    return _fives(blocks[:, :, 2:6], blocks[:, :, 6:]) - np.uint8(16), _f16(blocks, 0), None


def _q5_1(blocks: U8) -> _Read:
    return _fives(blocks[:, :, 4:8], blocks[:, :, 8:]), _f16(blocks, 0), _f16(blocks, 2)


def _q8_0(blocks: U8) -> _Read:
    return blocks[:, :, 2:], _f16(blocks, 0), None


def _q2_k(blocks: U8) -> _Read:
    """16 bytes of scales and minima, 64 of two bits, d and dmin (f16)."""
    factors = blocks[:, :, :16]
    offsets = -(_half(blocks, 82) * (factors >> 4))
    return _nibbles(two_bits(blocks[:, :, 16:80]), 16), _half(blocks, 80) * (factors & 15), offsets


def _q3_k(blocks: U8) -> _Read:
    """32 bytes of high bits, 64 of low bits, 12 of scales, d (f16)."""
    quants = two_bits(blocks[:, :, 32:96]) | high_bits(blocks[:, :, :32]) << np.uint8(2)  # 0 … 7 for −4 … 3
    scales = _half(blocks, 108) * (q3_k_scales(blocks).astype(np.float32) - np.float32(32))
    return _nibbles(quants, 16), scales, None


def _k_factors(blocks: U8) -> tuple[F32, F32]:
    """Scales and minima of 8 times 32 numbers, [N, blocks, 8] each: 6 bits in 12 bytes, times d and dmin (f16)."""
    low, middle, high = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << np.uint8(4)], axis=2)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << np.uint8(4)], axis=2)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q4_k(blocks: U8) -> _Read:
    scales, minima = _k_factors(blocks)
    quants = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 2, 16)  # 32 numbers in the low bits, 32 in the high ones
    first, second = quants[..., 0, :], quants[..., 1, :]
    low = (first & 15) | second << np.uint8(4)
    high = (first >> 4) | (second & 240)
    return np.stack([low, high], axis=3), scales, -minima


def _q5_k(blocks: U8) -> _Read:
    scales, minima = _k_factors(blocks)
    quants = blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32)
    low = np.stack([quants & 15, quants >> 4], axis=3).reshape(*blocks.shape[:2], 256)
    return low | high_bits(blocks[:, :, 16:48]) << np.uint8(4), scales, -minima


def _q6_k(blocks: U8) -> _Read:
    """128 bytes of four low bits, 64 of two high bits, 16 scales, d (f16)."""
    low = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=3).reshape(*blocks.shape[:2], 256)
    quants = nibbles | two_bits(blocks[:, :, 128:192]) << np.uint8(4)  # 0 … 63 for −32 … 31
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)
    return quants - np.uint8(32), scales, None


def _coded(values: F32, codes: U8) -> U8:
    """Numbers by their codes, four bits each."""
    table = values.astype(np.int8).view(np.uint8)
    return table[_split(codes)]


def _mxfp4(blocks: U8) -> _Read:
    e = blocks[:, :, :1].astype(np.uint32)
    scale = np.where(e < 2, np.uint32(1 << 21) << e, (np.maximum(e, 1) - 1) << np.uint32(23)).view(np.float32)
    return _coded(MXFP4_VALUES, blocks[:, :, 1:]), scale, None


def _iq4_nl(blocks: U8) -> _Read:
    return _coded(IQ4_VALUES, blocks[:, :, 2:]), _f16(blocks, 0), None


def _iq4_xs(blocks: U8) -> _Read:
    """d (f16), 8 times two high bits and 8 times four low bits of scales from 0 to 63, of which 32 is taken off."""
    high = np.ascontiguousarray(blocks[:, :, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = np.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], axis=3).reshape(high.shape)
    scale = _half(blocks, 0) * ((low | high << np.uint16(4)).astype(np.float32) - np.float32(32))
    return _coded(IQ4_VALUES, blocks[:, :, 8:].reshape(blocks.shape[0], -1, 16)), scale, None


_READERS: Mapping[str, Callable[[U8], _Read]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "mxfp4": _mxfp4,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
}
