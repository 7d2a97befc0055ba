"""Gemma, the first: as llama with GELU, scaled embeddings and heads as wide as the metadata says."""

from __future__ import annotations

import math
from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense


def _finalize_config(meta: Metadata, config: Config) -> Config:
    return replace(config, factors=Factors(embedding=math.sqrt(config.hidden)))


_GEMMA = Dense("gemma", activation="gelu_mul", finalize_config=_finalize_config)
read, tensors, build, head = _GEMMA.read, _GEMMA.tensors, _GEMMA.build, _GEMMA.head
