"""Weights in every format, and what they stand for: GGUF's own Python package is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from shaderlm.formats import blocks
from shaderlm.formats.weight_formats import WEIGHT_FORMATS

Array = NDArray[Any]


def whole_k(k: int, kind: str) -> int:
    """K rounded up to what the format wants."""
    multiple = WEIGHT_FORMATS[kind].block_weights
    return -(-k // multiple) * multiple


def make_weight(rng: np.random.Generator, kind: str, n: int, k: int) -> tuple[Array, Array]:
    """A weight [n, k] in a format, and its values: of the order of 1/sqrt(k)."""
    if kind in _FACTORS:  # what the oracle cannot quantise is made of random bits
        raw = _random_blocks(rng, kind, n, k)
    else:
        dense = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
        if kind == "bf16":
            bits = (dense.view(np.uint32) >> 16).astype(np.uint16)
            return bits, (bits.astype(np.uint32) << 16).view(np.float32)
        if kind in ("f32", "f16"):
            dense = dense.astype(np.float16 if kind == "f16" else np.float32)
            return dense, dense
        raw = quantize(dense, GGMLQuantizationType[kind.upper()])
    return raw, dequantize(raw, GGMLQuantizationType[kind.upper()])


# Where the f16 factors of a block lie in the formats that the oracle cannot quantise.
_FACTORS = {
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "q3_k": (108,),
    "q2_k": (80, 82),
}


def _random_blocks(rng: np.random.Generator, kind: str, n: int, k: int) -> Array:
    """Random quants and scales under f16 factors that keep the weights small; not so small as to be subnormal."""
    weights, nbytes = WEIGHT_FORMATS[kind].block_weights, WEIGHT_FORMATS[kind].block_bytes
    raw = rng.integers(0, 256, (n, k // weights, nbytes), np.uint8)
    unit = max(1 / (256 * np.sqrt(k)), 2.0**-13)
    factors = rng.uniform(0.5 * unit, unit, (n, k // weights, 2)) * [1, 8]
    halves = factors.astype(np.float16).view(np.uint8)  # d in two bytes, dmin in two more
    if kind == "q6_k":
        raw[:, :, 192:208] = rng.integers(-32, 32, (n, k // weights, 16), np.int8).view(np.uint8)
    if kind == "iq4_xs":  # scales of at most 8, which count from 32
        s = rng.integers(24, 40, (n, k // weights, 8), np.uint8)
        high = ((s >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=2, dtype=np.uint16)
        raw[:, :, 2:4] = high[..., None].view(np.uint8)
        raw[:, :, 4:8] = s[:, :, ::2] & 15 | s[:, :, 1::2] << 4
    for i, at in enumerate(_FACTORS[kind]):
        raw[:, :, at : at + 2] = halves[:, :, 2 * i : 2 * i + 2]
    return raw.reshape(n, -1)


def unpack_q4gsw(weight: NDArray[np.uint8], scales: NDArray[Any], group_size: int, k: int) -> NDArray[np.float64]:
    """Packed q4gsw as weights [N, k] in float64."""
    q = blocks.nibbles_q4gsw(weight)[:, :k]
    per_k = np.repeat(np.asarray(scales, np.float64), min(group_size, k), axis=0)[:k]
    return q * per_k.T


def split_blocks(packed: NDArray[np.uint8], name: str) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Scales f16 [N, K/32] and quants uint8 [N, K/32, bytes] of q8_0 or q4_0 blocks."""
    shaped = packed.reshape(packed.shape[0], -1, WEIGHT_FORMATS[name].block_bytes)
    scales = np.ascontiguousarray(shaped[:, :, :2]).view(np.float16)[:, :, 0]
    return scales, np.ascontiguousarray(shaped[:, :, 2:])
