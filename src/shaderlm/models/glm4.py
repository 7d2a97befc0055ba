"""GLM-4-0414: norms before and after, half of a head rotated in neighbouring pairs, gate and up in one matrix."""

from __future__ import annotations

from .dense import GATE_UP, Dense

_GLM4 = Dense("glm4", interleaved=True, norms_after=True, packed_tensors=GATE_UP)
read, tensors, build, head = _GLM4.read, _GLM4.tensors, _GLM4.build, _GLM4.head
