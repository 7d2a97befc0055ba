"""Hugging Face's models as GGUF has them: one row per `model_type` of config.json. Plain tables, and nothing of files.

A row names GGUF's architecture, and says where keys and tensors differ from what most models have. A key of config.json
that is in no table becomes the metadata key ARCHITECTURE.config.KEY, and a tensor that is in none keeps its name: the
architecture reads neither, and refuses the checkpoint as it does for a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# config.json → GGUF, without the architecture before it. `folder_config` has the keys that need more than a new name.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("embedding_length",),
    "num_hidden_layers": ("block_count",),
    "intermediate_size": ("feed_forward_length",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length", "attention.value_length"),
    "max_position_embeddings": ("context_length",),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon",),
}

# Keys that change no logits, and why.
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(
        ("_name_or_path", "_from_model_config", "transformers_version", "architectures", "auto_map", "model_type"),
        "says where the model comes from",
    ),
    **dict.fromkeys(("dtype", "torch_dtype", "attn_implementation", "_attn_implementation"), "tensors say it"),
    **dict.fromkeys(
        ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        "says what a program returns",
    ),
    **dict.fromkeys(
        (
            *("initializer_range", "attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout"),
            *("router_aux_loss_coef", "router_jitter_noise", "pretraining_tp", "max_window_layers"),
        ),
        "for training, or for switches that are off",
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"), "the tokenizer has them"),
    **dict.fromkeys(
        (
            *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "do_sample", "temperature"),
            *(
                "top_k",
                "top_p",
                "max_length",
                "min_length",
                "num_beams",
                "repetition_penalty",
                "chunk_size_feed_forward",
            ),
        ),
        "for other tasks, or for sampling",
    ),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm"), "there are such tensors, or none"),
}

# Keys that change what is computed, and the values with which they do not.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}

# Tensors outside of layers and in layers, without ".weight" and ".bias".
_WHOLE: Mapping[str, str] = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SANDWICH: Mapping[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_QWEN_EXPERTS: Mapping[str, str] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{e}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{e}.up_proj": "ffn_up_exps",
    "mlp.experts.{e}.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_MIXTRAL_EXPERTS: Mapping[str, str] = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{e}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{e}.w3": "ffn_up_exps",
    "block_sparse_moe.experts.{e}.w2": "ffn_down_exps",
}
_EXPERT_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("expert_count",),
    "num_local_experts": ("expert_count",),
    "num_experts_per_tok": ("expert_used_count",),
}
_QWEN_EXPERT_KEYS: Mapping[str, tuple[str, ...]] = {
    **_EXPERT_KEYS,
    "moe_intermediate_size": ("expert_feed_forward_length",),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length",),
}
_EVERY_LAYER_HAS_EXPERTS: Mapping[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
_GELU: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu_pytorch_tanh", None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
}


@dataclass(frozen=True)
class ModelType:
    """One row. `keys`, `neutral` and `layer` are added to those of most models.

    pairs: GGUF's converter puts the rows of q and k that rope turns together beside each other.
    norm_offset: what is added to the weights of norms. window: is there one where config.json has sliding_window, even
    without use_sliding_window? full_every: a layer without a window is every so many; 0 if all layers are alike.
    """

    architecture: str
    pairs: bool = False
    norm_offset: float = 0.0
    window: bool = False
    full_every: int = 0
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)

    def gguf_keys(self) -> Mapping[str, tuple[str, ...]]:
        """GGUF's keys by those of config.json."""
        return {**KEYS, **self.keys}

    def neutral_values(self) -> Mapping[str, tuple[Any, ...]]:
        """By key, the values that change nothing."""
        return {**NEUTRAL, **self.neutral}

    def whole_names(self) -> Mapping[str, str]:
        """GGUF's names of tensors outside of layers."""
        return _WHOLE

    def layer_names(self) -> Mapping[str, str]:
        """GGUF's names of a layer's tensors; {e} stands for the number of an expert."""
        return {**_LAYER, **self.layer}


MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType("llama", pairs=True),
    "mistral": ModelType("llama", pairs=True, window=True),
    "mixtral": ModelType("llama", pairs=True, window=True, keys=_EXPERT_KEYS, layer=_MIXTRAL_EXPERTS),
    "qwen2": ModelType("qwen2"),
    "qwen3": ModelType("qwen3"),
    "qwen2_moe": ModelType(
        "qwen2moe",
        keys=_QWEN_EXPERT_KEYS,
        neutral={**_EVERY_LAYER_HAS_EXPERTS, "norm_topk_prob": (False,)},
        layer=_QWEN_EXPERTS,
    ),
    "qwen3_moe": ModelType(
        "qwen3moe",
        keys=_QWEN_EXPERT_KEYS,
        neutral={**_EVERY_LAYER_HAS_EXPERTS, "norm_topk_prob": (True,)},
        layer=_QWEN_EXPERTS,
    ),
    "gemma3_text": ModelType(
        "gemma3",
        norm_offset=1.0,
        window=True,
        full_every=6,
        neutral={**_GELU, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
        layer=_SANDWICH,
    ),
    "phi3": ModelType(
        "phi3",
        window=True,
        keys={"original_max_position_embeddings": ("rope.scaling.original_context_length",)},
        layer={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
}
