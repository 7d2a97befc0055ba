"""Gemma 3, text: as Gemma 2 without caps, with norms of heads.

Five of six layers have a window and a rope of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense
from .windows import local_layers

_LAYERS_27B = 62


def _finalize_config(meta: Metadata, config: Config) -> Config:
    # The scores of the largest of them are scaled by another width than that of a head, which no GGUF file says.
    width = config.hidden // config.heads if config.layers == _LAYERS_27B else config.head_width
    scores = meta.number("attention.scale") if meta.get("attention.scale") else 1 / math.sqrt(width)
    cap = meta.number("final_logit_softcapping") if meta.get("final_logit_softcapping") else 0.0
    factors = Factors(embedding=math.sqrt(config.hidden), scores=scores, logit_cap=cap)
    theta = meta.number("rope.freq_base_swa", 10000.0)
    return local_layers(meta, replace(config, factors=factors), period=6, local_theta=theta)


_GEMMA3 = Dense("gemma3", head_norms=True, norms_after=True, activation="gelu_mul", finalize_config=_finalize_config)
read, tensors, build, head = _GEMMA3.read, _GEMMA3.tensors, _GEMMA3.build, _GEMMA3.head
