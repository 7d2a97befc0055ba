"""Mistral Small 3.1 on, Ministral 3, Devstral, Magistral: as llama.

Queries of Ministral 3 are scaled from the original context on (16,384 tokens), which is not supported: it is the
longest context.
"""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Metadata
from .dense import Dense


def _finalize_config(meta: Metadata, config: Config) -> Config:
    if not meta.get("attention.temperature_scale"):
        return config
    meta.number("attention.temperature_scale")
    original = meta.whole("rope.scaling.original_context_length")
    return replace(config, context=min(config.context, meta.whole("attention.temperature_length", original)))


_MISTRAL3 = Dense("mistral3", interleaved=True, finalize_config=_finalize_config)
read, tensors, build, head = _MISTRAL3.read, _MISTRAL3.tensors, _MISTRAL3.build, _MISTRAL3.head
