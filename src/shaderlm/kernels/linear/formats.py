"""The weight formats of linear and embedding: how each lies on the GPU, and how GGUF's rows are brought there.

A format is an entry here and the WGSL file that it names; its name and the K it wants are in `graph.ops.FORMATS`, the
size of its blocks in `formats.blocks.BLOCKS`. Knows no shapes of ops and no devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats.blocks import BLOCK, BLOCKS
from ..route import Array
from ..wgsl import Constant

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """`block_bytes` of words per 32 weights, and `group_bytes` of scales per `group` weights (0: no scales).

    `repack` takes rows as a file stores them, uint8 [N, bytes] or dense [N, K], to (words, scales), each [N, …].
    `integer_rows` is how many rows a team of the GEMV takes in fixed-point arithmetic; 0 where there is none.
    `int16` is the file that multiplies a block with inputs of 16 bits; empty where there is none.
    """

    file: str
    block_bytes: int
    group: int
    group_bytes: int
    repack: Callable[[Array], tuple[Array, Array]]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    integer_rows: int = 0
    int16: str = ""


def _dense(rows: Array) -> tuple[Array, Array]:
    """Columns padded with zeros to whole blocks; nothing is copied where they are whole."""
    missing = -rows.shape[1] % BLOCK
    words = np.pad(rows, ((0, 0), (0, missing))) if missing else rows
    return words, np.zeros((rows.shape[0], 0), np.uint32)


def _blocks(rows: Array, kind: str) -> U8:
    """uint8 [N, blocks, bytes of a block]."""
    return rows.reshape(rows.shape[0], -1, BLOCKS[kind].nbytes)


def _flat(array: Array) -> Array:
    """[N, …] → contiguous [N, the rest]."""
    return np.ascontiguousarray(array).reshape(array.shape[0], -1)


def _head_and_body(kind: str, head: int, dtype: Any) -> Callable[[Array], tuple[Array, Array]]:
    """Blocks of which the first bytes are scales and the others words, in the order the kernels want."""

    def repack(rows: Array) -> tuple[Array, Array]:
        blocks = _blocks(rows, kind)
        return _flat(blocks[:, :, head:]), _flat(blocks[:, :, :head]).view(dtype)

    return repack


def _nibbles(low: U8, high: U8) -> U8:
    """Byte j: weight j in its low nibble, weight 16 + j in its high one."""
    return low | (high << np.uint8(4))


def _repack_q4_k(rows: Array) -> tuple[Array, Array]:
    """d, dmin (f16), 12 bytes of 6-bit scales and minima, 128 bytes of nibbles.

    Words: 16 bytes per 32 weights. Scales: (d, dmin), then (scale, minimum) in bytes for each 32 weights.
    """
    blocks = _blocks(rows, "q4_k")
    return _k_words(blocks[:, :, 16:]), _k_scales(blocks).reshape(len(rows), -1).view(np.uint32)


def _repack_q5_k(rows: Array) -> tuple[Array, Array]:
    """As q4_k, with 32 bytes before the nibbles: bit i of byte l is the fifth bit of weight 32i + l.

    Scales: as q4_k's, then the fifth bits of each 32 weights, that of weight l in bit l.
    """
    blocks = _blocks(rows, "q5_k")
    bits = np.unpackbits(blocks[:, :, 16:48, None], axis=3, bitorder="little")  # [.., byte l, bit i]
    fifth = np.packbits(bits.transpose(0, 1, 3, 2), axis=3, bitorder="little").reshape(*blocks.shape[:2], 32)
    scales = np.concatenate([_k_scales(blocks), fifth], axis=2)
    return _k_words(blocks[:, :, 48:]), scales.reshape(len(rows), -1).view(np.uint32)


def _repack_q5_0(rows: Array) -> tuple[Array, Array]:
    """d (f16), 32 fifth bits, 16 bytes of nibbles. Scales: d and 0, then the fifth bits."""
    blocks = _blocks(rows, "q5_0")
    scales = np.zeros((*blocks.shape[:2], 8), np.uint8)
    scales[:, :, :2], scales[:, :, 4:] = blocks[:, :, :2], blocks[:, :, 2:6]
    return _flat(blocks[:, :, 6:]), scales.reshape(len(rows), -1).view(np.uint32)


def _k_words(nibbles: U8) -> Array:
    """128 bytes, 32 of weights l and 32 + l, four times, as 16 bytes per 32 weights."""
    n, count = nibbles.shape[:2]
    quants = nibbles.reshape(n, count, 4, 2, 16)  # [.., chunk, half, byte]
    words = np.empty((n, count, 4, 2, 16), np.uint8)
    words[:, :, :, 0] = _nibbles(quants[:, :, :, 0] & np.uint8(15), quants[:, :, :, 1])
    words[:, :, :, 1] = (quants[:, :, :, 0] >> 4) | (quants[:, :, :, 1] & 0xF0)
    return words.reshape(n, -1)


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


def _repack_q6_k(rows: Array) -> tuple[Array, Array]:
    """Twice 64 bytes of low nibbles, twice 32 bytes of high bits, 16 signed scales, d (f16).

    In each half of 128 weights, byte l has the low bits of weights l and 64 + l, and the high bits of l, 32 + l,
    64 + l and 96 + l. Words, per 64 weights: the nibbles of 32, of the other 32, and their high bits: 8 bytes each,
    byte 4h + j has those of weights 16h + j, 4 more, 8 more and 12 more. Scales: the 16 bytes, then d.
    """
    blocks = _blocks(rows, "q6_k")
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
    return words.reshape(n, -1), scales.reshape(n, -1).view(np.uint32)


FORMATS: Mapping[str, Format] = {
    "f32": Format("shared/format_f32", 128, 0, 0, _dense),
    "f16": Format("shared/format_f16", 64, 0, 0, _dense),
    "q8_0": Format("shared/format_q8_0", 32, 32, 2, _head_and_body("q8_0", 2, np.float16), {}, 2, "shared/int16_q8_0"),
    "q4_0": Format("shared/format_q4", 16, 32, 2, _head_and_body("q4_0", 2, np.float16), {}, 4, "shared/int16_q4"),
    "q4_1": Format(
        "shared/format_q4_min",
        16,
        32,
        4,
        _head_and_body("q4_1", 4, np.uint32),
        {"SUPERBLOCKS": False},
        int16="shared/int16_q4_min",
    ),
    "q5_0": Format("shared/format_q5", 16, 32, 8, _repack_q5_0, {"SUPERBLOCKS": False, "OFFSET": 1.5}),
    "q5_1": Format(
        "shared/format_q5", 16, 32, 8, _head_and_body("q5_1", 8, np.uint32), {"SUPERBLOCKS": False, "OFFSET": 1.0}
    ),
    "q4_k": Format(
        "shared/format_q4_min", 16, 256, 20, _repack_q4_k, {"SUPERBLOCKS": True}, int16="shared/int16_q4_min"
    ),
    "q5_k": Format("shared/format_q5", 16, 256, 52, _repack_q5_k, {"SUPERBLOCKS": True, "OFFSET": 1.0}),
    "q6_k": Format("shared/format_q6_k", 24, 256, 20, _repack_q6_k, int16="shared/int16_q6_k"),
}
