"""Gemma 2: norms before and after, GELU, capped scores and logits, a window in every second layer."""

from __future__ import annotations

import math
from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense
from .windows import local_layers

_LAYERS_27B = 46


def _finalize_config(meta: Metadata, config: Config) -> Config:
    # The scores of the largest of them are scaled by another width than that of a head, which no GGUF file says.
    width = config.hidden // config.heads if config.layers == _LAYERS_27B else config.head_width
    scores = meta.number("attention.scale") if meta.get("attention.scale") else 1 / math.sqrt(width)
    factors = Factors(
        embedding=math.sqrt(config.hidden),
        scores=scores,
        score_cap=meta.number("attn_logit_softcapping", 50.0),
        logit_cap=meta.number("final_logit_softcapping", 30.0),
    )
    return local_layers(meta, replace(config, factors=factors), period=2, default=4096)


_GEMMA2 = Dense("gemma2", norms_after=True, activation="gelu_mul", finalize_config=_finalize_config)
read, tensors, build, head = _GEMMA2.read, _GEMMA2.tensors, _GEMMA2.build, _GEMMA2.head
