"""Blocks of weight formats whose values were computed by hand: unpacked in NumPy and looked up on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shaderlm
from shaderlm import ops
from shaderlm.formats.unpack import unpack
from shaderlm.formats.weight_formats import WEIGHT_FORMATS
from shaderlm.gpu import Device
from shaderlm.runtime import weights

from .tiny_models import write_tiny_llama

# By format: the bytes of a block and its weights.
_ALL_CODES = bytes(i | (15 - i) << 4 for i in range(16))
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
_IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
BLOCKS: dict[str, tuple[bytes, list[float]]] = {
    # 2^(125 - 127) = 1/4.
    "mxfp4": (bytes([125]) + _ALL_CODES, [v / 4 for v in [*_E2M1, *_E2M1[::-1]]]),
    # 0.5 as f16.
    "iq4_nl": (bytes.fromhex("0038") + _ALL_CODES, [v / 2 for v in [*_IQ4, *_IQ4[::-1]]]),
    # 0.5, then 2 high bits and 4 low bits of 0, 31, 32, 33, 63, 34, 29 and 48, each less 32.
    "iq4_xs": (
        bytes.fromhex("0038 a4db f0102f0d") + 8 * _ALL_CODES,
        [s * v / 2 for s in (-32, -1, 0, 1, 31, 2, -3, 16) for v in [*_IQ4, *_IQ4[::-1]]],
    ),
    # Numbers 32i + n of each half are i for even n, 3 - i for odd n; 4 is taken off where i is even. Scales have
    # the nibbles 0 to 15 and above them 0, 1, 2, 3, four times each; 0.5 as f16.
    "q3_k": (
        bytes([0xAA] * 32) + bytes([0xE4, 0x1B] * 32) + bytes.fromhex("8091a2b3c4d5e6f7 e4e4e4e4 0038"),
        [
            0.5 * (g + 16 * (g // 4) - 32) * ((i if at % 2 == 0 else 3 - i) - (4 if i % 2 == 0 else 0))
            for g in range(16)
            for i in (g // 2 % 4,)
            for at in range(16)
        ],
    ),
    # The same two bits. Scales 0 to 15, minima 15 to 0; 0.5 and 0.25 as f16.
    "q2_k": (
        bytes(g | (15 - g) << 4 for g in range(16)) + bytes([0xE4, 0x1B] * 32) + bytes.fromhex("0038 0034"),
        [
            0.5 * g * (i if at % 2 == 0 else 3 - i) - 0.25 * (15 - g)
            for g in range(16)
            for i in (g // 2 % 4,)
            for at in range(16)
        ],
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_by_hand(kind: str, device: Device) -> None:
    data, values = BLOCKS[kind]
    form = WEIGHT_FORMATS[kind]
    assert (len(data), len(values)) == (form.block_bytes, form.block_weights)
    rows = np.frombuffer(data * 2, np.uint8).reshape(2, -1)
    np.testing.assert_array_equal(unpack(rows, kind), np.array([values, values], np.float32))
    np.testing.assert_array_equal(
        ops.embedding(np.array([1]), rows, format=kind, device=device), np.array([values], np.float32)
    )


def test_mxfp4_has_every_exponent() -> None:
    """Code 1 is 0.5: 2^(e - 128), from the smallest exponent to the largest."""
    rows = np.full((256, 17), 0x11, np.uint8)
    rows[:, 0] = np.arange(256)
    expected = np.float64(2) ** (np.arange(256) - 128)
    np.testing.assert_array_equal(unpack(rows, "mxfp4")[:, 5].astype(np.float64), expected)


def test_odd_rows_of_scales_go_to_the_device_in_pieces(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 96 weights in mxfp4 has three bytes of scales: pieces start at multiples of four bytes all the same."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind="mxfp4", layers=1)
    with shaderlm.load(path, device="cpu") as model:
        expected = model.logits([1, 2, 3])
    monkeypatch.setattr(weights, "PIECE_BYTES", 1)
    with shaderlm.load(path, device=device) as model:
        np.testing.assert_allclose(model.logits([1, 2, 3]), expected, atol=1e-2)
