"""The random numbers of sampling: of a seed and a position alone, the same on the host and on every device."""

from __future__ import annotations

import numpy as np
import pytest

from shaderlm.gpu import Device
from shaderlm.graph.sampling import uniform, uniforms

from .sampled import records, sampled

RECORDED = [0.65519779920578, 0.488972008228302, 0.45105844736099243]  # seed 3, positions 0, 1 and 2


def test_the_kernel_has_the_same_random_numbers(device: Device) -> None:
    """Of 4,096 equal logits the token is the first 12 bits of u."""
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0xDEADBEEF12345678, 77], np.uint64)
    positions = np.array([0, 1, 2**17, 3, 2**32 - 1, 4095], np.uint32)
    outputs = records([(1.0, 0, 1.0, 0.0)] * 6, seeds)
    tokens = sampled(device, np.zeros((6, 4096), np.float32), outputs, positions)
    assert tokens.tolist() == np.floor(4096 * uniforms(seeds, positions)).tolist()


def test_random_numbers() -> None:
    assert [uniform(3, position) for position in range(3)] == RECORDED, "a seed gives one text in every release"
    assert uniform(-3, 0) == uniform(2**64 - 3, 0)
    u = uniforms(np.arange(1 << 16), 5)
    assert ((u > 0) & (u < 1)).all()
    assert (u.astype(np.float32) == u).all()
    assert (u * 2**24 % 2 == 1).all(), "odd multiples of 2^−24"


@pytest.mark.parametrize("which", ["seeds", "high words of seeds", "positions"])
def test_random_numbers_are_uniform_and_independent(which: str) -> None:
    count = 1 << 16
    steps = np.arange(count, dtype=np.uint64)
    seeds, positions = {
        "seeds": (steps, 9),
        "high words of seeds": (steps << np.uint64(32), 9),
        "positions": (12345, steps),
    }[which]
    u = uniforms(seeds, positions)
    assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / count)
    expected = count / 256
    for bits in (u * 256, u * 65536 % 256):  # the highest eight bits, and the next
        chi_squared = ((np.bincount(bits.astype(int), minlength=256) - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 255) < 5 * np.sqrt(2 * 255)
    for lag in (1, 2, 3, 128):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / np.sqrt(count)
