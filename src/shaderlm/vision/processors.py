"""What the processor of a family makes of a picture: sizes, tiles, patches and tokens. Host arithmetic, no pixels.

A picture is resized once or several times, one after the other, and tiles are cut out of some of the results. A tile is
a grid of patches; `merge` · `merge` neighbouring patches become one token of the text. Patches are in the order of
tiles, of windows within a tile where there are some, of tokens within these, and of rows within a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Filter = Literal["bilinear", "bicubic", "lanczos"]
Size = tuple[int, int]  # rows, columns
_LONGEST = 4096  # of tiled pictures, whatever the file says
_MAX_RATIO = 200  # of the sides of a picture whose grid follows its shape


class Tile(NamedTuple):
    """A part of the picture after some resizing, in pixels."""

    stage: int
    top: int
    left: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Layout:
    """A picture of some size as a processor takes it. `sizes`: what it is resized to, one after the other."""

    source: Size
    sizes: tuple[Size, ...]
    tiles: tuple[Tile, ...]
    patch: int
    merge: int
    tile_grid: Size = (0, 0)  # rows and columns of tiles beside that of the whole picture; (0, 0): there is only that
    window: int = 0  # tokens on a side of a window, of a picture that is one tile; 0: there are none
    uncut: Size | None = None  # what the picture is resized to before its middle is cut out; None: nothing is cut

    @property
    def patches(self) -> int:
        """Of all tiles."""
        return sum(tile.rows * tile.columns for tile in self.tiles) // self.patch**2

    @property
    def tokens(self) -> int:
        """Of all tiles."""
        return self.patches // self.merge**2

    @property
    def grid(self) -> Size:
        """Rows and columns of tokens, of a picture that is one tile."""
        unit, tile = self.patch * self.merge, self.tiles[-1]
        return tile.rows // unit, tile.columns // unit

    @property
    def tile_patches(self) -> tuple[int, ...]:
        """Of each tile: its patches attend to each other."""
        return tuple(tile.rows * tile.columns // self.patch**2 for tile in self.tiles)

    def places(self) -> NDArray[np.int64]:
        """Row and column of every patch in its tile, [patches, 2]."""
        m = self.merge
        parts = []
        for tile in self.tiles:
            rows, columns = tile.rows // self.patch, tile.columns // self.patch
            grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
            tokens = grid.reshape(rows // m, m, columns // m, m, 2).swapaxes(1, 2).reshape(-1, m * m, 2)
            parts.append((tokens[self.window_order()] if self.window else tokens).reshape(-1, 2))
        return np.concatenate(parts)

    def window_order(self) -> NDArray[np.int64]:
        """The numbers of tokens, window by window; those at the right and at the bottom may be smaller."""
        row, column = (each.ravel() for each in np.indices(self.grid))
        return np.lexsort((column, row, column // self.window, row // self.window))

    def window_tokens(self) -> list[int]:
        """The tokens of each window."""
        rows, columns = ([min(self.window, n - i) for i in range(0, n, self.window)] for n in self.grid)
        return [row * column for row in rows for column in columns]


@dataclass(frozen=True)
class Processor:
    """The numbers of one checkpoint.

    sizing: "area" keeps the shape of a picture and bounds its pixels; "budget" makes it as large as it may be;
    "square" has one size; "tiles" cuts a picture into squares beside one that shows all of it; "longest" bounds the
    longest side; "crop" cuts a square out of the middle.
    """

    sizing: Literal["area", "budget", "square", "tiles", "longest", "crop"]
    patch: int
    merge: int
    filter: Filter
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    side: int = 0  # of a square, or of a tile
    longest: int = 0
    least_pixels: int = 0
    most_pixels: int = 0
    placeholder: str = ""  # what a chat template writes for a picture
    token: str = ""  # what stands for each of its tokens
    texts: Mapping[str, str] = field(default_factory=dict)  # around them
    window: int = 0  # tokens on a side of a window; 0: there are none

    def layout(self, width: int, height: int) -> Layout:
        """What becomes of a picture of this size."""
        rows, columns = height, width
        unit = self.patch * self.merge
        if self.sizing == "square":
            size = (self.side, self.side)
            return Layout((rows, columns), (size,), (Tile(0, 0, 0, *size),), self.patch, self.merge)
        if self.sizing == "tiles":
            return self._tiles(rows, columns)
        if self.sizing == "crop":
            return self._crop(rows, columns)
        size = {"area": self._area, "budget": self._budget, "longest": self._longest}[self.sizing](rows, columns, unit)
        return Layout((rows, columns), (size,), (Tile(0, 0, 0, *size),), self.patch, self.merge, window=self.window)

    def _crop(self, rows: int, columns: int) -> Layout:
        """The shorter side becomes that of the square."""
        self._check_ratio(rows, columns)
        side = self.side
        uncut = (side, side * columns // rows) if rows <= columns else (side * rows // columns, side)
        return Layout(
            (rows, columns), ((side, side),), (Tile(0, 0, 0, side, side),), self.patch, self.merge, uncut=uncut
        )

    def _check_ratio(self, rows: int, columns: int) -> None:
        if max(rows, columns) > _MAX_RATIO * min(rows, columns):
            raise InputError(
                f"this model takes pictures whose longer side is at most {_MAX_RATIO} times the shorter one, "
                f"got {columns} × {rows}"
            )

    def _area(self, rows: int, columns: int, unit: int) -> Size:
        self._check_ratio(rows, columns)
        size = round(rows / unit) * unit, round(columns / unit) * unit
        if size[0] * size[1] > self.most_pixels:
            ratio = math.sqrt(rows * columns / self.most_pixels)
            return max(unit, math.floor(rows / ratio / unit) * unit), max(
                unit, math.floor(columns / ratio / unit) * unit
            )
        if size[0] * size[1] < self.least_pixels:
            ratio = math.sqrt(self.least_pixels / (rows * columns))
            return math.ceil(rows * ratio / unit) * unit, math.ceil(columns * ratio / unit) * unit
        return size

    def _budget(self, rows: int, columns: int, unit: int) -> Size:
        factor = math.sqrt(self.most_pixels / (rows * columns))
        size = math.floor(factor * rows / unit) * unit, math.floor(factor * columns / unit) * unit
        longest = self.most_pixels // unit**2 * unit
        if not size[0]:
            return unit, min(columns // rows * unit, longest)
        return size if size[1] else (min(rows // columns * unit, longest), unit)

    def _longest(self, rows: int, columns: int, unit: int) -> Size:
        ratio = max(rows, columns) / self.longest
        if ratio > 1:
            rows, columns = math.floor(rows / ratio), math.floor(columns / ratio)
        return max(1, -(-rows // unit)) * unit, max(1, -(-columns // unit)) * unit

    def _tiles(self, rows: int, columns: int) -> Layout:
        """Three sizes: the longest side as it is wanted; sides of whole tiles; one tile."""
        source, side = (rows, columns), self.side
        longest, shape = self.longest, columns / rows
        first = (_even(int(longest / shape)), longest) if columns >= rows else (longest, _even(int(longest * shape)))
        first = max(first[0], 1), max(first[1], 1)
        if max(first) > _LONGEST:
            shape = first[1] / first[0]
            first = (int(_LONGEST / shape), _LONGEST) if first[1] >= first[0] else (_LONGEST, int(_LONGEST * shape))
            first = max(first[0], 1), max(first[1], 1)
        rows, columns = first
        shape = columns / rows
        if columns >= rows:
            columns = -(-columns // side) * side
            rows = math.ceil(int(columns / shape) / side) * side
        else:
            rows = -(-rows // side) * side
            columns = math.ceil(int(rows * shape) / side) * side
        # A picture that is very long or wide has a side of nothing otherwise.
        rows, columns = max(rows, side), max(columns, side)
        whole = Tile(2, 0, 0, side, side)
        if rows <= side and columns <= side:
            whole = Tile(1, 0, 0, side, side)
            return Layout(source, (first, (side, side)), (whole,), self.patch, self.merge)
        grid = rows // side, columns // side
        parts = [Tile(1, i * side, j * side, side, side) for i in range(grid[0]) for j in range(grid[1])]
        sizes = (first, (rows, columns), (side, side))
        return Layout(source, sizes, (*parts, whole), self.patch, self.merge, grid)

    def text(self, layout: Layout) -> str:
        """What a picture is in the text of a prompt, in place of `placeholder`."""
        texts = self.texts
        if self.sizing == "tiles":
            around, each = texts["around"], self.token * (layout.tokens // len(layout.tiles))
            rows, columns = layout.tile_grid
            parts = "".join(
                "".join(f"{around}<row_{i + 1}_col_{j + 1}>{each}" for j in range(columns)) + "\n" for i in range(rows)
            )
            return f"{parts}{chr(10) if rows else ''}{around}{texts['whole']}{each}{around}"
        if "row_end" in texts:  # each row of tokens but the last ends with a token
            rows, columns = layout.grid
            return texts["row_end"].join([self.token * columns] * rows) + texts.get("end", "")
        return f"{texts.get('begin', '')}{self.token * layout.tokens}{texts.get('end', '')}"


def _even(number: int) -> int:
    return number + number % 2
