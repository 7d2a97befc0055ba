"""Compares results with the float64 reference. Tolerances live here, each with its reason."""

from __future__ import annotations

from typing import Any

import numpy as np

# An element passes if its absolute OR its relative error is within bounds.
TOLERANCES: dict[str, tuple[float, float]] = {
    "exact": (0.0, 0.0),  # copies, look-ups, integers
    "norm": (1e-3, 1e-3),  # rows span many magnitudes: the relative bound is the one that binds
    "linear": (1e-4, 1e-3),  # f32 sums of up to 4096 products
    "linear deep": (1e-3, 1e-2),  # f32 sums of 8192 products and more
    "linear f16, formats": (5e-4, 1e-3),  # both operands rounded to f16, f32 sums; of up to 7 million results
    "experts f16, after a norm": (2e-3, 1e-3),  # inputs and results of the order of 1; gates multiply their errors
    "scan": (1e-4, 1e-4),  # f32 sums over the rows of a sequence, then over those of a state
    "attention": (1e-4, 1e-3),
    "attention f16": (2e-3, 1e-2),  # the cache holds f16; the reference does too, but sums differ
    "attention f16, one key": (8e-3, 1e-2),  # a few keys have all the weight: an error of a score is one of the result
    "model": (2e-2, 1e-3),  # logits of a whole model, whose inputs may be rounded to 16 bits and whose cache may be f16
    "pointwise": (1e-5, 1e-5),  # one or two f32 roundings, exp among them
}


def assert_close(actual: Any, expected: Any, tolerance: str, label: str) -> None:
    """Fail with the worst element, its index and both values. NaN never passes."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{label}: shape {actual.shape}, expected {expected.shape}"
    absolute, relative = TOLERANCES[tolerance]
    with np.errstate(invalid="ignore"):
        error = np.where(actual == expected, 0.0, np.abs(actual.astype(np.float64) - expected))
    size = np.where(np.isinf(expected), 0.0, np.abs(expected))  # −inf is −inf, and nothing else is near it
    within = (error <= absolute) | (error <= relative * size)
    if not within.all():
        excess = np.where(np.isnan(error), np.inf, np.where(within, -1.0, error))
        worst = np.unravel_index(int(excess.argmax()), excess.shape)
        where = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{label}: {int((~within).sum())} of {within.size} elements off by more than {absolute:g} abs / "
            f"{relative:g} rel; worst at {where}: {actual[worst]!r}, expected {expected[worst]!r}"
        )
