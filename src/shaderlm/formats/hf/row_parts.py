"""What rows of several models share: keys and names of experts, multipliers, and why a key may be left aside."""

from __future__ import annotations

from collections.abc import Mapping

QWEN_EXPERTS: Mapping[str, str] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{e}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{e}.up_proj": "ffn_up_exps",
    "mlp.experts.{e}.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
EXPERT_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("expert_count",),
    "num_local_experts": ("expert_count",),
    "num_experts_per_tok": ("expert_used_count",),
}
QWEN_EXPERT_KEYS: Mapping[str, tuple[str, ...]] = {
    **EXPERT_KEYS,
    "moe_intermediate_size": ("expert_feed_forward_length",),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length",),
}
PREDICTS_FURTHER = "predicts further tokens, and is left aside"
MULTIPLIERS: Mapping[str, tuple[str, ...]] = {
    "embedding_multiplier": ("embedding_scale",),
    "residual_multiplier": ("residual_scale",),
    "attention_multiplier": ("attention.scale",),
    "logits_scaling": ("logit_scale",),
}
# Of models that also read images, where the text model is a part. Images are not read.
FOR_IMAGES = "for images; without them, text_config says all"
IMAGE_KEYS = ("vision_config", "image_token_index", "image_token_id")
QWEN_IMAGE_TOKENS = ("video", "vision", "vision_start", "vision_end")
SAYS_PRECISION = "says how precisely a program computes"
