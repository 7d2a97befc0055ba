"""The text of Qwen2-VL and Qwen2.5-VL: as qwen2. Images are not read."""

from __future__ import annotations

from .architecture import Config, Metadata
from .dense import Dense


def only_text(meta: Metadata, config: Config) -> Config:
    """Without images, all dimensions of a position are alike, and no layer adds features of images."""
    meta.get("rope.dimension_sections")
    meta.get("n_deepstack_layers")
    return config


_QWEN2VL = Dense("qwen2vl", biases=("attn_q", "attn_k", "attn_v"), finalize_config=only_text)
read, tensors, build, head = _QWEN2VL.read, _QWEN2VL.tensors, _QWEN2VL.build, _QWEN2VL.head
