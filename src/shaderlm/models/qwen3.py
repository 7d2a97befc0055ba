"""Qwen3, the dense ones: each head of queries and keys has a norm, and rope pairs the halves of a head.

Heads are as wide as the metadata says (128), whatever hidden / heads is.
"""

from __future__ import annotations

from .dense import Dense

_QWEN3 = Dense("qwen3", head_norms=True)
read, tensors, build, head = _QWEN3.read, _QWEN3.tensors, _QWEN3.build, _QWEN3.head
