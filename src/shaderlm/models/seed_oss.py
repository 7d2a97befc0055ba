"""Seed-OSS: as qwen2, and files call the norm before the feed-forward network post_attention_norm."""

from __future__ import annotations

from .dense import Dense

_SEED_OSS = Dense("seed_oss", ffn_norm="post_attention_norm", biases=("attn_q", "attn_k", "attn_v"))
read, tensors, build, head = _SEED_OSS.read, _SEED_OSS.tensors, _SEED_OSS.build, _SEED_OSS.head
