"""Falcon 7B: attention and feed-forward network read the same layer norm, one head of keys and values, no gate."""

from __future__ import annotations

from .architecture import Config, Metadata
from .dense import NORMS, QKV, Dense

_LAYOUT = "jploski"  # all queries, all keys, all values. Every published file says so


def _finalize_config(meta: Metadata, config: Config) -> Config:
    if (layout := meta.get("tensor_data_layout")) != _LAYOUT:
        raise meta.wrong("tensor_data_layout", repr(_LAYOUT), layout)
    return config


_FALCON = Dense(
    "falcon",
    norm="layer_norm",
    ffn_input="attn_norm",
    activation="gelu_erf",
    packed_tensors=QKV,
    biases=NORMS,
    finalize_config=_finalize_config,
)
read, tensors, build, head = _FALCON.read, _FALCON.tensors, _FALCON.build, _FALCON.head
