"""Qwen2 and Qwen2.5: biases of queries, keys and values, and rope pairs the halves of a head."""

from __future__ import annotations

from .dense import Dense

_QWEN2 = Dense("qwen2", biases=("attn_q", "attn_k", "attn_v"))
read, tensors, build, head = _QWEN2.read, _QWEN2.tensors, _QWEN2.build, _QWEN2.head
