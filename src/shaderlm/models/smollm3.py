"""SmolLM3: as llama, but positions are not rotated in every fourth layer, which no file says."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Layer, Metadata
from .dense import Dense


def _complete(own: Metadata, c: Config) -> Config:
    return replace(c, per_layer=tuple(Layer(rope=None) if i % 4 == 3 else Layer() for i in range(c.layers)))


_SMOLLM3 = Dense("smollm3", interleaved=True, complete=_complete)
read, tensors, build, head = _SMOLLM3.read, _SMOLLM3.tensors, _SMOLLM3.build, _SMOLLM3.head
