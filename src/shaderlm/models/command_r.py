"""Command R: attention and feed-forward network read the same layer norm, and logits have a factor."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense


def scaled_logits(meta: Metadata, config: Config) -> Config:
    """Logits are multiplied with logit_scale."""
    return replace(config, factors=Factors(logits=meta.number("logit_scale")))


_COMMAND_R = Dense(
    "command-r", interleaved=True, norm="layer_norm", ffn_input="attn_norm", finalize_config=scaled_logits
)
read, tensors, build, head = _COMMAND_R.read, _COMMAND_R.tensors, _COMMAND_R.build, _COMMAND_R.head
