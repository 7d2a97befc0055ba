"""Hunyuan, the dense ones of 2025: heads of queries and keys are rotated, then normalised."""

from __future__ import annotations

from .dense import Dense

_HUNYUAN_DENSE = Dense("hunyuan-dense", head_norms=True, rope_first=True)
read, tensors = _HUNYUAN_DENSE.read, _HUNYUAN_DENSE.tensors
build, head = _HUNYUAN_DENSE.build, _HUNYUAN_DENSE.head
