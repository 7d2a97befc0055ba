"""Nemotron 3 and 4, Minitron: layer norms, a part of each head is rotated, squares of positive values, no gate."""

from __future__ import annotations

from .dense import Dense

_NEMOTRON = Dense(
    "nemotron", norm="layer_norm", biases=("attn_norm", "ffn_norm", "output_norm"), activation="relu_squared"
)
read, tensors, build, head = _NEMOTRON.read, _NEMOTRON.tensors, _NEMOTRON.build, _NEMOTRON.head
