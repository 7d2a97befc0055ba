"""Blocks of weights → float32. The most common types here, in few passes over memory; the others by `gguf`.

`gguf`'s own functions are the oracle: the tests compare bit for bit. They took 1.4 s for the 106 million Q4_1 weights
of SmolLM2-135M (one core, Neoverse N1), these take 0.5 s; that is most of the time to load a model on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .weight_formats import WEIGHT_FORMATS

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def unpack(rows: U8, kind: str) -> F32:
    """Rows as a file stores them, uint8 [N, bytes], in float32 [N, K]. A new array."""
    form = WEIGHT_FORMATS[kind]
    if kind == "bf16":  # the first half of an f32
        return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if form.dtype is not None:
        return rows.view(form.dtype).astype(np.float32)
    if kind not in _OWN:
        from gguf import GGMLQuantizationType, quants

        values: F32 = quants.dequantize(rows, GGMLQuantizationType(form.gguf_type))
        return values
    blocks = rows.reshape(len(rows), -1, form.block_bytes)
    out = np.empty((*blocks.shape[:2], form.block_weights), np.float32)
    _OWN[kind](blocks, out)
    return out.reshape(len(rows), -1)


def _halves(blocks: U8, at: int) -> Any:
    """The f16 at this byte of each block, [N, blocks, 1]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16).astype(np.float32)


def _q8_0(blocks: U8, out: F32) -> None:
    np.multiply(blocks[:, :, 2:].view(np.int8), _halves(blocks, 0), out=out)


def _q4_0(blocks: U8, out: F32) -> None:
    scale, q = _halves(blocks, 0), blocks[:, :, 2:]
    np.multiply((q & 15).view(np.int8) - np.int8(8), scale, out=out[:, :, :16])
    np.multiply((q >> 4).view(np.int8) - np.int8(8), scale, out=out[:, :, 16:])


def _q4_1(blocks: U8, out: F32) -> None:
    scale, q = _halves(blocks, 0), blocks[:, :, 4:]
    np.multiply(q & 15, scale, out=out[:, :, :16])
    np.multiply(q >> 4, scale, out=out[:, :, 16:])
    out += _halves(blocks, 2)


def two_bits(quants: U8) -> U8:
    """64 bytes of 256 numbers as [N, blocks, 256]: bits 2i of byte l in a half are number 32i + l of 128."""
    halves = quants.reshape(*quants.shape[:2], 2, 1, 32)
    return (halves >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(*quants.shape[:2], 256)


def high_bits(bits: U8) -> U8:
    """32 bytes of 256 bits as [N, blocks, 256]: bit i of byte l is that of number 32i + l."""
    return (bits[:, :, None] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)).reshape(*bits.shape[:2], 256)


def q3_k_scales(blocks: U8) -> U8:
    """The 16 scales of blocks of q3_k, from 0 to 63: 8 bytes of low nibbles, 4 of the two bits above."""
    nibbles, above = blocks[:, :, 96:104], blocks[:, :, 104:108]
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    high = np.concatenate([above >> np.uint8(i) & 3 for i in (0, 2, 4, 6)], axis=2)
    scales: U8 = low | high << np.uint8(4)
    return scales


def _q3_k(blocks: U8, out: F32) -> None:
    """32 bytes of high bits, 64 of low bits, 12 of scales, d (f16)."""
    q = two_bits(blocks[:, :, 32:96]) | high_bits(blocks[:, :, :32]) << np.uint8(2)
    scale = _halves(blocks, 108) * (q3_k_scales(blocks).astype(np.float32) - np.float32(32))
    sixteens = (*blocks.shape[:2], 16, 16)
    numbers = q.reshape(sixteens).view(np.int8) - np.int8(4)
    np.multiply(numbers, scale[..., None], out=out.reshape(sixteens))


def _q2_k(blocks: U8, out: F32) -> None:
    """16 bytes of scales and minima, 64 of two bits, d and dmin (f16)."""
    nibbles = blocks[:, :, :16]
    scale, minimum = _halves(blocks, 80) * (nibbles & 15), _halves(blocks, 82) * (nibbles >> 4)
    sixteens = out.reshape(*blocks.shape[:2], 16, 16)
    np.multiply(two_bits(blocks[:, :, 16:80]).reshape(sixteens.shape), scale[..., None], out=sixteens)
    sixteens -= minimum[..., None]


# Values of the 16 codes. Those of MXFP4 are twice what its standard says, for a scale that is half as large.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _codes(values: F32, codes: U8, scale: Any, out: F32) -> None:
    """16 bytes of codes for 32 weights: those of weights i and 16 + i in byte i. out [..., 32], scale [..., 1]."""
    np.multiply(values[codes & 15], scale, out=out[..., :16])
    np.multiply(values[codes >> 4], scale, out=out[..., 16:])


def _mxfp4(blocks: U8, out: F32) -> None:
    """The scale is 2^(e - 128), whose two smallest values are subnormal."""
    e = blocks[:, :, :1].astype(np.uint32)
    scale = np.where(e < 2, np.uint32(1 << 21) << e, (np.maximum(e, 1) - 1) << np.uint32(23)).view(np.float32)
    with np.errstate(over="ignore"):  # the largest scales make infinities
        _codes(MXFP4_VALUES, blocks[:, :, 1:], scale, out)


def _iq4_nl(blocks: U8, out: F32) -> None:
    _codes(IQ4_VALUES, blocks[:, :, 2:], _halves(blocks, 0), out)


def _iq4_xs(blocks: U8, out: F32) -> None:
    """d (f16), 8 times two high bits and 8 times four low bits of scales from 0 to 63, of which 32 is taken off."""
    high = np.ascontiguousarray(blocks[:, :, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = np.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], axis=3).reshape(high.shape)
    scale = _halves(blocks, 0) * ((low | high << np.uint16(4)).astype(np.float32) - np.float32(32))
    shaped = (*blocks.shape[:2], 8)
    _codes(IQ4_VALUES, blocks[:, :, 8:].reshape(*shaped, 16), scale[..., None], out.reshape(*shaped, 32))


_OWN: Mapping[str, Callable[[U8, F32], None]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q3_k": _q3_k,
    "q2_k": _q2_k,
    "mxfp4": _mxfp4,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
}
