"""Gemma, the first: as llama with GELU, scaled embeddings and heads as wide as the metadata says."""

from __future__ import annotations

import math
from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense


def _complete(own: Metadata, c: Config) -> Config:
    return replace(c, factors=Factors(embedding=math.sqrt(c.hidden)))


_GEMMA = Dense("gemma", activation="gelu_mul", complete=_complete)
read, tensors, build, head = _GEMMA.read, _GEMMA.tensors, _GEMMA.build, _GEMMA.head
