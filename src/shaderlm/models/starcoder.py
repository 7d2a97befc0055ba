"""StarCoder, the first, and SantaCoder: as GPT-2 with one head of keys and values."""

from __future__ import annotations

from .architecture import Config, Metadata
from .dense import NORMS, QKV, Dense, with_gelu


def _finalize_config(meta: Metadata, config: Config) -> Config:
    return with_gelu(meta, config, "config.activation_function")


_STARCODER = Dense(
    "starcoder",
    norm="layer_norm",
    activation="gelu",
    positions="learned",
    packed_tensors=QKV,
    biases=(*NORMS, "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    finalize_config=_finalize_config,
)
read, tensors, build, head = _STARCODER.read, _STARCODER.tensors, _STARCODER.build, _STARCODER.head
