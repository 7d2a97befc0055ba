"""Numbers of attention that were measured on a card. Counts of workgroups and rows follow the processors of others."""

from __future__ import annotations

from typing import NamedTuple

MOST = 1 << 30

# NVIDIA H200, 2026-11-15 to 17.

# Workgroups that fill it: of a row and query head, and of a split. With more rows each takes several, so that few
# workgroups start for nothing where most rows are another kernel's.
ROW_WORKGROUPS, SPLIT_WORKGROUPS = 1024, 2048
# Workgroups of a dispatch that keep it busy. More splits write more sums: 64 rows of 4,000 keys take 282 µs with 64
# splits, 206 with 8.
FULL_WORKGROUPS, LEAST_SPLITS = 512, 8
# Rows whose keys past SINGLE_PASS_KEYS are faster in splits. 1,000 keys of 64: 4 rows take 10.8 instead of 12.4 µs, 16
# rows 22.8 instead of 14.3.
SPLIT_ROWS = 8
# Query heads up to which the product after attention joins splits: every workgroup of it reads what all of them leave,
# and with more heads there are enough workgroups without splits.
JOINED_HEADS = 8


class Heads(NamedTuple):
    """Of heads of so many quads or more: workgroups that share the values of a head, and lanes that share a key."""

    quads: int
    parts: int
    lanes_per_key: int


# One row. 250 keys: of 32 heads of 128, 7.2 µs with 1 part, 6.0 with 2; of 4 heads of 256, 10.5 with 1, 8.2 with 4.
# With two for heads of 64, llama-3.2-1b writes its first 128 tokens 1 % slower, and those after 180 3 % faster.
# 64 keys of 128: 4.50 µs with 4 lanes, 4.10 with 8.
ONE_ROW = (Heads(64, 4, 8), Heads(32, 2, 8), Heads(0, 1, 4))


class Grouped(NamedTuple):
    """Up to so many workgroups, of single_pass alone or of longer rows (None: either), of heads of so many values or
    more: lanes of a workgroup."""

    workgroups: int
    single_pass: bool | None
    head: int
    lanes: int


# More lanes have more keys of a row on their way; in a full GPU, smaller workgroups of short rows all run at once.
# Heads of 64: 64 rows of 100 keys take 9.2 µs with 128 lanes and 11.3 with 256; 16 rows of 1,000 keys 14.3 with 512 and
# 17.1 with 256. The first that has the shape.
GROUPED = (
    Grouped(128, True, 65, 512),
    Grouped(128, False, 0, 512),
    Grouped(FULL_WORKGROUPS - 1, None, 0, 256),
    Grouped(MOST, True, 0, 128),
    Grouped(MOST, False, 0, 256),
)
