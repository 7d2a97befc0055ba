"""Falcon 7B: attention and feed-forward network read the same layer norm, one head of keys and values, no gate."""

from __future__ import annotations

from .architecture import Config, Metadata
from .dense import NORMS, QKV, Dense

_LAYOUT = "jploski"  # all queries, all keys, all values. Every published file says so


def _complete(own: Metadata, c: Config) -> Config:
    if (layout := own.get("tensor_data_layout")) != _LAYOUT:
        raise own.wrong("tensor_data_layout", repr(_LAYOUT), layout)
    return c


_FALCON = Dense(
    "falcon",
    norm="layer_norm",
    ffn_input="attn_norm",
    activation="gelu_erf",
    joined=QKV,
    biases=NORMS,
    complete=_complete,
)
read, tensors, build, head = _FALCON.read, _FALCON.tensors, _FALCON.build, _FALCON.head
