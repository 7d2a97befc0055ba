"""Tensors of Gemma 4's towers as the graph reads them, from folders and from mmproj files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import ModelError
from .tower_tensors import F32, VisionTensor

_SOUND = ("a.", "mm.a.")  # of the part that hears
_BOUND = re.compile(r"\.(input|output)_(min|max)$")
_LARGEST = 3.0e38


def gemma4_tensors(tensors: Mapping[str, VisionTensor], heads: Any) -> dict[str, VisionTensor]:
    """Patches and heads in the order of the graph; no part that hears."""
    found = {name: each for name, each in tensors.items() if not name.startswith(_SOUND)}
    if type(heads) is not int or heads < 1:
        raise ModelError(f"clip.vision.attention.head_count must be a whole number of at least 1, it is {heads!r:.40}")
    for name, each in found.items():
        if _BOUND.search(name) and math.prod(each.shape) == 1:
            found[name] = VisionTensor((1,), "f32", _changed(each, _finite))
        elif name.endswith((".attn_q.weight", ".attn_k.weight", ".attn_q_norm.weight", ".attn_k_norm.weight")):
            count = 1 if "_norm" in name else heads
            if not each.shape or each.shape[0] % (4 * count):
                raise ModelError(
                    f"{name} has the shape {list(each.shape)}: its rows are not four parts of {count} heads"
                )
            found[name] = VisionTensor(each.shape, each.kind, _changed(each, partial(_by_row, heads=count)))
        elif name == "v.std_bias":
            found[name] = VisionTensor(each.shape, "f32", _changed(each, _negative_shift))
        elif name == "v.patch_embd.weight" and len(each.shape) == 2:
            found[name] = VisionTensor(each.shape, each.kind, _changed(each, _by_channel))
    if (projection := found.pop("mm.input_projection.weight", None)) is not None:  # not transposed, as Gemma 3's is
        found["mm.embedding_projection.weight"] = projection
    return found


def _changed(tensor: VisionTensor, change: Callable[[F32], F32]) -> Callable[[], F32]:
    return lambda: np.ascontiguousarray(change(tensor.load()), np.float32)


def _finite(values: F32) -> F32:
    return np.clip(values.reshape(1), -_LARGEST, _LARGEST)


def _negative_shift(values: F32) -> F32:
    """What is added, where means are not multiplied by √hidden."""
    return -values / np.float32(values.size**0.5)


def _by_row(values: F32, heads: int) -> F32:
    """A head is [two halves by column, two by row]; here first halves come first, and rows before columns."""
    parts = values.reshape(heads, 4, -1)
    return parts[:, [2, 0, 3, 1]].reshape(values.shape)


def _by_channel(values: F32) -> F32:
    """[hidden, row, column, channel] → [hidden, channel, row, column]."""
    side = round((values.shape[1] / 3) ** 0.5)
    return values.reshape(len(values), side, side, 3).transpose(0, 3, 1, 2).reshape(values.shape)
