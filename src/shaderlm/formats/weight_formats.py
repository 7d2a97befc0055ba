"""The one table of weight formats: what GGUF calls them, and the size of their blocks.

Plain data. Each has one more row, with its WGSL file, in `kernels/linear/formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """A block of `block_weights` weights takes `block_bytes` bytes; in a dense format a block is one weight.

    `dtype` is NumPy's name of a dense weight, or of its bits if NumPy has no such number; None for blocks.
    """

    name: str
    gguf_type: int
    block_weights: int
    block_bytes: int
    dtype: str | None

    @property
    def dense(self) -> bool:
        """Is every weight a number by itself?"""
        return self.block_weights == 1


# A test compares numbers and sizes with the gguf package.
_TABLE = (
    WeightFormat("f32", 0, 1, 4, "float32"),
    WeightFormat("f16", 1, 1, 2, "float16"),
    WeightFormat("q8_0", 8, 32, 34, None),
    WeightFormat("q4_0", 2, 32, 18, None),
    WeightFormat("q4_1", 3, 32, 20, None),
    WeightFormat("q5_0", 6, 32, 22, None),
    WeightFormat("q5_1", 7, 32, 24, None),
    WeightFormat("q4_k", 12, 256, 144, None),
    WeightFormat("q5_k", 13, 256, 176, None),
    WeightFormat("q6_k", 14, 256, 210, None),
    WeightFormat("q3_k", 11, 256, 110, None),
    WeightFormat("q2_k", 10, 256, 84, None),
    WeightFormat("mxfp4", 39, 32, 17, None),
    WeightFormat("iq4_nl", 20, 32, 18, None),
    WeightFormat("iq4_xs", 23, 256, 136, None),
    WeightFormat("bf16", 30, 1, 2, "uint16"),
)
# Every format that a file may have, and that devices compute with: the values of an op's dimension `format`.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {form.name: form for form in _TABLE}
# Those of them whose weights lie in blocks.
BLOCK_FORMATS: Mapping[str, WeightFormat] = {name: form for name, form in WEIGHT_FORMATS.items() if not form.dense}
# Those that dense matrices can be quantised to.
QUANTIZED = ("q4_0", "q8_0")
