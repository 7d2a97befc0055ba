"""GPT-NeoX and Pythia: layer norms and biases, a part of each head is rotated, no gate.

The feed-forward network of most reads the norm of a layer's input, without what attention adds to it.
"""

from __future__ import annotations

from dataclasses import replace

from .architecture import Config, Metadata
from .dense import NORMS, QKV, Dense, with_gelu


def _finalize_config(meta: Metadata, config: Config) -> Config:
    parallel = meta.get("use_parallel_residual")
    if not isinstance(parallel, bool):
        raise meta.wrong("use_parallel_residual", "true or false", parallel)
    return with_gelu(meta, replace(config, ffn_input="input" if parallel else "sum"), "config.hidden_act")


_GPTNEOX = Dense(
    "gptneox",
    norm="layer_norm",
    activation="gelu_erf",
    packed_tensors=QKV,
    biases=(*NORMS, "ffn_up", "ffn_down"),
    finalize_config=_finalize_config,
)
read, tensors, build, head = _GPTNEOX.read, _GPTNEOX.tensors, _GPTNEOX.build, _GPTNEOX.head
