"""OLMo 2 and 3: no norms before, but after attention and feed-forward network, and of whole rows of q and k.

OLMo 3 has a sliding window in three of four layers, whose positions are never scaled.
"""

from __future__ import annotations

from .dense import Dense
from .windows import local_layers

_OLMO2 = Dense(
    "olmo2",
    norms_before=False,
    norms_after=True,
    row_norms=True,
    finalize_config=lambda meta, config: local_layers(meta, config, period=4, default=0, local_theta=config.rope.theta),
)
read, tensors, build, head = _OLMO2.read, _OLMO2.tensors, _OLMO2.build, _OLMO2.head
