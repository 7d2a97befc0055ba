"""Llama 1 to 3.x, Mistral, SmolLM2: a dense decoder whose rope pairs neighbours, as GGUF stores these models."""

from __future__ import annotations

from .dense import Dense

_LLAMA = Dense("llama", interleaved=True)
read, tensors, build, head = _LLAMA.read, _LLAMA.tensors, _LLAMA.build, _LLAMA.head
