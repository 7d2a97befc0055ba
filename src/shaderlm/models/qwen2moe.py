"""Qwen1.5 and Qwen2 with experts: a mixture whose factors stay as they are, and a gated network for all rows."""

from __future__ import annotations

from .dense import Dense
from .experts import Mixture

_QWEN2MOE = Dense("qwen2moe", mixture=Mixture(normalise=False, shared="gated"))
read, tensors, build, head = _QWEN2MOE.read, _QWEN2MOE.tensors, _QWEN2MOE.build, _QWEN2MOE.head
