"""Where the patches of a picture are: rows of learned positions, angles, and which patches see each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...graph import vision
from ...vision.processors import Layout
from .sizes import Sizes

Rows = tuple[NDArray[np.uint32], NDArray[np.float32]]


class Positions(NamedTuple):
    """Learned positions: so many rows of a table for a patch, and their factors. shape: of the tensor."""

    taps: int
    rows: Callable[[Sizes, Layout], Rows]
    shape: Callable[[Sizes], tuple[int, ...]]


def _table(sizes: Sizes, layout: Layout) -> Rows:
    """The row of the place, after that of the class."""
    places, first = layout.places(), sizes.class_rows
    rows = np.concatenate([np.arange(first), places @ (sizes.side, 1) + first])[:, None]
    return rows.astype(np.uint32), np.ones(rows.shape, np.float32)


def _interpolated(sizes: Sizes, layout: Layout) -> Rows:
    """Between four rows: the grid of a picture is laid on the table, corners on corners."""
    rows, columns = (size * layout.merge for size in layout.grid)
    return vision.interpolation(sizes.side, rows, columns, layout.places())


def _rows_and_columns(sizes: Sizes, layout: Layout) -> Rows:
    """Of a column, and of a row, which come after all columns."""
    row, column = layout.places().T
    places = np.stack([column, row + sizes.positions], axis=1)
    return places.astype(np.uint32), np.ones(places.shape, np.float32)


def _square(sizes: Sizes) -> tuple[int, ...]:
    return sizes.side**2 + sizes.class_rows, sizes.hidden


POSITIONS: Mapping[str, Positions] = {
    "table": Positions(1, _table, _square),
    "interpolated": Positions(4, _interpolated, _square),
    "rows_and_columns": Positions(2, _rows_and_columns, lambda sizes: (2, sizes.positions, sizes.hidden)),
}


def tower_inputs(sizes: Sizes, layout: Layout) -> dict[str, NDArray[Any]]:
    """What the graph of a tower reads beside patches, for one picture: positions, and which patches see each other."""
    inputs: dict[str, NDArray[Any]] = {}
    if sizes.family.positions:
        inputs["places"], inputs["place_factors"] = POSITIONS[sizes.family.positions].rows(sizes, layout)
    if sizes.family.rope:
        between = sizes.family.rope == "between"
        inputs["turns"] = vision.turns(layout.places(), sizes.head, sizes.theta, between=between)
    inputs["spans"] = _spans(count + sizes.class_rows for count in layout.tile_patches)
    picked: dict[str, NDArray[Any]] = {}
    if sizes.class_rows:
        picked["kept"] = sizes.class_rows + np.arange(layout.patches)
    if sizes.window:
        inputs["windows"] = _spans([count * layout.merge**2 for count in layout.window_tokens()])
        picked["order"] = np.argsort(layout.window_order())
    for name, rows in picked.items():
        inputs[name] = rows.astype(np.uint32)[:, None]
        inputs[f"{name}_factors"] = np.ones(inputs[name].shape, np.float32)
    return inputs


def _spans(counts: Iterable[int]) -> NDArray[np.uint32]:
    """First and end of its span for every row, from the rows of each span."""
    counts = np.array(list(counts))
    ends = np.cumsum(counts)
    return np.repeat(np.stack([ends - counts, ends], axis=1), counts, axis=0).astype(np.uint32)
