"""StarCoder, the first, and SantaCoder: as GPT-2 with one head of keys and values."""

from __future__ import annotations

from .dense import QKV, Dense

_STARCODER = Dense("starcoder", norm="layer_norm", activation="gelu", positions="learned", joined=QKV)
read, tensors, build, head = _STARCODER.read, _STARCODER.tensors, _STARCODER.build, _STARCODER.head
