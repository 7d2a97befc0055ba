"""StableLM 3B and StableLM 2: layer norms, and a part of each head is rotated.

Where a layer has no norm before its feed-forward network, the network reads what attention does.
"""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Metadata
from .dense import NORMS, Dense


def _finalize_config(meta: Metadata, config: Config) -> Config:
    meta.get("use_parallel_residual")  # converters write true where the model does not say; the norms are decisive
    parallel, key = "blk.0.ffn_norm.weight" not in config.shapes, "config.use_parallel_residual"
    given = meta.get(key, parallel)  # of a folder
    if given is not parallel:
        raise meta.wrong(key, f"{parallel}, by the norms of the layers", given)
    return replace(config, ffn_input="attn_norm") if parallel else config


_STABLELM = Dense("stablelm", norm="layer_norm", biases=NORMS, finalize_config=_finalize_config)
read, tensors, build, head = _STABLELM.read, _STABLELM.tensors, _STABLELM.build, _STABLELM.head
