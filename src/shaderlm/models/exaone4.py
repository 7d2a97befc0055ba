"""EXAONE 4: no norms before, but after attention and feed-forward network, and of every head of q and k.

The largest has a sliding window in three of four layers. The others of its layers do not rotate positions.
"""

from __future__ import annotations

from .dense import Dense
from .windows import local_layers

_EXAONE4 = Dense(
    "exaone4",
    head_norms=True,
    norms_before=False,
    norms_after=True,
    finalize_config=lambda meta, config: local_layers(meta, config, period=4, default=0, full_rope=None),
)
read, tensors, build, head = _EXAONE4.read, _EXAONE4.tensors, _EXAONE4.build, _EXAONE4.head
