"""EXAONE 3 and 3.5: as llama, and rope pairs the halves of a head."""

from __future__ import annotations

from .dense import Dense

_EXAONE = Dense("exaone")
read, tensors, build, head = _EXAONE.read, _EXAONE.tensors, _EXAONE.build, _EXAONE.head
