"""OLMoE: norms of whole rows of q and k, and a mixture whose factors stay as they are."""

from __future__ import annotations

from .dense import Dense
from .experts import Mixture

_OLMOE = Dense("olmoe", row_norms=True, mixture=Mixture(normalise=False, own_width=False))
read, tensors, build, head = _OLMOE.read, _OLMOE.tensors, _OLMOE.build, _OLMOE.head
