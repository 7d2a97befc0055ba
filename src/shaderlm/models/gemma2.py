"""Gemma 2: norms before and after, GELU, capped scores and logits, a window in every second layer."""

from __future__ import annotations

import math
from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense
from .windows import local_layers

_LAYERS_27B = 46


def _complete(own: Metadata, c: Config) -> Config:
    # The scores of the largest of them are scaled by another width than that of a head, which no GGUF file says.
    width = c.hidden // c.heads if c.layers == _LAYERS_27B else c.head_width
    scores = own.number("attention.scale") if own.get("attention.scale") else 1 / math.sqrt(width)
    factors = Factors(
        embedding=math.sqrt(c.hidden),
        scores=scores,
        score_cap=own.number("attn_logit_softcapping", 50.0),
        logit_cap=own.number("final_logit_softcapping", 30.0),
    )
    return local_layers(own, replace(c, factors=factors), period=2, default=4096)


_GEMMA2 = Dense("gemma2", norms_after=True, activation="gelu_mul", complete=_complete)
read, tensors, build, head = _GEMMA2.read, _GEMMA2.tensors, _GEMMA2.build, _GEMMA2.head
