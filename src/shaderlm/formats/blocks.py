"""Block formats of weights in NumPy: pack and unpack, slowly and obviously.

`q4gsw` is 4-bit groupwise symmetric (nibble = q + 8, even k in the low nibble); `q8_0` and `q4_0` are
GGUF's blocks of 32 with an f16 scale in front.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
BLOCK = 32


def _matrix(weights: Any, name: str) -> F32:
    w: NDArray[Any] = np.asarray(weights)
    if w.ndim != 2 or w.size == 0 or w.dtype not in (np.float32, np.float64, np.float16):
        raise InputError(f"{name}: expected a non-empty float array [N, K], got {w.dtype} {list(w.shape)}")
    with np.errstate(over="ignore"):
        single = w.astype(np.float32)
    if not np.isfinite(single).all():
        raise InputError(f"{name}: expected weights that are finite in float32, got NaN, infinity or larger numbers")
    return single


def pack_q4gsw(w: Any, group_size: int) -> tuple[U8, F32]:
    """Quantise float weights [N, K] to 4 bits: (weight uint8 [N, K'/2], scales float32 [ceil(K/group), N]).

    K' is K rounded up to a multiple of 8; the padding is q = 0. The scale of a group maps its largest
    magnitude to 7.
    """
    w = _matrix(w, "pack_q4gsw")
    if isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer)) or group_size < 1:
        raise InputError(f"pack_q4gsw: group_size must be a whole number of at least 1, got {group_size!r}")
    n, k = w.shape
    group_size = min(int(group_size), k)
    groups = -(-k // group_size)
    padded = np.zeros((n, groups * group_size), np.float32)
    padded[:, :k] = w
    grouped = padded.reshape(n, groups, group_size)
    scales = (np.abs(grouped).max(axis=2) / 7.0).astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)
    q = np.clip(np.rint(grouped / safe[:, :, None]), -8, 7).reshape(n, -1)[:, :k]
    k8 = -(-k // 8) * 8
    nibbles = np.full((n, k8), 8, np.uint8)
    nibbles[:, :k] = (q + 8).astype(np.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), np.ascontiguousarray(scales.T)


def nibbles_q4gsw(weight: U8) -> NDArray[np.int8]:
    """The integers q in −8…7 of packed q4gsw weights, [N, 2 · bytes]."""
    q = np.empty((weight.shape[0], 2 * weight.shape[1]), np.int8)
    q[:, 0::2] = (weight & 15).astype(np.int8) - 8
    q[:, 1::2] = (weight >> 4).astype(np.int8) - 8
    return q


def pack_q8_0(w: Any) -> U8:
    """Quantise float weights [N, K] to GGUF q8_0 blocks, uint8 [N, K/32 · 34]."""
    blocks = _blocks(_matrix(w, "pack_q8_0"), "q8_0")
    scales = _half_scales(np.abs(blocks).max(axis=2) / 127.0, "pack_q8_0")
    q = np.rint(blocks / _nonzero(scales)[:, :, None]).clip(-127, 127).astype(np.int8)
    return _join(scales, q.view(np.uint8))


def pack_q4_0(w: Any) -> U8:
    """Quantise float weights [N, K] to GGUF q4_0 blocks, uint8 [N, K/32 · 18]."""
    blocks = _blocks(_matrix(w, "pack_q4_0"), "q4_0")
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    scales = _half_scales(largest / -8.0, "pack_q4_0")
    q = (np.rint(blocks / _nonzero(scales)[:, :, None]) + 8).clip(0, 15).astype(np.uint8)
    return _join(scales, q[:, :, :16] | (q[:, :, 16:] << 4))


def _blocks(w: F32, name: str) -> NDArray[np.float32]:
    if w.shape[1] % BLOCK:
        raise InputError(f"{name}: K must be a multiple of {BLOCK}, got {w.shape[1]}")
    return w.reshape(w.shape[0], -1, BLOCK)


def _half_scales(scales: F32, name: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
    if not np.isfinite(half).all():
        raise InputError(f"{name}: scales must fit f16 (65,504), the largest here is {float(np.abs(scales).max()):g}")
    return half


def _nonzero(scales: NDArray[np.float16]) -> F32:
    return np.where(scales == 0, np.float32(1), scales.astype(np.float32))


def _join(scales: NDArray[np.float16], body: U8) -> U8:
    n, count = scales.shape
    head = np.ascontiguousarray(scales)[:, :, None].view(np.uint8)
    return np.concatenate([head, body], axis=2).reshape(n, count * (2 + body.shape[2]))
