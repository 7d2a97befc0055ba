"""MiniCPM 1B and 2B: as llama, with factors for embeddings, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense


def _complete(own: Metadata, c: Config) -> Config:
    # Logits are divided by theirs.
    embedding, residual, logits = (own.number(f"{key}_scale") for key in ("embedding", "residual", "logit"))
    return replace(c, factors=Factors(embedding, residual, 1 / logits))


_MINICPM = Dense("minicpm", interleaved=True, positions="long_rope", complete=_complete)
read, tensors, build, head = _MINICPM.read, _MINICPM.tensors, _MINICPM.build, _MINICPM.head
