"""GPT-2: learned positions, layer norms and biases, queries, keys and values in one matrix, no gate."""

from __future__ import annotations

from .dense import NORMS, QKV, Dense

_GPT2 = Dense(
    "gpt2",
    norm="layer_norm",
    activation="gelu",
    positions="learned",
    packed_tensors=QKV,
    biases=(*NORMS, "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
read, tensors, build, head = _GPT2.read, _GPT2.tensors, _GPT2.build, _GPT2.head
