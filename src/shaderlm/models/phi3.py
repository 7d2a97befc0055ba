"""Phi-3 and Phi-4: queries, keys and values in one matrix, gate and up in another, factors for long contexts."""

from __future__ import annotations

from .dense import GATE_UP, QKV, Dense
from .windows import all_layers

_PHI3 = Dense("phi3", positions="long_rope", packed_tensors={**QKV, **GATE_UP}, finalize_config=all_layers)
read, tensors, build, head = _PHI3.read, _PHI3.tensors, _PHI3.build, _PHI3.head
