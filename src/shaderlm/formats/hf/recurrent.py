"""The rows of models with recurrent layers, and of Granite's relatives of them without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .model_type import ModelType, TensorSplit
from .row_parts import (
    EXPERT_KEYS,
    FOR_IMAGES,
    IMAGE_KEYS,
    MULTIPLIERS,
    PREDICTS_FURTHER,
    QWEN_EXPERT_KEYS,
    QWEN_EXPERTS,
    QWEN_IMAGE_TOKENS,
    SAYS_PRECISION,
)

_GRANITEMOE = ModelType(
    "granitemoe",
    pairs=True,
    keys={
        **MULTIPLIERS,
        **EXPERT_KEYS,
        "shared_intermediate_size": ("expert_shared_feed_forward_length",),
    },
    defaults={"attention_multiplier": 1.0},
    layer={
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.input_linear": (
            TensorSplit("ffn_gate_exps", "first half"),
            TensorSplit("ffn_up_exps", "second half"),
        ),
        "block_sparse_moe.output_linear": "ffn_down_exps",
        "shared_mlp.input_linear": (
            TensorSplit("ffn_gate_shexp", "first half"),
            TensorSplit("ffn_up_shexp", "second half"),
        ),
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
)
_CONV_SIZES = "conv_dim conv_dim_out block_dim num_heads"
_LFM2 = ModelType(
    "lfm2",
    theta=1e6,
    recurrent="conv",
    adjusted_ffn=True,
    keys={"norm_eps": ("attention.layer_norm_rms_epsilon",), "conv_L_cache": ("shortconv.l_cache",)},
    defaults={
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "tie_word_embeddings": True,
    },
    older={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings", "theta": "rope_theta"},
    neutral={"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
    harmless={
        **dict.fromkeys(_CONV_SIZES.split(), "tensors say it"),
        **dict.fromkeys(
            ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
            "for training",
        ),
        "block_norm_eps": "norm_eps is what is read",
        "rms_norm_eps": "norm_eps is what is read",
    },
    whole={"model.embedding_norm": "token_embd_norm"},
    layer={
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    },
)
_QWEN_NEXT = ModelType(
    "qwen35",
    norm_offset=1.0,
    plain_norms=("ssm_norm",),
    recurrent="linear_attention",
    keys={
        "linear_conv_kernel_dim": ("ssm.conv_kernel",),
        "linear_key_head_dim": ("ssm.state_size",),
        "linear_num_key_heads": ("ssm.group_count",),
        "linear_num_value_heads": ("ssm.time_step_rank",),
    },
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    neutral={"attn_output_gate": (True,)},
    harmless={
        "mamba_ssm_dtype": SAYS_PRECISION,
        **dict.fromkeys(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), PREDICTS_FURTHER),
    },
    layer={
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.A_log": (TensorSplit("ssm_a", "negative exp"),),
        "linear_attn.dt": "ssm_dt",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
    },
    renames=(
        (r"^(model\.)(?:language_model\.)?(.*\.)A_log$", r"\1\2A_log.weight"),
        (r"^(model\.)(?:language_model\.)?(.*\.)dt_bias$", r"\1\2dt.bias"),
        (r"^(model\.)(?:language_model\.)?(.*\.experts\.(gate_up|down)_proj)$", r"\1\2.weight"),
        (r"^model\.language_model\.", "model."),
    ),
    ignored=r"(model\.)?(visual|mtp)\.",
)
_QWEN35_MOE = replace(
    _QWEN_NEXT,
    architecture="qwen35moe",
    keys={**_QWEN_NEXT.keys, **QWEN_EXPERT_KEYS},
    layer={
        **_QWEN_NEXT.layer,
        **QWEN_EXPERTS,
        "mlp.experts.gate_up_proj": (
            TensorSplit("ffn_gate_exps", "first half"),
            TensorSplit("ffn_up_exps", "second half"),
        ),
        "mlp.experts.down_proj": "ffn_down_exps",
    },
)
_QWEN35_IMAGES: Mapping[str, Any] = {
    "nested": "text_config",
    "harmless": {
        **_QWEN_NEXT.harmless,
        **dict.fromkeys((*IMAGE_KEYS, *(f"{name}_token_id" for name in QWEN_IMAGE_TOKENS)), FOR_IMAGES),
    },
}
# Of layers with the selective scan of Mamba-2.
_MAMBA_KEYS: Mapping[str, tuple[str, ...]] = {
    "mamba_n_heads": ("ssm.time_step_rank",),
    "mamba_n_groups": ("ssm.group_count",),
    "mamba_d_state": ("ssm.state_size",),
    "mamba_d_conv": ("ssm.conv_kernel",),
}
_SCAN_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "mamba_hidden_act": ("silu",),
    "use_conv_bias": (True,),
    "conv_bias": (True,),
    "mamba_conv_bias": (True,),
}
_SCAN_HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("mamba_proj_bias", "projectors_bias"), "there are such tensors, or none"),
    **dict.fromkeys(
        (
            *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual"),
            *("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor"),
        ),
        "for training",
    ),
    **dict.fromkeys(
        (
            *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "num_logits_to_keep", "residual_in_fp32"),
            *("mamba_ssm_cache_dtype", "mamba_use_mlp", "rms_norm", "mamba_expand"),
        ),
        "says how a program computes, or what it returns",
    ),
}
_BACKBONE: Mapping[str, str] = {"model.embeddings": "token_embd", "model.norm_f": "output_norm"}
_SCAN_RENAMES = (
    (r"^(?:backbone|model)\.(layers\.\d+\.\w+\.)(A_log|D)$", r"model.\1\2.weight"),
    (r"^(?:backbone|model)\.(layers\.\d+\.\w+\.)dt_bias$", r"model.\1dt.bias"),
    (r"^backbone\.embedding\.", "model.embeddings."),
    (r"^backbone\.", "model."),
)
_NEMOTRON_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor", "topk_group"),
    "norm_topk_prob",
)


def _scan_layer(module: str) -> Mapping[str, str | tuple[TensorSplit, ...]]:
    return {
        f"{module}.in_proj": "ssm_in",
        f"{module}.conv1d": "ssm_conv1d",
        f"{module}.A_log": (TensorSplit("ssm_a", "negative exp"),),
        f"{module}.D": "ssm_d",
        f"{module}.dt": "ssm_dt",
        f"{module}.norm": "ssm_norm",
        f"{module}.out_proj": "ssm_out",
    }


_GRANITE4 = ModelType(
    "granite",
    pairs=True,
    keys={**MULTIPLIERS, "shared_intermediate_size": ("feed_forward_length",)},
    defaults={
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "position_embedding_type": None,
    },
    neutral={
        "num_local_experts": (0,),
        "num_experts_per_tok": (0,),
        "position_embedding_type": ("rope",),
        "normalization_function": ("rmsnorm",),
    },
    harmless=dict.fromkeys(
        (
            *("time_step_limit", "time_step_min", "time_step_max", "mamba_chunk_size", "mamba_conv_bias"),
            *("mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads"),
            *("mamba_proj_bias", "init_method"),
        ),
        "of recurrent layers, which layer_types must not have",
    ),
    layer={
        "shared_mlp.input_linear": (TensorSplit("ffn_gate", "first half"), TensorSplit("ffn_up", "second half")),
        "shared_mlp.output_linear": "ffn_down",
    },
)
_GRANITE4_HYBRID = replace(
    _GRANITEMOE,
    architecture="granitehybrid",
    scan="instead",
    keys={**_GRANITEMOE.keys, **_MAMBA_KEYS},
    defaults={
        **_GRANITEMOE.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    neutral={**_SCAN_NEUTRAL, "normalization_function": ("rmsnorm",)},
    harmless={**_SCAN_HARMLESS, "init_method": "for training"},
    layer={**_GRANITEMOE.layer, **_scan_layer("mamba")},
    renames=_SCAN_RENAMES,
)
_GRANITE4_DENSE_HYBRID = replace(
    _GRANITE4_HYBRID,
    keys={**MULTIPLIERS, **_MAMBA_KEYS, "shared_intermediate_size": ("feed_forward_length",)},
    neutral={**_GRANITE4_HYBRID.neutral, "num_local_experts": (0,), "num_experts_per_tok": (0,)},
    harmless={**_GRANITE4_HYBRID.harmless, "intermediate_size": "of experts, and there are none"},
    layer={**_GRANITE4.layer, **_scan_layer("mamba")},
)
_NEMOTRON_H = ModelType(
    "nemotron_h",
    scan="plain",
    rope=False,
    keys={
        "layer_norm_epsilon": ("attention.layer_norm_rms_epsilon",),
        "mamba_num_heads": ("ssm.time_step_rank",),
        "n_groups": ("ssm.group_count",),
        "ssm_state_size": ("ssm.state_size",),
        "conv_kernel": ("ssm.conv_kernel",),
    },
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_d_head": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "mlp_hidden_act": "relu2",
    },
    older={
        "layers_block_type": "layer_types",
        "mamba_head_dim": "mamba_d_head",
        "attention_head_dim": "head_dim",
        **{f"mamba_{new}": new for new in ("n_groups", "conv_bias")},
        "mamba_d_conv": "conv_kernel",
        "rms_norm_eps": "layer_norm_epsilon",
        "norm_eps": "layer_norm_epsilon",
    },
    neutral={**_SCAN_NEUTRAL, "mlp_hidden_act": ("relu2",), "sliding_window": (None,), "n_group": (1,)},
    harmless={
        **_SCAN_HARMLESS,
        "expand": "heads and their width say it",
        **dict.fromkeys(_NEMOTRON_EXPERTS, "of layers with experts, which layer_types must not have"),
        **dict.fromkeys(("num_nextn_predict_layers", "mtp_layers_block_type"), PREDICTS_FURTHER),
        **dict.fromkeys(("rope_theta", "rope_parameters", "partial_rotary_factor"), "positions are not rotated"),
    },
    whole=_BACKBONE,
    layer={
        **_scan_layer("mixer"),
        "norm": "attn_norm",
        "mixer.q_proj": "attn_q",
        "mixer.k_proj": "attn_k",
        "mixer.v_proj": "attn_v",
        "mixer.o_proj": "attn_output",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
    },
    renames=_SCAN_RENAMES,
    ignored=r"mtp\.",
)
_NEMOTRON_H_MOE = replace(
    _NEMOTRON_H,
    architecture="nemotron_h_moe",
    keys={
        **_NEMOTRON_H.keys,
        "n_routed_experts": ("expert_count",),
        "num_experts_per_tok": ("expert_used_count",),
        "moe_intermediate_size": ("expert_feed_forward_length",),
        "moe_shared_expert_intermediate_size": ("expert_shared_feed_forward_length",),
        "routed_scaling_factor": ("expert_weights_scale",),
        "norm_topk_prob": ("expert_weights_norm",),
        "moe_latent_size": ("moe_latent_size",),
    },
    defaults={
        **_NEMOTRON_H.defaults,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    harmless={
        **{key: reason for key, reason in _NEMOTRON_H.harmless.items() if key not in _NEMOTRON_EXPERTS},
        "moe_shared_expert_overlap": "says how a program computes",
        "n_shared_experts": "the width says it",
        "topk_group": "there is one group",
        "intermediate_size": "of layers without experts, and there are none",
    },
    layer={
        **_NEMOTRON_H.layer,
        "mixer.gate": "ffn_gate_inp",
        "mixer.exp_probs_b": "exp_probs_b",
        "mixer.experts.{e}.up_proj": "ffn_up_exps",
        "mixer.experts.{e}.down_proj": "ffn_down_exps",
        "mixer.shared_experts.up_proj": "ffn_up_shexp",
        "mixer.shared_experts.down_proj": "ffn_down_shexp",
    },
    renames=(
        (r"^(?:backbone|model)\.(layers\.\d+\.mixer\.)gate\.e_score_correction_bias$", r"model.\1exp_probs_b.bias"),
        *_SCAN_RENAMES,
    ),
)
# Defaults are those of the classes in transformers.
RECURRENT: Mapping[str, ModelType] = {
    "granitemoehybrid": _GRANITE4_HYBRID,
    "mamba2": ModelType(
        "mamba2",
        scan="alone",
        keys={
            "layer_norm_epsilon": ("attention.layer_norm_rms_epsilon",),
            "num_heads": ("ssm.time_step_rank",),
            "n_groups": ("ssm.group_count",),
            "state_size": ("ssm.state_size",),
            "conv_kernel": ("ssm.conv_kernel",),
        },
        defaults={
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "vocab_size": 32768,
            "layer_norm_epsilon": 1e-5,
            "num_heads": 128,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
            "mamba_d_head": 64,
            "mamba_expand": 2,
        },
        older={"head_dim": "mamba_d_head", "expand": "mamba_expand"},
        neutral=_SCAN_NEUTRAL,
        harmless={**_SCAN_HARMLESS, "layer_types": "all layers are alike", "num_attention_heads": "there are none"},
        whole=_BACKBONE,
        layer={**_scan_layer("mixer"), "norm": "attn_norm"},
        renames=_SCAN_RENAMES,
    ),
    "nemotron_h": _NEMOTRON_H,
    "falcon_h1": ModelType(
        "falcon-h1",
        scan="beside",
        theta=None,
        factors=True,
        keys=_MAMBA_KEYS,
        defaults={
            "num_key_value_heads": 8,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
        },
        neutral=_SCAN_NEUTRAL,
        harmless={
            **_SCAN_HARMLESS,
            **dict.fromkeys(("layer_types", "layers_block_type"), "all layers are alike"),
            "attn_layer_indices": "all layers attend",
        },
        whole={"model.final_layernorm": "output_norm"},
        layer={
            **_scan_layer("mamba"),
            "pre_ff_layernorm": "ffn_norm",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
        },
        renames=_SCAN_RENAMES,
    ),
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_5": replace(_QWEN_NEXT, **_QWEN35_IMAGES),
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_5_moe": replace(_QWEN35_MOE, **_QWEN35_IMAGES),
    "qwen3_next": replace(
        _QWEN35_MOE,
        architecture="qwen3next",
        mixed=True,
        defaults={**_QWEN_NEXT.defaults, "norm_topk_prob": True},
        neutral={**_QWEN_NEXT.neutral, "norm_topk_prob": (True,)},
        layer={
            **_QWEN35_MOE.layer,
            "linear_attn.in_proj_qkvz": (
                TensorSplit("attn_qkv", "qkv of groups"),
                TensorSplit("attn_gate", "z of groups"),
            ),
            "linear_attn.in_proj_ba": "ssm_ba",
        },
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        architecture="lfm2moe",
        adjusted_ffn=False,
        keys={
            **_LFM2.keys,
            **EXPERT_KEYS,
            "moe_intermediate_size": ("expert_feed_forward_length",),
            "num_dense_layers": ("leading_dense_block_count",),
            "routed_scaling_factor": ("expert_weights_scale",),
        },
        defaults={
            "num_key_value_heads": 8,
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "tie_word_embeddings": True,
        },
        neutral={**_LFM2.neutral, "norm_topk_prob": (True,), "use_expert_bias": (True,)},
        layer={
            **_LFM2.layer,
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.expert_bias": "exp_probs_b",
            "feed_forward.experts.{e}.w1": "ffn_gate_exps",
            "feed_forward.experts.{e}.w3": "ffn_up_exps",
            "feed_forward.experts.{e}.w2": "ffn_down_exps",
        },
        renames=((r"\.expert_bias$", ".expert_bias.bias"),),
    ),
    "granitemoe": _GRANITEMOE,
    "granitemoeshared": _GRANITEMOE,
}


def recurrent_row(name: str, config: Mapping[str, Any]) -> ModelType:
    """The row of a folder. Granite 4 and Nemotron-H have forms with experts or without under one name."""
    if name == "nemotron_h":
        kinds = config.get("layers_block_type", config.get("layer_types", config.get("hybrid_override_pattern")))
        has_experts = isinstance(kinds, (list, str)) and ("moe" in kinds or "E" in kinds)
        return _NEMOTRON_H_MOE if has_experts else _NEMOTRON_H
    if name != "granitemoehybrid" or config.get("num_local_experts", 8):
        return RECURRENT[name]
    kinds = config.get("layer_types")
    attends = isinstance(kinds, list) and all(each in ("attention", "full_attention") for each in kinds)
    return _GRANITE4 if attends else _GRANITE4_DENSE_HYBRID
