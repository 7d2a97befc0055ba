"""Granite with experts: granite with a mixture in every layer, and in some files a network for all rows beside it."""

from __future__ import annotations

from .dense import Dense
from .experts import Mixture
from .granite import read_factors

# Factors are the softmax over the chosen experts: the same as that over all, made to add up to 1.
_MIXTURE = Mixture(own_width=False, shared="optional")
_GRANITEMOE = Dense("granitemoe", interleaved=True, mixture=_MIXTURE, finalize_config=read_factors)
read, tensors, build, head = _GRANITEMOE.read, _GRANITEMOE.tensors, _GRANITEMOE.build, _GRANITEMOE.head
