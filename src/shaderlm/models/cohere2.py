"""Command R7B and Command A: as Command R, with a sliding window in three of four layers.

The fourth does not rotate positions.
"""

from __future__ import annotations

from .architecture import Config, Metadata
from .command_r import scaled_logits
from .dense import Dense
from .windows import local_layers


def _finalize_config(meta: Metadata, config: Config) -> Config:
    return local_layers(meta, scaled_logits(meta, config), period=4, full_rope=None)


_COHERE2 = Dense(
    "cohere2", interleaved=True, norm="layer_norm", ffn_input="attn_norm", finalize_config=_finalize_config
)
read, tensors, build, head = _COHERE2.read, _COHERE2.tensors, _COHERE2.build, _COHERE2.head
