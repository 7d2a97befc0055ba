"""SmolLM3: as llama, but positions are not rotated in every fourth layer, which no file says."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Layer, Metadata
from .dense import Dense


def _finalize_config(meta: Metadata, config: Config) -> Config:
    return replace(config, per_layer=tuple(Layer(rope=None) if i % 4 == 3 else Layer() for i in range(config.layers)))


_SMOLLM3 = Dense("smollm3", interleaved=True, finalize_config=_finalize_config)
read, tensors, build, head = _SMOLLM3.read, _SMOLLM3.tensors, _SMOLLM3.build, _SMOLLM3.head
