"""gpt-oss: attention sinks, a window in every second layer, and experts with biases and a clamped gate.

What files call the norm after attention is the one before the feed-forward network.
"""

from __future__ import annotations

from .dense import Dense
from .experts import Mixture
from .windows import local_layers

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_GPT_OSS = Dense(
    "gpt-oss",
    ffn_norm="post_attention_norm",
    sinks=True,
    biases=(*_ATTENTION, "ffn_gate_inp", *_EXPERTS),
    mixture=Mixture(normalise=False, gating="softmax_used", activation="swiglu_clamped"),
    finalize_config=lambda meta, config: local_layers(meta, config, period=2),
)
read, tensors, build, head = _GPT_OSS.read, _GPT_OSS.tensors, _GPT_OSS.build, _GPT_OSS.head
