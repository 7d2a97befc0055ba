"""The token batch: one record of four words per row, [1 + tokens, 4] of uint32. All that ops know of a row.

batch[0] = (rows, outputs, 0, 0): how many rows and outputs there are; the rest of the bucket is padding.
batch[1 + t] = (id, position, slot, pages):
- id: a token id, or LAST | s for the token that was sampled last for sequence slot s;
- position: of the row in its sequence; it sees the keys 0 … position of that sequence, its own included;
- slot: the row of the pool that takes its key and value, NONE for a padding row, which writes nothing;
- pages: where in the page table its sequence begins; RUN is set on the rows of a run.
Models that read images have a second record for each row, image_rows [tokens, 8] of uint32:
- three numbers, signed, that are added to its position: what it is rotated by on the temporal, vertical and horizontal
  axis, where a model has several;
- reach: how many keys after its own it sees, those of the image that it is of;
- feature: 1 + the row of its features in the buffer `features`, 0 for text; and three that are 0.
Rows of text before any image have zeros. A row of text keeps its record as its sequence goes on.

Key c of a sequence lies in row page_table[pages + c / PAGE] · PAGE + c % PAGE of the pool. `shared/batch.wgsl` has the
same constants for kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAST = 0x8000_0000
NONE = 0xFFFF_FFFF
RUN = 0x8000_0000
PAGE = 128  # a multiple of every tile of keys: a tile needs one look into the page table
IMAGE_WORDS, REACH, FEATURE = 8, 3, 4  # of a record of image_rows: its words, and the places of two of them
# A run is at least so many consecutive rows of one sequence at consecutive positions, or rows among which are some that
# see keys after their own.
RUN_ROWS = 8

# Context classes, by the longest row of a step. Up to so many keys one workgroup takes all keys of a row and a head:
# for heads of 64 and less, and for longer ones (6.5 µs at 320 keys of 64 on an H200, 7.0 at 384; chunks 6.3 at both).
SINGLE_PASS_KEYS, SINGLE_PASS_LONG_HEAD_KEYS = 320, 256
SINGLE_PASS_TILE = 512  # keys that it takes at a time
SPLIT_KEYS = 2048
LONG_SPLIT_KEYS = 8192  # beyond, a workgroup takes several chunks of keys
CONTEXTS = ("single_pass", "split", "long_split")

U32 = NDArray[np.uint32]


def single_pass_keys(head: int) -> int:
    """The most keys that one workgroup takes for a row, for heads of so many values."""
    return SINGLE_PASS_KEYS if head <= 64 else SINGLE_PASS_LONG_HEAD_KEYS


def context_class(keys: int, head: int) -> str:
    """The class of a step whose longest row sees so many keys."""
    if keys <= single_pass_keys(head):
        return "single_pass"
    return "split" if keys <= SPLIT_KEYS else "long_split"


def last_key(context: str, head: int) -> int:
    """The most keys of the longest row in a context class."""
    return {"single_pass": single_pass_keys(head), "split": SPLIT_KEYS}.get(context, 1 << 31)


def least_pool_rows(paged: bool, keys: int = 0) -> int:
    """Rows of the pool that attention needs; without pages, those read before it is known how many are filled."""
    return PAGE if paged else max(SINGLE_PASS_TILE, keys)


def make_batch(
    positions: Any, slots: Any, pages: Any = 0, ids: Any = 0, *, tokens: int | None = None, outputs: int = 0
) -> U32:
    """Records from values per row (or one for all), padded to `tokens` rows. Runs are marked."""
    positions = np.asarray(positions, np.uint32)
    rows = len(positions)
    batch = np.zeros((1 + (rows if tokens is None else tokens), 4), np.uint32)
    batch[0] = (rows, outputs, 0, 0)
    batch[1 : rows + 1] = np.stack([np.broadcast_to(word, rows) for word in (ids, positions, slots, pages)], axis=1)
    batch[rows + 1 :, 2] = NONE
    return mark_runs(batch)


def contiguous_batch(position: int, rows: int, ids: Any = 0, *, tokens: int | None = None, outputs: int = 0) -> U32:
    """Consecutive rows of one sequence whose pages are the pool from row 0 on."""
    positions = np.arange(position, position + rows, dtype=np.uint32)
    return make_batch(positions, positions, 0, ids, tokens=tokens, outputs=outputs)


def stretches(batch: U32) -> Sequence[tuple[int, int]]:
    """(first row, rows) of every longest stretch of one sequence at consecutive positions, padding left out."""
    rows = int(batch[0, 0])
    if not rows:
        return []
    pages = batch[1 : rows + 1, 3] & ~np.uint32(RUN)
    positions = batch[1 : rows + 1, 1].astype(np.int64)
    continues = (pages[1:] == pages[:-1]) & (np.diff(positions) == 1)
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    return list(zip(first.tolist(), np.diff(np.append(first, rows)).tolist(), strict=True))


def mark_runs(batch: U32) -> U32:
    """Set RUN on the rows of every run and take it off the others, in place."""
    batch[1:, 3] &= ~np.uint32(RUN)
    lengths = np.array([rows for _, rows in stretches(batch)], np.int64)
    flags = np.repeat(np.where(lengths >= RUN_ROWS, RUN, 0).astype(np.uint32), lengths)
    batch[1 : 1 + len(flags), 3] |= flags
    return batch


def ids_of(batch: U32, tokens: Any) -> U32:
    """The token ids of a batch's rows; LAST | s stands for tokens[s]."""
    ids = batch[1 : 1 + int(batch[0, 0]), 0]
    named = ids >= LAST
    return np.where(named, np.asarray(tokens)[np.where(named, ids - np.uint32(LAST), 0)], ids)
