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


def _complete(own: Metadata, c: Config) -> Config:
    # The scores of the largest of them are scaled by another width than that of a head, which no GGUF file says.
    width = c.hidden // c.heads if c.layers == _LAYERS_27B else c.head_width
    scores = own.number("attention.scale") if own.get("attention.scale") else 1 / math.sqrt(width)
    cap = own.number("final_logit_softcapping") if own.get("final_logit_softcapping") else 0.0
    factors = Factors(embedding=math.sqrt(c.hidden), scores=scores, logit_cap=cap)
    theta = own.number("rope.freq_base_swa", 10000.0)
    return local_layers(own, replace(c, factors=factors), period=6, local_theta=theta)


_GEMMA3 = Dense("gemma3", head_norms=True, norms_after=True, activation="gelu_mul", complete=_complete)
read, tensors, build, head = _GEMMA3.read, _GEMMA3.tensors, _GEMMA3.build, _GEMMA3.head
