"""Tensors of safetensors files as GGUF has them: some rows of them, or columns as rows. Knows no names and no models.

Nothing is read before rows are asked for, and then only these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ..safetensors import Safetensors
from ..unpack import unpack

U8 = NDArray[np.uint8]
Rows = slice | NDArray[np.int64]  # a slice has a first row and an end


@dataclass(frozen=True)
class Matrix:
    """A tensor: all axes but the last are rows, one after the other. A vector is one row.

    `kind` is the name of a weight format. `rows` gives [rows, bytes per row]. `values` gives the tensor in its shape;
    there is none if it does not lie so in a file.
    """

    shape: tuple[int, ...]
    kind: str
    rows: Callable[[Rows], U8]
    values: Callable[[], NDArray[Any]] | None = None

    @property
    def row_count(self) -> int:
        """Of all matrices of the tensor together."""
        return math.prod(self.shape[:-1])


def stored(files: Safetensors, name: str) -> Matrix:
    """A tensor as it lies in a file."""

    def rows(which: Rows) -> U8:
        if isinstance(which, slice):
            return files.raw(name, which.start, which.stop)
        return files.raw(name)[which]

    info = files.tensors[name]
    return Matrix(info.shape, info.kind, rows, lambda: files.numbers(name))


def transposed(whole: Matrix) -> Matrix:
    """The last two axes of a tensor of numbers change places."""
    values = whole.values
    if values is None or len(whole.shape) < 2 or whole.kind not in ("f32", "f16", "bf16"):
        raise ModelError(f"only matrices of f32, f16 or bf16 can be transposed, not {whole.kind} {list(whole.shape)}")
    *outer, rows, columns = whole.shape

    def picked(which: Rows) -> U8:
        at, matrices = numbers_of(which), values().reshape(-1, rows, columns).swapaxes(1, 2)
        return np.ascontiguousarray(matrices[at // columns, at % columns]).view(np.uint8)

    return Matrix((*outer, columns, rows), whole.kind, picked)


def part_of(whole: Matrix, part: str, *, bias: bool) -> Matrix:
    """The part of a tensor that a table names: rows of every matrix, or numbers of every bias."""
    if not part:
        return whole
    axis = -1 if bias else -2
    if len(whole.shape) < 2 or whole.shape[axis] % 2:
        raise ModelError(f"a tensor of the shape {list(whole.shape)} has no two halves")
    count = whole.shape[axis] // 2
    first, step = {"first half": (0, 1), "second half": (count, 1), "even": (0, 2), "odd": (1, 2)}[part]
    *outer, rows, columns = whole.shape

    def some_rows(which: Rows) -> U8:
        at = numbers_of(which)
        return whole.rows(at // count * rows + first + at % count * step)

    def some_columns(which: Rows) -> U8:
        picked = whole.rows(which)
        width = picked.shape[1] // columns
        numbers = picked.reshape(len(picked), columns, width)[:, first : first + count * step : step]
        return np.ascontiguousarray(numbers).reshape(len(picked), count * width)

    if bias:
        return Matrix((*outer, rows, count), whole.kind, some_columns)
    return Matrix((*outer, count, columns), whole.kind, some_rows)


def in_order(whole: Matrix, order: NDArray[np.int64]) -> Matrix:
    """Some rows of a matrix, in this order."""
    return Matrix((len(order), *whole.shape[1:]), whole.kind, lambda which: whole.rows(order[numbers_of(which)]))


def negative_exp(whole: Matrix) -> Matrix:
    """−exp of every number of a vector."""
    if len(whole.shape) != 1:
        raise ModelError(f"a logarithm of each head must be a vector, it is {list(whole.shape)}")

    def rows(which: Rows) -> U8:
        powers: NDArray[np.float32] = -np.exp(unpack(whole.rows(which), whole.kind), dtype=np.float32)
        return powers.view(np.uint8)

    return Matrix(whole.shape, "f32", rows)


def scaled(whole: Matrix, factors: Sequence[tuple[int, float]]) -> Matrix:
    """So many rows of a matrix, or numbers of a vector, times a factor; the last count is of all that remain."""
    count, ends = whole.shape[0], np.cumsum([rows for rows, _ in factors[:-1]], dtype=np.int64)
    if len(ends) and ends[-1] >= count:
        raise ModelError(f"a tensor of the shape {list(whole.shape)} must have more than {ends[-1]} rows")
    by_row = np.array([factor for _, factor in factors], np.float32)[np.searchsorted(ends, np.arange(count), "right")]

    def rows(which: Rows) -> U8:
        numbers = unpack(whole.rows(which), whole.kind)
        products = numbers * (by_row if len(whole.shape) == 1 else by_row[numbers_of(which)][:, None])
        return np.ascontiguousarray(products, np.float32).view(np.uint8)

    return Matrix(whole.shape, "f32", rows)


def by_kind(whole: Matrix, heads: int) -> Matrix:
    """Rows of a query, a key and a value for every head: the rows of all queries, all keys and all values.

    Of a bias, its numbers.
    """
    count = whole.shape[0]
    if len(whole.shape) > 2 or count % (3 * heads):
        raise ModelError(f"a tensor of the shape {list(whole.shape)} has no three parts for each of {heads} heads")
    order = np.arange(count).reshape(heads, 3, -1).swapaxes(0, 1).reshape(-1)

    def numbers(which: Rows) -> U8:
        picked = whole.rows(which)
        return np.ascontiguousarray(picked.reshape(len(picked), count, -1)[:, order]).reshape(picked.shape)

    if len(whole.shape) == 1:
        return Matrix(whole.shape, whole.kind, numbers)
    return Matrix(whole.shape, whole.kind, lambda which: whole.rows(order[numbers_of(which)]))


def numbers_of(which: Rows) -> NDArray[np.int64]:
    """The rows, one by one."""
    return np.arange(which.start, which.stop) if isinstance(which, slice) else which
