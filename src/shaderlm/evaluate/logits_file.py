"""Files with the log probabilities that a model gives to every token of a vocabulary, after the rows that count.

They are llama-perplexity's (`--save-all-logits`), little endian: "_logits_", the size of a window (i32), that of the
vocabulary (i32), the number of windows (i32), the tokens of all windows (i32), and then a record for each row: a scale
and a minimum (f32) and a u16 for each token, with one more where the vocabulary is odd. The log probability of a token
is scale · u16 + minimum. What is more than 16 below the largest has the minimum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..files import atomic_write
from .windows import Windows

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
_MAGIC = b"_logits_"
_RANGE = np.float32(16)  # of log probabilities
_ROWS = 64  # that are written or read at once, at most


def _width(vocabulary: int) -> int:
    """Words of a record."""
    return 4 + vocabulary + vocabulary % 2


def record_bytes(windows: Windows, vocabulary: int) -> int:
    """Bytes of a file."""
    return 20 + 4 * len(windows.tokens) + len(windows) * windows.counted * 2 * _width(vocabulary)


def packed(logits: F32) -> U16:
    """[rows, vocabulary] → records [rows, words]."""
    rows, vocabulary = logits.shape
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    top = logits.max(1, keepdims=True)
    low = np.maximum(logits.min(1, keepdims=True), top - _RANGE)
    total = np.log(np.exp(logits - top).sum(1, dtype=np.float64, keepdims=True)).astype(np.float32)
    scale = (top - low) / np.float32(65535)
    records = np.zeros((rows, _width(vocabulary)), np.uint16)
    head = np.concatenate([scale, low - top - total], 1).astype("<f4")
    records[:, :4] = head.view("<u2")
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    records[:, 4 : 4 + vocabulary] = np.rint(inverse * (np.maximum(logits, low) - low))
    return records


def unpacked(records: U16, vocabulary: int) -> F32:
    """[rows, words] → log probabilities [rows, vocabulary]."""
    head = np.ascontiguousarray(records[:, :4]).view("<f4").astype(np.float32)
    return head[:, :1] * records[:, 4 : 4 + vocabulary].astype(np.float32) + head[:, 1:]


class LogitsWriter:
    """Writes the rows of one window after the other."""

    def __init__(self, file: IO[bytes], windows: Windows, vocabulary: int) -> None:
        self._file = file
        sizes = np.array([windows.size, vocabulary, len(windows)], "<i4")
        file.write(_MAGIC + sizes.tobytes() + np.array(windows.tokens, "<i4").tobytes())

    def write(self, logits: F32) -> None:
        """The next rows that count."""
        for first in range(0, len(logits), _ROWS):
            self._file.write(packed(logits[first : first + _ROWS]).astype("<u2").tobytes())


@contextmanager
def logits_writer(path: Path, windows: Windows, vocabulary: int) -> Iterator[LogitsWriter]:
    """A new file. If anything fails, nothing is left of it."""
    with atomic_write(path) as file:
        yield LogitsWriter(file, windows, vocabulary)


class LogitsFile:
    """A file that was written before, by this program or by llama.cpp."""

    def __init__(self, path: Path) -> None:
        """Reads the head, and checks the size."""
        self.path = path
        try:
            self._file = path.open("rb")
            length = os.fstat(self._file.fileno()).st_size
            head = self._file.read(20)
        except OSError as problem:
            raise InputError(f"cannot read {path}: {problem.strerror}") from None
        if len(head) < 20 or head[:8] != _MAGIC:
            self._file.close()
            raise InputError(f"{path} has no logits; --save-logits writes such files, and so does llama-perplexity")
        self.size, self.vocabulary, self.count = np.frombuffer(head[8:], "<i4").tolist()
        counted = self.size - 1 - self.size // 2
        words = _width(max(0, self.vocabulary))
        self._first = 20 + 4 * self.size * self.count
        expected = self._first + self.count * counted * 2 * words
        if min(self.size, self.vocabulary, self.count) < 1 or length < expected:
            self._file.close()
            sizes = f"{self.count:,} windows of {self.size:,} tokens and a vocabulary of {self.vocabulary:,}"
            raise InputError(f"{path} is cut: {sizes} take {expected:,} bytes, and it has {length:,}")
        self._record, self._counted = 2 * words, counted
        self.tokens: list[int] = np.frombuffer(self._file.read(4 * self.size * self.count), "<i4").tolist()

    def rows(self, window: int, first: int, count: int) -> F32:
        """Log probabilities of rows that count, of a window from one of them on, [rows, vocabulary]."""
        self._file.seek(self._first + (window * self._counted + first) * self._record)
        raw = self._file.read(count * self._record)
        return unpacked(np.frombuffer(raw, "<u2").reshape(count, -1), self.vocabulary)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
