"""What a step knows of rows of images: a record for each row, and the features that records name.

`graph.batch` says what a record has. Those of a prompt are made once, when it is known where its images are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph.batch import FEATURE, IMAGE_WORDS, REACH
from ..models.config import ImageRows

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]


class PlacedImage(NamedTuple):
    """An image in a prompt: its key, the positions of its tokens, and rows and columns of these tokens."""

    key: bytes
    positions: NDArray[np.int64]
    grid: tuple[int, int]


class ImageChunk(NamedTuple):
    """Of the rows of a chunk: their records, and the features that these count from 1 on."""

    records: U32  # [rows, 8]
    features: F32  # [features, levels · hidden]


@dataclass(eq=False)
class PromptImages:
    """The images of a prompt. `features` of all of them, once they are known, [tokens of images, levels · hidden]."""

    records: U32
    shift: int  # of positions after the last image, where these have several axes
    blocks: tuple[tuple[int, int], ...]  # rows that must be in one step: they see each other
    cache_ids: list[int]  # what a prefix cache compares in place of the prompt's ids
    features: F32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def chunk(self, first: int, count: int) -> ImageChunk:
        """Rows of the prompt from a position on, or of what comes after it."""
        records = text_records(count, self.shift)
        known = self.records[first : first + count]
        records[: len(known)] = known
        used = records[:, FEATURE]
        there = used[used > 0]
        if not len(there):
            return ImageChunk(records, self.features[:0])
        low, high = int(there.min()) - 1, int(there.max())
        records[used > 0, FEATURE] -= low
        return ImageChunk(records, self.features[low:high])


def text_records(count: int, shift: int = 0) -> U32:
    """Records of rows of text, whose positions are shifted alike on all axes."""
    records = np.zeros((count, IMAGE_WORDS), np.uint32)
    records[:, :3] = np.uint32(shift & 0xFFFF_FFFF)
    return records


def place(ids: Sequence[int], images: Sequence[PlacedImage], how: ImageRows) -> PromptImages:
    """The records of a prompt with images, whose tokens are at positions that rise."""
    records, shift, number = np.zeros((len(ids), IMAGE_WORDS), np.int64), 0, 0
    cache_ids, blocks = list(ids), []
    for image in images:
        at = image.positions
        first, count = int(at[0]), len(at)
        if how.axes:
            rows, columns = image.grid
            begin = first + shift
            places = np.stack([np.zeros(count, np.int64), np.arange(count) // columns, np.arange(count) % columns], 1)
            records[at, :3] = begin + places - at[:, None]
            shift += max(rows, columns) - count
            records[first + count :, :3] = shift
        if how.sees_itself:
            records[at, REACH] = first + count - 1 - at
            blocks.append((first, first + count))
        records[at, FEATURE] = 1 + number + np.arange(count)
        number += count
        name = int.from_bytes(image.key, "little") << 32
        for i, position in enumerate(at.tolist()):
            cache_ids[position] = -1 - (name | i)
    return PromptImages(records.astype(np.uint32), shift, tuple(blocks), cache_ids)


def step_rows(chunks: Sequence[ImageChunk]) -> tuple[U32, F32]:
    """The records and the features of a step, from those of its chunks."""
    records, features, number = [], [], 0
    for chunk in chunks:
        own = chunk.records
        if number and len(chunk.features):
            own = own.copy()
            own[own[:, FEATURE] > 0, FEATURE] += number
        records.append(own)
        if len(chunk.features):
            features.append(chunk.features)
            number += len(chunk.features)
    return np.concatenate(records), np.concatenate(features) if features else np.zeros((0, 0), np.float32)
