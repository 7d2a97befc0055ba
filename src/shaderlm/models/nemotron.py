"""Nemotron 3 and 4, Minitron: layer norms, a part of each head is rotated, squares of positive values, no gate."""

from __future__ import annotations

from .dense import NORMS, Dense

_NEMOTRON = Dense("nemotron", norm="layer_norm", biases=NORMS, activation="relu_squared")
read, tensors, build, head = _NEMOTRON.read, _NEMOTRON.tensors, _NEMOTRON.build, _NEMOTRON.head
