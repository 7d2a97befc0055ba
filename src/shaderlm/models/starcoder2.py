"""StarCoder2: layer norms and biases of norms and mostly of matrices, a feed-forward network without a gate."""

from __future__ import annotations

from .dense import NORMS, Dense
from .windows import all_layers

_STARCODER2 = Dense("starcoder2", norm="layer_norm", activation="gelu", biases=NORMS, finalize_config=all_layers)
read, tensors, build, head = _STARCODER2.read, _STARCODER2.tensors, _STARCODER2.build, _STARCODER2.head
