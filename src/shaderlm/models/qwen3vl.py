"""The text of Qwen3-VL, the dense ones: as qwen3. Images are not read."""

from __future__ import annotations

from .dense import Dense
from .qwen2vl import only_text

_QWEN3VL = Dense("qwen3vl", head_norms=True, finalize_config=only_text)
read, tensors, build, head = _QWEN3VL.read, _QWEN3VL.tensors, _QWEN3VL.build, _QWEN3VL.head
