"""bf16 matrices on a device: f16 where that is harmless, f32 elsewhere, found without reading them whole."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.formats import convert
from shaderlm.formats.convert import device_format, rows_for_device
from shaderlm.formats.gguf import GgufFile

from .gguf_files import KINDS, one_of_each, write_gguf

F32 = NDArray[np.float32]
LARGEST = 65280.0  # of bf16 in f16


def bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cut(values: F32) -> F32:
    """Without the bits that bf16 does not have."""
    return bf16((values.view(np.uint32) >> 16).astype(np.uint16))


def weights_file(path: Path, weights: F32) -> GgufFile:
    return GgufFile.open(write_gguf(path / "weights.gguf", {"w": ("bf16", weights)}))


def test_every_bf16_that_fits_is_exact_or_close(tmp_path: Path) -> None:
    """All of them: exact from 2^-17 on, and never off by more than 2^-25, half of f16's smallest step."""
    values = bf16(np.arange(1 << 16, dtype=np.uint16))
    with np.errstate(invalid="ignore"):
        values = values[np.abs(values) <= LARGEST].reshape(2, -1)
    with weights_file(tmp_path, values) as file:
        assert device_format(file, "w") == "f16"
        rows = rows_for_device(file, "w", "f16", 0, 2)
        file_values = file.dense("w")
    assert rows.dtype == np.float16
    # The gguf package writes bf16's subnormals, all below 2^-126, as they are.
    np.testing.assert_array_equal(file_values, values)
    error = np.abs(rows.astype(np.float64) - values)
    assert error[np.abs(values) >= 2.0**-17].max() == 0
    assert error.max() == 2.0**-25
    assert (rows[np.abs(values) <= 2.0**-25] == 0).all()


def test_products_of_ordinary_weights_do_not_show_it(tmp_path: Path) -> None:
    """Weights of 0.02: the error is far below the one that summing in f32 makes."""
    rng = np.random.default_rng(0)
    weights = cut(rng.standard_normal((256, 4096), np.float32) * np.float32(0.02))
    with weights_file(tmp_path, weights) as file:
        rows = rows_for_device(file, "w", device_format(file, "w"), 0, 256)
    assert rows.dtype == np.float16
    assert (rows != weights).any(), "no weight is so small that it is rounded"
    x = rng.standard_normal(4096)
    exact = weights.astype(np.float64) @ x
    assert np.abs(rows.astype(np.float64) @ x - exact).max() < 3e-7 * exact.std()


@pytest.mark.parametrize(
    ("largest", "kind"),
    [
        (LARGEST, "f16"),
        (-LARGEST, "f16"),
        (65536.0, "f32"),
        (-65536.0, "f32"),
        (np.inf, "f32"),
        (-np.inf, "f32"),
        (np.nan, "f32"),
        (0.0, "f16"),
        (2.0**-14, "f16"),
        (2.0**-15, "f32"),  # nothing but numbers that f16 would round
        (2.0**-30, "f32"),  # nothing but numbers that f16 would lose
    ],
)
@pytest.mark.parametrize("at", [0, 63, 64, 100, 191])
def test_the_largest_number_decides_wherever_it_is(
    largest: float, kind: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_PIECE", 64)
    weights = np.zeros(192, np.float32)
    weights[at] = largest
    with weights_file(tmp_path, weights.reshape(2, 96)) as file:
        assert device_format(file, "w") == kind
        np.testing.assert_array_equal(rows_for_device(file, "w", kind, 0, 2).reshape(-1), weights)


@pytest.mark.parametrize("piece", [1, 7, 50, 1000])
def test_the_last_piece_may_be_shorter(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_PIECE", piece)
    weights = np.ones((3, 33), np.float32)
    with weights_file(tmp_path, weights) as file:
        assert device_format(file, "w") == "f16"
    weights[2, 32] = 1e9
    with weights_file(tmp_path, weights) as file:
        assert device_format(file, "w") == "f32"


def test_a_matrix_is_not_read_whole(tmp_path: Path) -> None:
    with weights_file(tmp_path, np.ones((4096, 4096), np.float32)) as file:
        tracemalloc.start()
        try:
            assert device_format(file, "w") == "f16"
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < file.tensors["w"].nbytes / 8


def test_other_formats_stay_as_they_are(tmp_path: Path) -> None:
    with GgufFile.open(one_of_each(tmp_path / "all.gguf")) as file:
        found = {kind: device_format(file, kind) for kind in KINDS}
        assert device_format(file, "norm") == "f32"
    assert found == {kind: kind for kind in KINDS} | {"bf16": "f16"}
