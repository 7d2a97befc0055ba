"""Command R7B and Command A: as Command R, with a sliding window in three of four layers.

The fourth does not rotate positions.
"""

from __future__ import annotations

from .architecture import Config, Metadata
from .command_r import scaled_logits
from .dense import Dense
from .windows import local_layers


def _complete(own: Metadata, c: Config) -> Config:
    return local_layers(own, scaled_logits(own, c), period=4, full_rope=None)


_COHERE2 = Dense("cohere2", interleaved=True, norm="layer_norm", ffn_input="attn_norm", complete=_complete)
read, tensors, build, head = _COHERE2.read, _COHERE2.tensors, _COHERE2.build, _COHERE2.head
