"""Granite 3 and 4, the dense ones: as llama, with factors for embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense


def read_factors(meta: Metadata, config: Config) -> Config:
    """The factors of all models of this family."""
    # 0 stands for "not set". The logits are divided by theirs.
    given = {
        key: meta.number(key) if meta.get(key) else None for key in ("embedding_scale", "residual_scale", "logit_scale")
    }
    embedding, residual, logits = given.values()
    scores = meta.number("attention.scale") if meta.get("attention.scale") else None
    return replace(config, factors=Factors(embedding or 1.0, residual or 1.0, 1 / (logits or 1.0), scores))


_GRANITE = Dense("granite", interleaved=True, finalize_config=read_factors)
read, tensors, build, head = _GRANITE.read, _GRANITE.tensors, _GRANITE.build, _GRANITE.head
