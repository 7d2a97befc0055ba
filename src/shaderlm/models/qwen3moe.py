"""Qwen3 with experts: as qwen3, and every feed-forward network is a mixture whose factors add up to 1."""

from __future__ import annotations

from .dense import Dense
from .experts import Mixture

_QWEN3MOE = Dense("qwen3moe", head_norms=True, mixture=Mixture())
read, tensors, build, head = _QWEN3MOE.read, _QWEN3MOE.tensors, _QWEN3MOE.build, _QWEN3MOE.head
