"""What a step knows of rows of images: a record for each row, and the features that records name.

`graph.batch` says what a record has. Those of a prompt are made once, when it is known where its images are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..graph.batch import FEATURE, IMAGE_WORDS, REACH
from ..models.config import ImageRows

U32 = NDArray[np.uint32]


class PlacedImage(NamedTuple):
    """An image in a prompt: its key, the positions of its tokens, and rows and columns of these tokens."""

    key: bytes
    positions: NDArray[np.int64]
    grid: tuple[int, int]


class Features(Protocol):
    """Of a picture, [tokens, levels · hidden]: an array, or a buffer of the device that will read them."""

    @property
    def nbytes(self) -> int:
        """Memory that they take, where they are."""
        ...

    def __len__(self) -> int:
        """Tokens of the picture."""
        ...


class FeatureRows(NamedTuple):
    """Some rows of the features of a picture."""

    features: Features
    first: int
    rows: int


class ImageChunk(NamedTuple):
    """Of the rows of a chunk: their records, and the features that these count from 1 on."""

    records: U32  # [rows, 8]
    features: tuple[FeatureRows, ...] = ()


@dataclass(eq=False)
class PromptImages:
    """The images of a prompt. `features` of all of them, once they are known."""

    records: U32
    shift: int  # of positions after the last image, where these have several axes
    blocks: tuple[tuple[int, int], ...]  # rows that must be in one step: they see each other
    cache_ids: list[int]  # what a prefix cache compares in place of the prompt's ids
    features: tuple[Features, ...] = ()
    input_token: int | None = None  # what rows of images have in place of their tokens

    def chunk(self, first: int, count: int) -> ImageChunk:
        """Rows of the prompt from a position on, or of what comes after it."""
        records = text_records(count, self.shift)
        known = self.records[first : first + count]
        records[: len(known)] = known
        used = records[:, FEATURE]
        there = used[used > 0]
        if not len(there):
            return ImageChunk(records)
        low, high = int(there.min()) - 1, int(there.max())
        records[used > 0, FEATURE] -= low
        return ImageChunk(records, tuple(self._rows(low, high)))

    def _rows(self, low: int, high: int) -> Iterator[FeatureRows]:
        """Rows of the features of all pictures, as those of each."""
        begin = 0
        for each in self.features:
            first, end = max(low - begin, 0), min(high - begin, len(each))
            if first < end:
                yield FeatureRows(each, first, end - first)
            begin += len(each)

    def step_ids(self, ids: Sequence[int], first: int) -> Sequence[int]:
        """Tokens from a position on, as a step reads them."""
        if self.input_token is None:
            return ids
        known = self.records[first : first + len(ids), FEATURE]
        return [*np.where(known > 0, self.input_token, ids[: len(known)]).tolist(), *ids[len(known) :]]


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
    return PromptImages(records.astype(np.uint32), shift, tuple(blocks), cache_ids, input_token=how.input_token)


def step_rows(chunks: Sequence[ImageChunk]) -> tuple[U32, list[FeatureRows]]:
    """The records and the features of a step, from those of its chunks."""
    records, features, number = [], list[FeatureRows](), 0
    for chunk in chunks:
        own = chunk.records
        if number and chunk.features:
            own = own.copy()
            own[own[:, FEATURE] > 0, FEATURE] += number
        records.append(own)
        features += chunk.features
        number += sum(each.rows for each in chunk.features)
    return np.concatenate(records), features


def host_features(rows: Sequence[FeatureRows]) -> NDArray[np.float32]:
    """Rows of the features of several pictures, all of them arrays, one below the other."""
    parts = [np.asarray(each.features)[each.first : each.first + each.rows] for each in rows]
    return np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)
