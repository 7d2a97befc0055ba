"""Layers at the end of a checkpoint that predict further tokens. They are left aside: no logits depend on them."""

from __future__ import annotations

import re

from ..errors import ModelError
from .config import Metadata, Shapes

_LAYER = re.compile(r"blk\.(\d+)\.(nextn\.)?")


def without_predictors(meta: Metadata, shapes: Shapes) -> tuple[int, Shapes, int]:
    """The number of layers that compute logits, the tensors without those of predictors, and how many these are.

    block_count of a GGUF file counts predictors, that of a folder does not. Their tensors tell in both.
    """
    layers, key = meta.whole("block_count", maximum=1024), "nextn_predict_layers"
    counted = meta.whole(key, maximum=1024) if meta.get(key) else 0
    if counted >= layers:
        raise ModelError(f"{meta.full(key)} must be less than block_count={layers}, the file has {counted}")
    matches = [match for name in shapes if (match := _LAYER.match(name))]
    predictors = {int(match[1]) for match in matches if match[2]}
    layers -= counted
    if counted and predictors != set(range(layers, layers + counted)):
        raise ModelError(
            f"{meta.full(key)} is {counted}: that many layers at the end predict further tokens. By their tensors, "
            f"these are {sorted(predictors)} of {layers + counted}"
        )
    early = [match.string for match in matches if match[2] and int(match[1]) < layers]
    if early:
        raise ModelError(
            f"the file has {early[0]}, of a layer that predicts further tokens. Such layers come after the {layers} "
            f"others, by {meta.full('block_count')} and {key}"
        )
    if not predictors:
        return layers, shapes, 0
    kept = {
        name: shape
        for name, shape in shapes.items()
        if not (match := _LAYER.match(name)) or int(match[1]) not in predictors
    }
    return layers, kept, len(predictors)
