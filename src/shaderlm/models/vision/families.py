"""What is true of all towers of a family, by the `clip.projector_type` of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """One family.

    sizing, filter, placeholder, token, texts: of its processor. positions: a row of `places.POSITIONS`, how learned
    positions of patches are found; "": there are none. rope: heads turn by row and column with the same frequencies,
    or those of columns lie between those of rows. merger: a row of `mergers.MERGERS`, what follows the last layer.
    activation: a row of `parts.ACTIVATIONS`, where the file does not say. gated: networks have a second product, which
    the first one's activation multiplies. layer: a row of `graph.LAYERS`.
    """

    sizing: Any
    filter: Any
    placeholder: str
    token: str
    merger: str
    positions: str = "table"
    rope: Literal["", "same", "between"] = ""
    norm: Literal["layer", "rms"] = "layer"
    first_norm: bool = False  # before the first layer
    bias: bool = True  # products in layers have one
    activation: str = "gelu_pytorch_tanh"
    gated: bool = False
    switched: bool = False  # GGUF files have switches for the activation
    patch_bias: bool = True
    layer: str = "plain"
    theta: float = 10000.0  # of rope, where files do not say
    centred: bool = False  # the tower reads twice what the processor gives, less one
    window: int = 0  # pixels on a side of a window, where files may not say; 0: all layers see the whole picture
    texts: Mapping[str, str] = field(default_factory=dict)
    several_axes: bool = False  # the text rotates positions on three axes
    sees_itself: bool = False  # rows of an image in the text see all of it
    in_windows: bool = False  # they do so in layers with a window alone
    merge: int = 0  # patches on a side of a token, where files may not say
    least_tokens: int = 64  # of a picture whose size decides, where files do not say
    most_tokens: int = 16384


FAMILIES: Mapping[str, Family] = {
    "qwen3vl_merger": Family(
        "area",
        "bicubic",
        "<|image_pad|>",
        "<|image_pad|>",
        "norm_mlp",
        positions="interpolated",
        rope="same",
        several_axes=True,
        merge=2,
    ),
    "qwen2.5vl_merger": Family(
        "area",
        "bicubic",
        "<|image_pad|>",
        "<|image_pad|>",
        "norm_mlp",
        positions="",
        rope="same",
        norm="rms",
        activation="silu",
        gated=True,
        patch_bias=False,
        window=112,
        several_axes=True,
        merge=2,
        least_tokens=4,
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
    "gemma4v": Family(
        "budget",
        "bicubic",
        "<|image|>",
        "<|image|>",
        "mean_linear",
        positions="rows_and_columns",
        rope="same",
        norm="rms",
        bias=False,
        gated=True,
        layer="sandwich",
        theta=100.0,
        centred=True,
        texts={"begin": "<|image>", "end": "<image|>"},
        sees_itself=True,
        in_windows=True,
        merge=3,
        most_tokens=280,
    ),
    "idefics3": Family(
        "tiles",
        "lanczos",
        "<image>",
        "<image>",
        "linear",
        texts={"around": "<fake_token_around_image>", "whole": "<global-img>"},
    ),
    "pixtral": Family(
        "longest",
        "bicubic",
        "[IMG]",
        "[IMG]",
        "merged_mlp",
        positions="",
        rope="between",
        norm="rms",
        first_norm=True,
        bias=False,
        activation="silu",
        gated=True,
        switched=True,
        patch_bias=False,
        texts={"row_end": "[IMG_BREAK]", "end": "[IMG_END]"},
        merge=1,
    ),
    "mlp": Family(
        "crop",
        "bicubic",
        "<image>",
        "<image>",
        "mlp",
        first_norm=True,
        patch_bias=False,
        activation="quick_gelu",
        switched=True,
        merge=1,
    ),
    # Files call it mlp, too.
    "mlp without class": Family("square", "bicubic", "<image>", "<image>", "mlp", merge=1),
}
