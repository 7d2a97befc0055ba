"""An open checkpoint, whatever it is stored as: metadata by GGUF's keys, tensors by GGUF's names, rows on demand."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from .gguf_header import TensorInfo
from .unpack import unpack
from .weight_formats import WEIGHT_FORMATS


class Checkpoint:
    """What all kinds of checkpoints share. Use it as a context manager, or call `close()`.

    A kind of checkpoint has `files`, `_read`, which gets rows that are known to be there, and `_release`.
    """

    def __init__(self, path: Path, size: int, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.size = size
        self.metadata = MappingProxyType(dict(metadata))
        self._stored = dict(tensors)
        self.tensors = MappingProxyType(
            {name: replace(info, shape=without_ones(info.shape)) for name, info in tensors.items()}
        )
        self._open = True

    def _read(self, info: TensorInfo, first: int, end: int) -> NDArray[np.uint8]:
        """Rows `first` … `end` of a tensor as it is stored, [rows, bytes per row]."""
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """How many tokens it has embeddings of; 0 where it has none."""
        info = self.tensors.get("token_embd.weight")
        return info.shape[0] if info else 0

    def files(self) -> list[Path]:
        """The files that make this checkpoint, as far as they are read."""
        raise NotImplementedError

    def raw(self, name: str, first: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Rows `first` … `end` as they are stored: [rows, bytes per row], a read-only view where the file has them so.

        A vector is one row.
        """
        info = self.info(name)
        rows = math.prod(info.shape[:-1])
        first, end = _range(name, first, rows if end is None else end, rows)
        if not self._open:
            raise InputError(f"{self.path} is closed: read its tensors before close()")
        stored = self._stored[name]
        stored_rows = math.prod(stored.shape[:-1])
        if stored_rows != rows:  # of one value each
            return self._read(stored, 0, stored_rows).reshape(rows, -1)[first:end]
        return self._read(stored, first, end)

    def dense(self, name: str, first: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Rows `first` … `end` in float32: [rows, K], a vector [n]. A new array."""
        info, blocks = self.info(name), self.raw(name, first, end)
        if len(blocks) == 0:  # gguf's own functions do not take nothing
            return np.empty(0 if len(info.shape) == 1 else (0, info.shape[-1]), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale is the file's, not the caller's
            rows = unpack(blocks, info.kind).reshape(len(blocks), info.shape[-1])
        return rows.reshape(-1) if len(info.shape) == 1 else rows

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it. One that is not there, or of another type, is a ModelError."""
        info = self.tensors.get(name)
        if info is None:
            close = difflib.get_close_matches(str(name), self.tensors, 1)
            hint = f"; did you mean {close[0]}?" if close else f" among its {len(self.tensors)}"
            raise ModelError(f"{self.path}: there is no tensor {name!r}{hint}")
        if info.kind not in WEIGHT_FORMATS:
            raise ModelError(
                f"{self.path}: tensor {name} has the type {info.kind}, which is not supported; use a file of the types "
                f"{', '.join(WEIGHT_FORMATS)}"
            )
        return info

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """While this is entered, every ModelError names the file."""
        try:
            yield
        except ModelError as problem:
            if str(self.path) in str(problem):
                raise
            raise ModelError(f"{self.path}: {problem}") from None

    def close(self) -> None:
        """Let go of the files. Arrays that `raw` gave out keep them mapped until they are gone."""
        if self._open:
            self._open = False
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its dimensions of one: writers of checkpoints do not agree on them, and they move no value."""
    return tuple(n for n in shape if n != 1) or shape[:1]


def _range(name: str, first: Any, end: Any, rows: int) -> tuple[int, int]:
    try:
        start, stop = operator.index(first), operator.index(end)
    except TypeError:
        raise InputError(f"{name}: rows must be whole numbers, got {first!r} … {end!r}") from None
    if not 0 <= start <= stop <= rows:
        raise InputError(f"{name}: rows must satisfy 0 ≤ first ≤ end ≤ {rows}, got {start} … {stop}")
    return start, stop
