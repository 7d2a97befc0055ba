"""What is true of all towers of a family, by the `clip.projector_type` of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One family.

    sizing, filter, placeholder, token, texts: of its processor. positions: a row of `places.POSITIONS`, how learned
    positions of patches are found. merger: a row of `mergers.MERGERS`, what follows the last layer.
    """

    sizing: Any
    filter: Any
    placeholder: str
    token: str
    merger: str
    positions: str = "table"
    rope: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    several_axes: bool = False  # the text rotates positions on three axes
    sees_itself: bool = False  # rows of an image in the text see all of it
    merge: int = 0  # patches on a side of a token, where files may not say


FAMILIES: Mapping[str, Family] = {
    "qwen3vl_merger": Family(
        "area",
        "bicubic",
        "<|image_pad|>",
        "<|image_pad|>",
        "norm_mlp",
        positions="interpolated",
        rope=True,
        several_axes=True,
        merge=2,
    ),
    "gemma3": Family(
        "square",
        "bilinear",
        "<start_of_image>",
        "<image_soft_token>",
        "mean_norm_linear",
        texts={"begin": "\n\n<start_of_image>", "end": "<end_of_image>\n\n"},
        sees_itself=True,
        merge=4,
    ),
    "idefics3": Family(
        "tiles",
        "lanczos",
        "<image>",
        "<image>",
        "linear",
        texts={"around": "<fake_token_around_image>", "whole": "<global-img>"},
    ),
}
