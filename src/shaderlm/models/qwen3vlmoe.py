"""The text of Qwen3-VL with experts: as qwen3moe. Images are not read."""

from __future__ import annotations

from .dense import Dense
from .experts import Mixture
from .qwen2vl import only_text

_QWEN3VLMOE = Dense("qwen3vlmoe", head_norms=True, mixture=Mixture(), finalize_config=only_text)
read, tensors, build, head = _QWEN3VLMOE.read, _QWEN3VLMOE.tensors, _QWEN3VLMOE.build, _QWEN3VLMOE.head
