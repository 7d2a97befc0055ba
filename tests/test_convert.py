"""How tensors of a file lie on a device: matrices as they are stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shaderlm.formats.convert import device_format, rows_for_device
from shaderlm.formats.gguf import GgufFile

from .gguf_files import KINDS, one_of_each, write_gguf


def test_formats_stay_as_they_are(tmp_path: Path) -> None:
    with GgufFile.open(one_of_each(tmp_path / "all.gguf")) as file:
        found = {kind: device_format(file, kind) for kind in KINDS}
        assert device_format(file, "norm") == "f32"
    assert found == {kind: kind for kind in KINDS}


def test_every_bf16_is_itself(tmp_path: Path) -> None:
    """All of them that are numbers, in the file, on a device and in f32."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80].reshape(2, -1)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    with GgufFile.open(write_gguf(tmp_path / "weights.gguf", {"w": ("bf16", values)})) as file:
        np.testing.assert_array_equal(file.dense("w"), values)
        rows = rows_for_device(file, "w", "bf16", 0, 2)
        np.testing.assert_array_equal(rows_for_device(file, "w", "f32", 1, 2), values[1:])
    assert rows.dtype == np.uint16
    np.testing.assert_array_equal(rows, bits)
