"""Phi-1, 1.5 and 2: attention and feed-forward network read the same layer norm, biases everywhere, no gate."""

from __future__ import annotations

from .dense import NORMS, QKV, Dense

_PHI2 = Dense(
    "phi2",
    norm="layer_norm",
    ffn_input="attn_norm",
    activation="gelu",
    output_bias=True,
    packed_tensors=QKV,
    biases=(*NORMS, "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"),
)
read, tensors, build, head = _PHI2.read, _PHI2.tensors, _PHI2.build, _PHI2.head
