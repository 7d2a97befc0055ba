"""How each weight format lies on the GPU, and how rows of a file are brought there.

One row per format that devices compute with, keyed by the names of `formats.weight_formats`, and the WGSL file that
it names. Knows no shapes of ops and no devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats.blocks import BLOCK
from ...formats.unpack import high_bits, q3_k_scales, two_bits
from ...formats.weight_formats import WEIGHT_FORMATS
from ..route import Array
from ..wgsl import Constant

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class KernelFormat:
    """`block_bytes` of words per 32 weights, and `group_bytes` of scales per `group` weights (0: no scales).

    `layout` says the same for a reader of plans, in values that JSON has:
      dense  rows of `dtype`, with zero columns up to a multiple of `pad_columns`; no scales
      split  of every `block_bytes` bytes of a row, the bytes [first, end) `words` and `scales`, each gathered
      named  as `REPACK[name]` here does it, from blocks of `block_bytes` to `words_bytes` and `scales_bytes`
    `integer_rows` is how many rows the lanes of the GEMV share in fixed-point arithmetic; 0 where there is none.
    `int16` is the file that multiplies a block with inputs of 16 bits; empty where there is none.
    """

    file: str
    layout: Mapping[str, Any]
    block_bytes: int
    group: int
    group_bytes: int
    constants: Mapping[str, Constant] = field(default_factory=dict)
    integer_rows: int = 0
    int16: str = ""

    def repack(self, rows: Array) -> tuple[Array, Array]:
        """Rows as a file stores them, uint8 [N, bytes] or dense [N, K], as (words, scales), each [N, …]."""
        return repack(self.layout, rows)


def _dense(name: str, file: str, **more: Any) -> KernelFormat:
    layout = {"kind": "dense", "dtype": name, "pad_columns": BLOCK}
    return KernelFormat(file, layout, BLOCK * WEIGHT_FORMATS[name].block_bytes, 0, 0, **more)


def _split(name: str, file: str, scales: int, **more: Any) -> KernelFormat:
    """Blocks of which the first bytes are scales and the others words, in the order that the kernels want."""
    form = WEIGHT_FORMATS[name]
    total = form.block_bytes
    layout = {"kind": "split", "block_bytes": total, "scales": [0, scales], "words": [scales, total]}
    return KernelFormat(
        file, layout, (total - scales) * BLOCK // form.block_weights, form.block_weights, scales, **more
    )


def _named(name: str, file: str, words: int, scales: int, **more: Any) -> KernelFormat:
    """Blocks whose bits are put in another order, by a function."""
    form = WEIGHT_FORMATS[name]
    sizes = {"block_bytes": form.block_bytes, "words_bytes": words, "scales_bytes": scales}
    layout = {"kind": "named", "name": name, **sizes}
    return KernelFormat(file, layout, words * BLOCK // form.block_weights, form.block_weights, scales, **more)


def repack(layout: Mapping[str, Any], rows: Array) -> tuple[Array, Array]:
    """Rows of a weight in a layout: (words, scales), each [N, …]."""
    if layout["kind"] == "dense":
        missing = -rows.shape[1] % layout["pad_columns"]
        words = np.pad(rows, ((0, 0), (0, missing))) if missing else rows  # nothing is copied where blocks are whole
        return words, np.zeros((rows.shape[0], 0), np.uint8)
    blocks = rows.reshape(rows.shape[0], -1, layout["block_bytes"])
    if layout["kind"] == "split":
        words, scales = (blocks[:, :, slice(*layout[key])] for key in ("words", "scales"))
    else:
        words, scales = REPACK[layout["name"]](blocks)
    return _flat(words), _flat(scales)


def _flat(array: Array) -> Array:
    """[N, …] → contiguous [N, the rest]."""
    return np.ascontiguousarray(array).reshape(array.shape[0], -1)


def _nibbles(low: U8, high: U8) -> U8:
    """Byte j: weight j in its low nibble, weight 16 + j in its high one."""
    return low | (high << np.uint8(4))


def _repack_q4_k(blocks: U8) -> tuple[U8, U8]:
    """d, dmin (f16), 12 bytes of 6-bit scales and minima, 128 bytes of nibbles.

    Words: 16 bytes per 32 weights. Scales: (d, dmin), then (scale, minimum) in bytes for each 32 weights.
    """
    return _k_words(blocks[:, :, 16:]), _k_scales(blocks)


def _repack_q5_k(blocks: U8) -> tuple[U8, U8]:
    """As q4_k, with 32 bytes before the nibbles: bit i of byte l is the fifth bit of weight 32i + l.

    Scales: as q4_k's, then the fifth bits of each 32 weights, that of weight l in bit l.
    """
    bits = np.unpackbits(blocks[:, :, 16:48, None], axis=3, bitorder="little")  # [.., byte l, bit i]
    fifth = np.packbits(bits.transpose(0, 1, 3, 2), axis=3, bitorder="little").reshape(*blocks.shape[:2], 32)
    return _k_words(blocks[:, :, 48:]), np.concatenate([_k_scales(blocks), fifth], axis=2)


def _repack_q5_0(blocks: U8) -> tuple[U8, U8]:
    """d (f16), 32 fifth bits, 16 bytes of nibbles. Scales: d and 0, then the fifth bits."""
    scales = np.zeros((*blocks.shape[:2], 8), np.uint8)
    scales[:, :, :2], scales[:, :, 4:] = blocks[:, :, :2], blocks[:, :, 2:6]
    return blocks[:, :, 6:], scales


def _k_words(nibbles: U8) -> U8:
    """128 bytes, 32 of weights l and 32 + l, four times, as 16 bytes per 32 weights."""
    n, count = nibbles.shape[:2]
    quants = nibbles.reshape(n, count, 4, 2, 16)  # [.., chunk, half, byte]
    words = np.empty((n, count, 4, 2, 16), np.uint8)
    words[:, :, :, 0] = _nibbles(quants[:, :, :, 0] & np.uint8(15), quants[:, :, :, 1])
    words[:, :, :, 1] = (quants[:, :, :, 0] >> 4) | (quants[:, :, :, 1] & 0xF0)
    return words


def _k_scales(blocks: U8) -> U8:
    """d and dmin, then a byte of scale and a byte of minimum for each 32 weights."""
    scales = np.empty((*blocks.shape[:2], 20), np.uint8)
    scales[:, :, :4] = blocks[:, :, :4]
    a, b, c = (blocks[:, :, i : i + 4] for i in (4, 8, 12))
    scales[:, :, 4:12:2] = a & 63
    scales[:, :, 5:12:2] = b & 63
    scales[:, :, 12::2] = (c & 15) | (a >> 2 & 48)
    scales[:, :, 13::2] = (c >> 4) | (b >> 2 & 48)
    return scales


def _repack_q6_k(blocks: U8) -> tuple[U8, U8]:
    """Twice 64 bytes of low nibbles, twice 32 bytes of high bits, 16 signed scales, d (f16).

    In each half of 128 weights, byte l has the low bits of weights l and 64 + l, and the high bits of l, 32 + l,
    64 + l and 96 + l. Words, per 64 weights: the nibbles of 32, of the other 32, and their high bits: 8 bytes each,
    byte 4h + j has those of weights 16h + j, 4 more, 8 more and 12 more. Scales: the 16 bytes, then d.
    """
    n, count = blocks.shape[:2]
    low = blocks[:, :, :128].reshape(n, count, 2, 2, 2, 16)  # [.., half, 32 of 64, 16 of 32, byte]
    words = np.empty((n, count, 2, 2, 3, 16), np.uint8)  # [.., half, 64 of 128, word, byte]
    words[:, :, :, 0, :2] = _nibbles(low[..., 0, :] & np.uint8(15), low[..., 1, :])
    words[:, :, :, 1, :2] = (low[..., 0, :] >> 4) | (low[..., 1, :] & 0xF0)
    high = blocks[:, :, 128:192].reshape(n, count, 2, 2, 4, 4)  # [.., half, 16 of 32, quad, byte]
    for i in range(4):  # 32 of the 128
        bits = high >> np.uint8(2 * i) & np.uint8(3)
        packed = bits[..., 0, :] | bits[..., 1, :] << 2 | bits[..., 2, :] << 4 | bits[..., 3, :] << 6
        words[:, :, :, i // 2, 2, 8 * (i % 2) : 8 * (i % 2) + 8] = packed.reshape(n, count, 2, 8)
    scales = np.zeros((n, count, 20), np.uint8)
    scales[:, :, :18] = blocks[:, :, 192:]
    return words, scales


def _two_bit_words(quants: U8) -> U8:
    """64 bytes as 8 per 32 weights: byte 4h + j has weights 16h + j, 4 more, 8 more and 12 more."""
    q = two_bits(quants).reshape(*quants.shape[:2], 8, 2, 4, 4)  # [.., 32 of 256, 16 of 32, quad, byte]
    packed: U8 = np.bitwise_or.reduce(q << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=-2)
    return packed.reshape(*quants.shape[:2], 64)


def _repack_q3_k(blocks: U8) -> tuple[U8, U8]:
    """32 bytes of high bits, 64 of low bits, 12 of scales of 6 bits, d (f16).

    Words, per 128 weights: 32 bytes of low bits, then 4 bytes of high bits for each 32 weights, bit i of byte j that of
    weight 4i + j. Scales: the low nibbles of the 16 scales in order, their high bits in order, d and 0.
    """
    n, count = blocks.shape[:2]
    low = _two_bit_words(blocks[:, :, 32:96]).reshape(n, count, 2, 32)
    bits = high_bits(blocks[:, :, :32]).reshape(n, count, 8, 8, 4)  # [.., 32 of 256, quad, byte]
    high = np.packbits(bits, axis=3, bitorder="little").reshape(n, count, 2, 16)
    s = q3_k_scales(blocks)
    scales = np.zeros((n, count, 16), np.uint8)
    scales[:, :, :8] = _nibbles(s[:, :, ::2] & np.uint8(15), s[:, :, 1::2])
    top = s >> np.uint8(4)
    scales[:, :, 8:12] = top[:, :, ::4] | top[:, :, 1::4] << 2 | top[:, :, 2::4] << 4 | top[:, :, 3::4] << 6
    scales[:, :, 12:14] = blocks[:, :, 108:]
    return np.concatenate([low, high], axis=3), scales


def _repack_q2_k(blocks: U8) -> tuple[U8, U8]:
    """16 bytes of scales and minima, 64 of two bits, d and dmin (f16). Scales: the 16 bytes, then d and dmin."""
    return _two_bit_words(blocks[:, :, 16:80]), np.concatenate([blocks[:, :, :16], blocks[:, :, 80:]], axis=2)


# Blocks uint8 [N, blocks, bytes] → words and scales, each uint8 [N, …].
REPACK: Mapping[str, Callable[[U8], tuple[U8, U8]]] = {
    "q5_0": _repack_q5_0,
    "q4_k": _repack_q4_k,
    "q5_k": _repack_q5_k,
    "q6_k": _repack_q6_k,
    "q3_k": _repack_q3_k,
    "q2_k": _repack_q2_k,
}

_PLAIN, _SUPER = {"SUPERBLOCKS": False}, {"SUPERBLOCKS": True}
_Q4_MIN, _Q5, _CODES = "shared/format_q4_min", "shared/format_q5", "shared/format_codes"
_INT16_BYTES = "shared/int16_q4"  # of blocks with packed_bytes and one scale
FORMATS: Mapping[str, KernelFormat] = {
    "f32": _dense("f32", "shared/format_f32"),
    "f16": _dense("f16", "shared/format_f16", constants={"BF16": False}),
    "q8_0": _split("q8_0", "shared/format_q8_0", 2, integer_rows=2, int16="shared/int16_q8_0"),
    "q4_0": _split("q4_0", "shared/format_q4", 2, integer_rows=4, int16=_INT16_BYTES),
    "q4_1": _split("q4_1", _Q4_MIN, 4, constants=_PLAIN, int16="shared/int16_q4_min"),
    "q5_0": _named("q5_0", _Q5, 16, 8, constants={**_PLAIN, "OFFSET": 1.5}),
    "q5_1": _split("q5_1", _Q5, 8, constants={**_PLAIN, "OFFSET": 1.0}),
    "q4_k": _named("q4_k", _Q4_MIN, 128, 20, constants=_SUPER, int16="shared/int16_q4_min"),
    "q5_k": _named("q5_k", _Q5, 128, 52, constants={**_SUPER, "OFFSET": 1.0}),
    "q6_k": _named("q6_k", "shared/format_q6_k", 192, 20, int16="shared/int16_q6_k"),
    "q3_k": _named("q3_k", "shared/format_q3_k", 96, 16, int16="shared/int16_q3_k"),
    "q2_k": _named("q2_k", "shared/format_q2_k", 64, 20, int16="shared/int16_q2_k"),
    "mxfp4": _split("mxfp4", _CODES, 1, constants={**_PLAIN, "MXFP4": True}, int16=_INT16_BYTES),
    "iq4_nl": _split("iq4_nl", _CODES, 2, constants={**_PLAIN, "MXFP4": False}, int16=_INT16_BYTES),
    "iq4_xs": _split("iq4_xs", _CODES, 8, constants={**_SUPER, "MXFP4": False}, int16=_INT16_BYTES),
    "bf16": _dense("bf16", "shared/format_f16", constants={"BF16": True}),
}
