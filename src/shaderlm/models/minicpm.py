"""MiniCPM 1B and 2B: as llama, with factors for embeddings, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense


def _finalize_config(meta: Metadata, config: Config) -> Config:
    # Logits are divided by theirs.
    embedding, residual, logits = (meta.number(f"{key}_scale") for key in ("embedding", "residual", "logit"))
    return replace(config, factors=Factors(embedding, residual, 1 / logits))


_MINICPM = Dense("minicpm", interleaved=True, positions="long_rope", finalize_config=_finalize_config)
read, tensors, build, head = _MINICPM.read, _MINICPM.tensors, _MINICPM.build, _MINICPM.head
