"""Arcee's AFM: as llama, but squares of positive values in place of a gate."""

from __future__ import annotations

from .dense import Dense

_ARCEE = Dense("arcee", interleaved=True, activation="relu_squared")
read, tensors, build, head = _ARCEE.read, _ARCEE.tensors, _ARCEE.build, _ARCEE.head
