"""ERNIE 4.5, the dense ones: as llama."""

from __future__ import annotations

from .dense import Dense

_ERNIE = Dense("ernie4_5", interleaved=True)
read, tensors, build, head = _ERNIE.read, _ERNIE.tensors, _ERNIE.build, _ERNIE.head
