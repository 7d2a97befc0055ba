"""The numbers of a tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config import ImageRows, Shapes
from .families import Family

_BLOCK = 32


@dataclass(frozen=True)
class Sizes:
    """What its graph follows from, with the formats of its tensors as they will lie on the device."""

    family: Family
    hidden: int
    heads: int
    ffn: int
    layers: int
    patch: int
    merge: int
    side: int  # of the table of positions, in patches
    positions: int  # rows, and columns, that have one; 0: they are a table of places
    eps: float
    merger_eps: float
    theta: float  # of rope
    activation: str
    out: int  # width of the text model
    deepstack: tuple[int, ...]  # layers after which features are taken, too
    window: int  # tokens on a side of a window; 0: there are none
    full: tuple[int, ...]  # layers that see the whole picture all the same
    text_sees_images: bool | None  # in both directions, where a file says it
    input_token: int  # whose inputs of layers rows of images have
    formats: Mapping[str, str] = field(repr=False)
    shapes: Shapes = field(repr=False)

    @property
    def levels(self) -> int:
        """Features of a token: those after the last layer, and those of earlier ones."""
        return 1 + len(self.deepstack)

    def image_rows(self, *, layer_inputs: bool = False) -> ImageRows:
        """What the text model does with rows of images. layer_inputs: its layers have inputs of their own.

        Where a file does not say whether images see themselves, that decides.
        """
        family, said = self.family, self.text_sees_images
        sees_itself = family.sees_itself and (not layer_inputs if said is None else said)
        token = self.input_token if layer_inputs else None
        return ImageRows(self.levels, sees_itself, family.several_axes, family.in_windows, token)

    @property
    def class_rows(self) -> int:
        """Rows before those of the patches: one that stands for the whole picture, or none."""
        return int("v.class_embd" in self.shapes)

    @property
    def head(self) -> int:
        """Values of a head."""
        return self.hidden // self.heads

    @property
    def patch_width(self) -> int:
        """Values of a patch, with zeros up to whole blocks."""
        return whole_blocks(3 * self.patch**2)


def whole_blocks(columns: int) -> int:
    """Kernels read matrices in blocks of so many columns."""
    return -(-columns // _BLOCK) * _BLOCK
