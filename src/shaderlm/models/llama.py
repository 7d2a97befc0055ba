"""Llama 1 to 3.x, Mistral, Mixtral, SmolLM2: decoders whose rope pairs neighbours, as GGUF stores these models.

Mistral 7B v0.1 has a sliding window, which files converted for llama.cpp do not mention.
"""

from __future__ import annotations

from .dense import Dense
from .experts import Mixture
from .windows import all_layers

_LLAMA = Dense("llama", interleaved=True, finalize_config=all_layers, mixture=Mixture(always=False, own_width=False))
read, tensors, build, head = _LLAMA.read, _LLAMA.tensors, _LLAMA.build, _LLAMA.head
