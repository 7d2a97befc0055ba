"""StarCoder, the first, and SantaCoder: as GPT-2 with one head of keys and values."""

from __future__ import annotations

from .architecture import Config, Metadata
from .dense import NORMS, QKV, Dense, with_gelu


def _complete(own: Metadata, c: Config) -> Config:
    return with_gelu(own, c, "config.activation_function")


_STARCODER = Dense(
    "starcoder",
    norm="layer_norm",
    activation="gelu",
    positions="learned",
    joined=QKV,
    biases=(*NORMS, "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    complete=_complete,
)
read, tensors, build, head = _STARCODER.read, _STARCODER.tensors, _STARCODER.build, _STARCODER.head
