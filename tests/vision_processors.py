"""What the processors of Qwen2.5-VL and Gemma 4 make of pictures, with the rules for sizes of `transformers`.

Their pixels are resampled as torchvision does it. Used by `make_vision_checkpoints` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

Pixels = NDArray[np.float32]


_POOL = 3  # patches on a side of a token of Gemma 4


class Family(NamedTuple):
    """pixels: of a picture, [3, rows, columns]. text: in place of what a chat template writes. inputs: of the model."""

    pixels: Callable[[Any, NDArray[np.uint8]], Pixels]
    text: Callable[[Any, Pixels], str]
    inputs: Callable[[Any, list[Pixels]], Mapping[str, Any]]


def resized(pixels: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.uint8]:
    """By PyTorch, cubic: [3, rows, columns]."""
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
    if tensor.shape[-2:] != (rows, columns):
        tensor = torch.nn.functional.interpolate(tensor, (rows, columns), mode="bicubic", antialias=True)
    return np.asarray(tensor[0].numpy())


def _qwen_pixels(row: Any, pixels: NDArray[np.uint8]) -> Pixels:
    given = row.processor
    unit = given["patch_size"] * given["merge_size"]
    size = smart_resize(*pixels.shape[:2], unit, given["min_pixels"], given["max_pixels"])
    mean, std = (np.array(given[f"image_{key}"], np.float32)[:, None, None] for key in ("mean", "std"))
    return ((resized(pixels, *size).astype(np.float32) / np.float32(255) - mean) / std).astype(np.float32)


def _qwen_text(row: Any, pixels: Pixels) -> str:
    unit = row.processor["patch_size"] * row.processor["merge_size"]
    count = pixels.shape[1] // unit * (pixels.shape[2] // unit)
    return f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"


def _qwen_inputs(row: Any, pixels: list[Pixels]) -> Mapping[str, Any]:
    """Patches in the order of tokens, the same at two moments."""
    patch, merge = row.processor["patch_size"], row.processor["merge_size"]
    rows, grids = [], []
    for each in pixels:
        high, wide = each.shape[1] // patch, each.shape[2] // patch
        cut = each.reshape(3, high // merge, merge, patch, wide // merge, merge, patch)
        cut = cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(high * wide, 3, 1, patch * patch)
        rows.append(np.repeat(cut, 2, axis=2).reshape(high * wide, -1))
        grids.append([1, high, wide])
    return {"pixel_values": torch.from_numpy(np.concatenate(rows)), "image_grid_thw": torch.tensor(grids)}


def _gemma_pixels(row: Any, pixels: NDArray[np.uint8]) -> Pixels:
    """Twice what the processor gives, less one: the model does that first."""
    size = get_aspect_ratio_preserving_size(
        *pixels.shape[:2], row.config["vision_config"]["patch_size"], row.processor["max_soft_tokens"] * _POOL**2, _POOL
    )
    return 2 * (resized(pixels, *size).astype(np.float32) / np.float32(255) - np.float32(0.5))


def _gemma_text(row: Any, pixels: Pixels) -> str:
    count = pixels[0].size // (row.config["vision_config"]["patch_size"] * _POOL) ** 2
    return f"<|image>{'<|image|>' * count}<image|>"


def _gemma_inputs(row: Any, pixels: list[Pixels]) -> Mapping[str, Any]:
    """Patches row by row, column and row of each; −1 for those that pad."""
    patch, most = row.config["vision_config"]["patch_size"], row.processor["max_soft_tokens"] * _POOL**2
    rows, places = [], []
    for each in pixels:
        high, wide = each.shape[1] // patch, each.shape[2] // patch
        cut = (each / 2 + np.float32(0.5)).reshape(3, high, patch, wide, patch).transpose(1, 3, 2, 4, 0)
        grid = np.stack(np.meshgrid(np.arange(wide), np.arange(high)), -1).reshape(-1, 2)
        padding = ((0, most - high * wide), (0, 0))
        rows.append(np.pad(cut.reshape(high * wide, -1), padding))
        places.append(np.pad(grid, padding, constant_values=-1))
    return {"pixel_values": torch.from_numpy(np.stack(rows)), "image_position_ids": torch.from_numpy(np.stack(places))}


FAMILIES: Mapping[str, Family] = {
    "Qwen2_5_VL": Family(_qwen_pixels, _qwen_text, _qwen_inputs),
    "Gemma4": Family(_gemma_pixels, _gemma_text, _gemma_inputs),
}
