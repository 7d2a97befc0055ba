"""StableLM 3B and StableLM 2: layer norms, and a part of each head is rotated.

Where a layer has no norm before its feed-forward network, the network reads what attention does.
"""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Metadata
from .dense import NORMS, Dense


def _complete(own: Metadata, c: Config) -> Config:
    own.get("use_parallel_residual")  # converters write true where the model does not say; the norms are decisive
    return c if "blk.0.ffn_norm.weight" in c.shapes else replace(c, ffn_input="attn_norm")


_STABLELM = Dense("stablelm", norm="layer_norm", biases=NORMS, complete=_complete)
read, tensors, build, head = _STABLELM.read, _STABLELM.tensors, _STABLELM.build, _STABLELM.head
