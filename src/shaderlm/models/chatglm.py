"""GLM-4-9B and ChatGLM: half of a head is rotated in neighbouring pairs, gate and up are in one matrix."""

from __future__ import annotations

from .dense import GATE_UP, QKV, Dense

_CHATGLM = Dense("chatglm", interleaved=True, packed_tensors={**QKV, **GATE_UP})
read, tensors, build, head = _CHATGLM.read, _CHATGLM.tensors, _CHATGLM.build, _CHATGLM.head
