"""Command R: attention and feed-forward network read the same layer norm, and logits have a factor."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Factors, Metadata
from .dense import Dense


def scaled_logits(own: Metadata, c: Config) -> Config:
    """Logits are multiplied with logit_scale."""
    return replace(c, factors=Factors(logits=own.number("logit_scale")))


_COMMAND_R = Dense("command-r", interleaved=True, norm="layer_norm", ffn_input="attn_norm", complete=scaled_logits)
read, tensors, build, head = _COMMAND_R.read, _COMMAND_R.tensors, _COMMAND_R.build, _COMMAND_R.head
