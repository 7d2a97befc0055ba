"""Launch configurations of products of one row, as they were measured on a card.

The tuner measures again on the device itself; these are what it begins with, and what runs with --no-tune.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...gpu.caps import DeviceCaps
from ..route import MEASURED_PROCESSORS, Dims, processors

MOST = 1 << 30
WHOLE = -1  # lanes_per_row: one for each block of a row, from 8 to 64
HALF = -2  # one for each two blocks


class Gemv(NamedTuple):
    """Threads of a workgroup, lanes that share the K of a row, and rows of such lanes."""

    threads: int
    lanes_per_row: int
    rows: int


class GemvOfRows(NamedTuple):
    """The same, and rows of x of a workgroup."""

    threads: int
    lanes_per_row: int
    rows: int
    x_rows: int


class Shape(NamedTuple):
    """From N and K on, up to N and K (both included); `in_pairs`: rows are taken in pairs, or not; None: either."""

    n: tuple[int, int]
    k: tuple[int, int]
    in_pairs: bool | None = None

    def has(self, k: int, n: int, in_pairs: bool) -> bool:
        """Is it this shape?"""
        inside = self.n[0] <= n <= self.n[1] and self.k[0] <= k <= self.k[1]
        return inside and self.in_pairs in (None, in_pairs)


class StagedRows(NamedTuple):
    """For rows of x from … to, and to at most so many where there are matrix units, which take more."""

    rows: tuple[int, int]
    beside_units: int
    shape: Shape
    config: GemvOfRows

    def has(self, tokens: int, units: bool) -> bool:
        """So many rows?"""
        least, most = self.rows
        return least <= tokens <= (min(most, self.beside_units) if units else most)


_HEAD = (32768, MOST)
_WIDE = (8192, 32767)
_NARROW = (1, 8191)

# The GEMV over inputs of 16 bits: the first row that has the shape. NVIDIA H200, 2026-11-15 to 17.
GEMV_INT16: tuple[tuple[Shape, Gemv], ...] = (
    # K 1,152, N 262,144, q8_0: 81.5 µs; 83.5 with 128 threads in 4 lanes, 85 in 8
    (Shape(_HEAD, (1025, 1535)), Gemv(256, HALF, 4)),
    (Shape(_HEAD, (1, 2047)), Gemv(128, 8, 4)),
    (Shape(_HEAD, (2048, 2048)), Gemv(256, 8, 4)),
    (Shape(_HEAD, (2049, 4095)), Gemv(192, 8, 4)),
    (Shape(_HEAD, (4096, MOST), True), Gemv(256, 8, 4)),
    (Shape(_HEAD, (4096, MOST)), Gemv(512, 16, 4)),
    (Shape(_WIDE, (1025, 1535)), Gemv(256, 32, 4)),
    (Shape((16385, 32767), (3072, MOST)), Gemv(512, 16, 4)),
    (Shape((16385, 32767), (1025, MOST)), Gemv(256, 16, 4)),
    (Shape((16385, 32767), (1, 1024)), Gemv(128, 16, 4)),
    (Shape(_WIDE, (3072, MOST)), Gemv(512, 16, 2)),
    (Shape(_WIDE, (1025, MOST)), Gemv(256, 16, 2)),
    (Shape(_WIDE, (1, 1024)), Gemv(128, 16, 2)),
    (Shape(_NARROW, (8193, MOST)), Gemv(512, WHOLE, 4)),
    (Shape((2049, 8191), (8192, 8192)), Gemv(512, WHOLE, 2)),
    (Shape((1025, 4096), (3072, 4095), False), Gemv(512, 32, 1)),
    (Shape((4097, 8191), (4096, 8191)), Gemv(512, 32, 2)),
    (Shape((2049, 4096), (4096, 8191), False), Gemv(512, 32, 1)),
    (Shape((2049, 4096), (4096, 8191), True), Gemv(512, 32, 2)),
    (Shape((1, 4096), (4096, MOST), False), Gemv(512, WHOLE, 1)),
    (Shape(_NARROW, (4096, MOST)), Gemv(512, WHOLE, 2)),
    (Shape((4097, 8191), (1025, 4095)), Gemv(256, 32, 2)),
    (Shape((1, 1024), (1024, 4095), False), Gemv(256, WHOLE, 1)),
    (Shape(_NARROW, (1024, 4095)), Gemv(256, WHOLE, 2)),
    (Shape((1, 1024), (1, 1023), False), Gemv(128, WHOLE, 1)),
    (Shape(_NARROW, (1, 1023)), Gemv(128, WHOLE, 2)),
)
# The GEMV of several rows of 16 bits, by the rows of x that it takes at once. NVIDIA H200, 2026-11-15 to 19.
_FEW_LANES = (Shape((8192, MOST), (1, 4095)), Gemv(128, 16, 4))
GEMV_ROWS_INT16: Mapping[int, Sequence[tuple[Shape, Gemv]]] = {
    2: (_FEW_LANES, (Shape((1, MOST), (1, MOST)), Gemv(128, 32, 2))),
    4: (_FEW_LANES, (Shape((1, MOST), (1, MOST)), Gemv(64, 32, 4))),
}
# The GEMV of several rows that rounds its inputs itself: the first line that has the rows and the shape. NVIDIA H200,
# 2026-11-19, K 2,048 and 8,192; K 4,096 and 14,336 of four rows. A workgroup for each processor is best, or nearly.
_EITHER = (2048, MOST)
_MANY = (12289, 32767)
ROWS_STAGED: tuple[StagedRows, ...] = (
    StagedRows((2, 2), 2, Shape(_HEAD, (2048, 4095)), GemvOfRows(256, 16, 4, 2)),  # 74.9 µs; row by row 87.4
    StagedRows((2, 2), 2, Shape(_HEAD, (4096, MOST)), GemvOfRows(512, 16, 4, 2)),
    StagedRows((2, 2), 2, Shape(_MANY, _EITHER), GemvOfRows(512, 16, 4, 2)),  # 10.8 µs; row by row 12.8
    StagedRows((2, 2), 2, Shape((4097, 12288), _EITHER), GemvOfRows(512, 16, 2, 2)),
    StagedRows((2, 2), 2, Shape((2049, 4096), _EITHER), GemvOfRows(512, 32, 2, 2)),  # 5.9 µs; row by row 6.5
    StagedRows((2, 2), 2, Shape((1537, 2048), (8192, MOST)), GemvOfRows(512, 64, 2, 2)),  # 8.8 µs; row by row 10.5
    StagedRows((3, 4), 4, Shape(_HEAD, (2048, 4095)), GemvOfRows(256, 16, 4, 4)),  # 100 µs; rounded before 147
    StagedRows((3, 4), 4, Shape(_HEAD, (4096, MOST)), GemvOfRows(512, 16, 4, 4)),
    StagedRows((3, 4), 4, Shape(_MANY, _EITHER), GemvOfRows(512, 16, 4, 4)),  # 14.8 µs; rounded before 17.5
    StagedRows((3, 4), 4, Shape((4097, 12288), _EITHER), GemvOfRows(512, 16, 2, 4)),  # 14.1 µs; rounded before 15.2
    StagedRows((3, 4), 4, Shape((2049, 4096), _EITHER), GemvOfRows(512, 32, 2, 4)),  # 10.1 µs; rounded before 13.1
    StagedRows((3, 4), 4, Shape((1537, 2048), _EITHER), GemvOfRows(512, 64, 2, 4)),  # K 8,192: 12.9 µs; before 17.6
    StagedRows((5, 8), 8, Shape((1537, 2048), (4096, 8192)), GemvOfRows(512, 32, 2, 4)),  # 15.9 µs; matrices 18.1
    StagedRows((5, 8), 8, Shape((2049, 3072), (2048, 2048)), GemvOfRows(256, 16, 2, 4)),  # 10.2 µs; matrices 12.1
    StagedRows((9, 16), 0, Shape((2049, 3072), (2048, 2048)), GemvOfRows(256, 16, 2, 4)),  # 15.7 µs; tiles 16.8
    # 16 rows 9.4 µs; tiles 11.8, matrices 10.1. Beside matrices a layer has one kernel more: 1B 12,448 → 11,470 tok/s.
    StagedRows((5, 16), 8, Shape((1537, 2048), (2048, 2048)), GemvOfRows(256, 16, 2, 4)),
    StagedRows((5, 8), 0, Shape(_MANY, (2048, 2048)), GemvOfRows(512, 16, 4, 8)),  # 22.5 µs; tiles 24.2
)
# Weights from which on inputs are rounded, for K up to so many. NVIDIA H200, 2026-11-15.
LARGE_ENOUGH = ((1023, 3_000_000), (MOST, 1_100_000))
# Rows of x, and the largest K · N that is multiplied row by row. NVIDIA H200, 2026-11-19.
ROW_BY_ROW = ((2, 130_000_000), (4, 9_000_000), (8, 4_500_000), (16, 2_000_000))
# Workgroups of which each has a processor. NVIDIA H200, 2026-11-16.
NEARLY_ALL = 128
# A workgroup for each processor, with nearly as many lanes as its rows have blocks. NVIDIA H200, 2026-11-16:
# K 6,912, N 1,152 take 5.4 µs with 992 lanes in 128 workgroups, 6.0 with 512, and 7.2 in 144 workgroups.
FEW_ROWS = (Shape((1025, 1152), (1024, 6912)),)
# Products after one that rounds its results for them. Gate and up want whole blocks for each workgroup then, which
# may cost other shapes more than is gained. NVIDIA H200, 2026-11-16.
AFTER_ROUNDING = (Shape((1025, 1152), (1, MOST)),)


def is_measured(shapes: Sequence[Shape], dims: Dims, caps: DeviceCaps) -> bool:
    """Is it one of these shapes, on a device like the one where they were measured?"""
    like_it = processors(caps) >= 0.75 * MEASURED_PROCESSORS
    return like_it and any(shape.has(dims["K"], dims["N"], False) for shape in shapes)
