"""InternLM2 and 2.5: as llama."""

from __future__ import annotations

from .dense import Dense

_INTERNLM2 = Dense("internlm2", interleaved=True)
read, tensors, build, head = _INTERNLM2.read, _INTERNLM2.tensors, _INTERNLM2.build, _INTERNLM2.head
