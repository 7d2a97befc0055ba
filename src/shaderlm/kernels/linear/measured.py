"""Launch configurations that were measured on a card, for devices of its family. Other devices get rules.

The tuner measures again on the device itself; these are what it begins with, and what runs with --no-tune.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...gpu.caps import DeviceCaps
from ..route import processors

MOST = 1 << 30
WHOLE = -1  # lanes: one for each block of a row, from 8 to 64
HALF = -2  # one for each two blocks


class Gemv(NamedTuple):
    """Threads of a workgroup, lanes that share the K of a row, and rows of such lanes."""

    threads: int
    lanes: int
    rows: int


class Shape(NamedTuple):
    """From N and K on, up to N and K (both included); `in_pairs`: rows are taken in pairs, or not; None: either."""

    n: tuple[int, int]
    k: tuple[int, int]
    in_pairs: bool | None = None

    def has(self, k: int, n: int, in_pairs: bool) -> bool:
        """Is it this shape?"""
        inside = self.n[0] <= n <= self.n[1] and self.k[0] <= k <= self.k[1]
        return inside and self.in_pairs in (None, in_pairs)


@dataclass(frozen=True)
class Family:
    """Devices on which configurations are expected to be what they are on the card where they were measured."""

    name: str
    card: str
    date: str
    matches: Callable[[DeviceCaps], bool]
    gemv_int16: tuple[tuple[Shape, Gemv], ...]  # the first that has the shape
    few_rows: tuple[Shape, ...]  # a workgroup for each processor, with nearly as many lanes as rows have blocks
    rounded: tuple[Shape, ...]  # of the product after one that rounds its results: elsewhere that gains nothing


_HEAD = (32768, MOST)
_WIDE = (8192, 32767)
_NARROW = (1, 8191)

LARGE = Family(
    "GPUs of 100 processors and more",
    "NVIDIA H200",
    "2026-11-15 to 2026-11-17",
    lambda caps: processors(caps) >= 100,
    (
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
    ),
    # K 6,912, N 1,152: 5.4 µs with 992 lanes in 128 workgroups, 6.0 with 512, and 7.2 in 144 workgroups
    (Shape((1025, 1152), (1024, 6912), False),),
    # Gate and up want whole blocks for each workgroup, which may cost other shapes more than is gained.
    (Shape((1025, 1152), (1, MOST)),),
)
FAMILIES = (LARGE,)


def family_of(caps: DeviceCaps) -> Family | None:
    """Whose configurations a device begins with; None: it gets rules."""
    return next((family for family in FAMILIES if family.matches(caps)), None)
