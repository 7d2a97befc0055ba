"""Hugging Face's models as GGUF has them: a row for each `model_type`, with what is not as in most models.

Before the table are the parts that several rows share, and the rows that others are made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .model_type import ModelType, TensorSplit

_POST_NORMS: Mapping[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SANDWICH: Mapping[str, str] = {**_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm"}
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
# Of models whose shared network is a number of experts wide.
_SHARED_EXPERTS: Mapping[str, str] = {
    **_QWEN_EXPERTS,
    "mlp.exp_probs_b": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_SELECTION_BIAS = ((r"\.(gate|moe_statics)\.e_score_correction_bias$", ".exp_probs_b.bias"),)
_PREDICTS = "predicts further tokens, and is left aside"
_TANH = "gelu_pytorch_tanh"
_GELU: Mapping[str, tuple[Any, ...]] = {"hidden_act": (_TANH, None), "hidden_activation": (_TANH, None)}
_CAPS: Mapping[str, tuple[str, ...]] = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
_MULTIPLIERS: Mapping[str, tuple[str, ...]] = {
    "embedding_multiplier": ("embedding_scale",),
    "residual_multiplier": ("residual_scale",),
    "attention_multiplier": ("attention.scale",),
    "logits_scaling": ("logit_scale",),
}


# Of models that also read images, where the text model is a part. Images are not read.
_IMAGES = "for images; without them, text_config says all"
_IMAGE_KEYS = ("vision_config", "image_token_index", "image_token_id")
_QWEN_TOKENS = ("video", "vision", "vision_start", "vision_end")
_TEXT_INSIDE: Mapping[str, Any] = {
    "nested": "text_config",
    "renames": (
        (r"^language_model\.model\.", "model."),
        (r"^model\.language_model\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
    "ignored": r"(model\.)?(vision_tower|multi_modal_projector)\.",
}
_QWEN2VL = ModelType(
    "qwen2vl",
    theta=1e6,
    harmless=dict.fromkeys((*_IMAGE_KEYS, *(f"{name}_token_id" for name in _QWEN_TOKENS)), _IMAGES),
    **{**_TEXT_INSIDE, "ignored": r"(model\.)?visual\."},
)
_SMOLVLM = ModelType(
    "llama",
    pairs=True,
    harmless={
        **dict.fromkeys((*_IMAGE_KEYS, "scale_factor"), _IMAGES),
        "_pad_token_id": "padding is not run",
        **dict.fromkeys(("is_llama_config", "transformers.js_config"), "for other programs"),
        "neftune_noise_alpha": "for training",
        **dict.fromkeys(("perceiver_config", "pixel_shuffle_factor"), _IMAGES),
    },
    neutral=dict.fromkeys(("qk_layer_norms", "rope_interleaved", "use_resampler"), (None, False)),
    nested="text_config",
    renames=((r"^model\.text_model\.", "model."),),
    ignored=r"model\.(vision_model|connector)\.",
)
_GEMMA3 = ModelType(
    "gemma3",
    norm_offset=1.0,
    theta=1e6,
    window=True,
    full_every=6,
    pattern=True,
    local_rope=True,
    keys={"final_logit_softcapping": ("final_logit_softcapping",)},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262208,
    },
    neutral={**_GELU, "attn_logit_softcapping": (None,)},
    layer=_SANDWICH,
)
_GEMMA4_BARE = r"layer_scalar|router\.scale|router\.per_expert_scale|experts\.gate_up_proj|experts\.down_proj"
_GEMMA4_INSIDE = r"^(?:language_model\.model|model\.language_model)\."
_GEMMA4 = ModelType(
    "gemma4",
    theta=1e6,
    window=True,
    full_every=6,
    local_rope=True,
    full_layers=True,
    keys={
        "final_logit_softcapping": ("final_logit_softcapping",),
        "num_kv_shared_layers": ("attention.shared_kv_layers",),
        "hidden_size_per_layer_input": ("embedding_length_per_layer_input",),
        "num_experts": ("expert_count",),
        "top_k_experts": ("expert_used_count",),
        "moe_intermediate_size": ("expert_feed_forward_length",),
    },
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "vocab_size": 262144,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    # Of images alone: text is read from left to right.
    neutral={**_GELU, "use_bidirectional_attention": (None, False, "vision")},
    harmless={"vocab_size_per_layer_input": "the tensor says it"},
    whole={
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    layer={
        **_SANDWICH,
        "layer_scalar": "layer_output_scale",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": (
            TensorSplit("ffn_gate_exps", "first half"),
            TensorSplit("ffn_up_exps", "second half"),
        ),
        "experts.down_proj": "ffn_down_exps",
    },
    renames=((rf"^(model\.layers\.\d+\.(?:{_GEMMA4_BARE}))$", r"\1.weight"),),
)
_GEMMA4_TOKENS = "boi_token_id eoi_token_id image_token_id video_token_id boa_token_id eoa_token_index audio_token_id"
_OLMO2 = ModelType("olmo2", layer=_POST_NORMS)
_PRECISION = "says how precisely a program computes"
_MISTRAL = ModelType("llama", pairs=True, window=True, defaults={"sliding_window": 4096})
_GPT2 = ModelType(
    "gpt2",
    rope=False,
    keys={
        "n_embd": ("embedding_length",),
        "n_layer": ("block_count",),
        "n_head": ("attention.head_count",),
        "n_inner": ("feed_forward_length",),
        "n_positions": ("context_length",),
        "layer_norm_epsilon": ("attention.layer_norm_epsilon",),
    },
    defaults={"layer_norm_epsilon": 1e-5},
    neutral={
        "activation_function": ("gelu_new", "gelu_fast", _TANH),
        "n_special": (0,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    harmless={"predict_special_tokens": "of an older model; nobody reads it"},
    whole={"model.wte": "token_embd", "model.wpe": "position_embd", "model.ln_f": "output_norm"},
    layer={
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": (TensorSplit("attn_qkv", transposed=True),),
        "attn.c_proj": (TensorSplit("attn_output", transposed=True),),
        "mlp.c_fc": (TensorSplit("ffn_up", transposed=True),),
        "mlp.c_proj": (TensorSplit("ffn_down", transposed=True),),
    },
    renames=(
        (r"^(transformer\.)?h\.", "model.layers."),
        (r"^(transformer\.)?(?=(wte|wpe|ln_f)\.)", "model."),
    ),
    ignored=r".*\.attn\.(masked_)?bias$",  # the mask of attention, which old checkpoints store
)
_LAYER_NORM: Mapping[str, tuple[str, ...]] = {"layer_norm_eps": ("attention.layer_norm_epsilon",)}
_COHERE = ModelType(
    "command-r",
    theta=None,
    keys={**_LAYER_NORM, "logit_scale": ("logit_scale",)},
    defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    harmless={"model_max_length": "says a second time how long texts may be"},
)
_HUNYUAN_TOKENS = (
    "pad_id",
    "im_start_id",
    "im_end_id",
    "im_newline_id",
    "mask_init_id",
    "text_start_id",
    "text_end_id",
)
_HUNYUAN_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_cla": (False,),
    "add_classification_head": (False,),
    "norm_type": ("rms",),
    "use_rotary_pos_emb": (True,),
}
_HUNYUAN_HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("eod_token_id", *_HUNYUAN_TOKENS), "the tokenizer has it"),
    **dict.fromkeys(("class_num", "dense_list", "pool_type"), "of a head that classifies"),
    **dict.fromkeys(("attention_head_dim", "org_vocab_size"), "tensors say it"),
    "cla_share_factor": "of use_cla, which is off",
}
_HUNYUAN_NORMS: Mapping[str, str] = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_GRANITEMOE = ModelType(
    "granitemoe",
    pairs=True,
    keys={
        **_MULTIPLIERS,
        **_EXPERT_KEYS,
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
        "mamba_ssm_dtype": _PRECISION,
        **dict.fromkeys(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), _PREDICTS),
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
    keys={**_QWEN_NEXT.keys, **_QWEN_EXPERT_KEYS},
    layer={
        **_QWEN_NEXT.layer,
        **_QWEN_EXPERTS,
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
        **dict.fromkeys((*_IMAGE_KEYS, *(f"{name}_token_id" for name in _QWEN_TOKENS)), _IMAGES),
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
    keys={**_MULTIPLIERS, "shared_intermediate_size": ("feed_forward_length",)},
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
    keys={**_MULTIPLIERS, **_MAMBA_KEYS, "shared_intermediate_size": ("feed_forward_length",)},
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
        **dict.fromkeys(("num_nextn_predict_layers", "mtp_layers_block_type"), _PREDICTS),
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
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType("llama", pairs=True, older={"max_sequence_length": "max_position_embeddings"}),
    "mistral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL, theta=1e6, keys=_EXPERT_KEYS, layer=_MIXTRAL_EXPERTS, defaults={"sliding_window": None}
    ),
    "ministral3": ModelType("mistral3", pairs=True, theta=None, window=True),
    "mistral3": ModelType(
        "mistral3",
        pairs=True,
        theta=None,
        window=True,
        defaults={"sliding_window": 4096},
        harmless=dict.fromkeys(
            (
                *_IMAGE_KEYS,
                *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
            ),
            _IMAGES,
        ),
        **_TEXT_INSIDE,
    ),
    "qwen2": ModelType("qwen2"),
    "qwen3": ModelType("qwen3", defaults={"head_dim": 128}),
    "qwen2_moe": ModelType(
        "qwen2moe",
        keys=_QWEN_EXPERT_KEYS,
        mixed=True,
        neutral={"norm_topk_prob": (False,)},
        layer=_QWEN_EXPERTS,
    ),
    "qwen3_moe": ModelType(
        "qwen3moe",
        keys=_QWEN_EXPERT_KEYS,
        defaults={"norm_topk_prob": False},
        mixed=True,
        neutral={"norm_topk_prob": (True,)},
        layer=_QWEN_EXPERTS,
    ),
    "smolvlm": _SMOLVLM,
    "idefics3": _SMOLVLM,
    "qwen2_vl": _QWEN2VL,
    "qwen2_5_vl": _QWEN2VL,
    "qwen3_vl": replace(_QWEN2VL, architecture="qwen3vl", theta=None, defaults={"head_dim": 128}),
    "gemma2": ModelType(
        "gemma2",
        norm_offset=1.0,
        window=True,
        full_every=2,
        keys=_CAPS,
        defaults={
            "head_dim": 256,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        neutral=_GELU,
        layer=_SANDWICH,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(
        _GEMMA3,
        harmless=dict.fromkeys((*_IMAGE_KEYS, "mm_tokens_per_image", "boi_token_index", "eoi_token_index"), _IMAGES),
        **_TEXT_INSIDE,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4": replace(
        _GEMMA4,
        harmless={
            **_GEMMA4.harmless,
            **dict.fromkeys(
                (*_GEMMA4_TOKENS.split(), "vision_config", "audio_config", "vision_soft_tokens_per_image"), _IMAGES
            ),
        },
        nested="text_config",
        renames=(
            (rf"{_GEMMA4_INSIDE}(layers\.\d+\.(?:{_GEMMA4_BARE}))$", r"model.\1.weight"),
            *_TEXT_INSIDE["renames"],
            *_GEMMA4.renames,
        ),
        ignored=r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.",
    ),
    "phi3": ModelType(
        "phi3",
        window=True,
        defaults={"partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
        keys={"original_max_position_embeddings": ("rope.scaling.original_context_length",)},
        layer={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, theta=None, window=True, full_every=4, defaults={"sliding_window": 4096}),
    "smollm3": ModelType("smollm3", pairs=True, unrotated_every=4, theta=2e6),
    "granite": ModelType("granite", pairs=True, keys=_MULTIPLIERS, defaults={"attention_multiplier": 1.0}),
    "starcoder2": ModelType(
        "starcoder2",
        window=True,
        keys={"norm_epsilon": ("attention.layer_norm_epsilon",)},
        defaults={"norm_epsilon": 1e-5},
        neutral={
            "hidden_act": (_TANH,),
            "norm_type": ("layer_norm",),
            "mlp_type": ("default",),
            "scale_attn_weights": (True,),
        },
        harmless={
            **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), _PRECISION),
            "activation_function": "hidden_act is what is read",
            "layer_norm_epsilon": "norm_epsilon is what is read",
        },
        layer={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
    "glm4": ModelType(
        "glm4",
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
        layer={
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
        },
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(
        _GPT2,
        architecture="starcoder",
        defaults={"layer_norm_epsilon": 1e-5, "num_key_value_heads": 1},
        neutral={**_GPT2.neutral, "multi_query": (True,)},
        harmless={
            **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), _PRECISION),
            **dict.fromkeys(
                ("inference_runner", "validate_runner_input", "pad_key_length", "pre_allocate_kv_cache"),
                "says how an early program computes",
            ),
        },
        layer={
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
    ),
    "gpt_neox": ModelType(
        "gptneox",
        keys={**_LAYER_NORM, "use_parallel_residual": ("use_parallel_residual",)},
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_parallel_residual": True},
        older={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        neutral={"hidden_act": ("gelu",)},
        harmless={"classifier_dropout": "for training"},
        ignored=r".*\.attention\.(masked_)?bias$",  # the mask, as in GPT-2
        whole={
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "embed_out": "output",
        },
        layer={
            "attention.query_key_value": (TensorSplit("attn_qkv", "by kind"),),
            "attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        renames=((r"^gpt_neox\.(?=layers\.)", "model."),),
    ),
    # Falcon 7B. GGUF says in which order queries, keys and values lie; with one head of keys it is that of folders.
    "falcon": ModelType(
        "falcon",
        keys={
            "layer_norm_epsilon": ("attention.layer_norm_epsilon",),
            "ffn_hidden_size": ("feed_forward_length",),
            "tensor_data_layout": ("tensor_data_layout",),
        },
        defaults={
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "num_key_value_heads": 1,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "tensor_data_layout": "jploski",
        },
        neutral={
            "activation": ("gelu",),
            "alibi": (False,),
            "apply_residual_connection_post_layernorm": (False,),
            "multi_query": (True,),
            "new_decoder_architecture": (False,),
            "num_ln_in_parallel_attn": (None, 1),
            "parallel_attn": (True,),
        },
        harmless={"bias": "there are such tensors, or none", "num_kv_heads": "not read with multi_query"},
        whole={"transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm"},
        layer={
            "post_attention_layernorm": "attn_norm_2",  # of other sizes, which are refused
            "self_attention.query_key_value": "attn_qkv",
            "self_attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        renames=((r"^transformer\.h\.", "model.layers."),),
    ),
    # Its first files say "gelu" and mean the approximation: transformers 5 reads them so.
    "gemma": ModelType(
        "gemma",
        norm_offset=1.0,
        defaults={"head_dim": 256},
        neutral={**_GELU, "hidden_act": (_TANH, "gelu", None)},
    ),
    "exaone4": ModelType(
        "exaone4", window=True, full_every=4, pattern=True, defaults={"sliding_window": 4096}, layer=_POST_NORMS
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        architecture="cohere2",
        theta=10000.0,
        window=True,
        full_every=4,
        pattern=True,
        defaults={"sliding_window": 4096, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
        neutral={
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1,),
            "layer_switch": (4,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
        },
        harmless=dict.fromkeys(("use_embedding_sharing", "use_parallel_embedding"), "tensors say it"),
    ),
    "stablelm": ModelType(
        "stablelm",
        keys=_LAYER_NORM,
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_parallel_residual": False},
        neutral={"qk_layernorm": (False,), "rotary_scaling_factor": (1,)},
        harmless={
            "use_qkv_bias": "tensors say it",
            "norm_eps": "layer_norm_eps is what is read",
        },
    ),
    "phi": ModelType(
        "phi2",
        keys=_LAYER_NORM,
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        neutral={"hidden_act": ("gelu_new", _TANH), "qk_layernorm": (False,)},
        whole={"model.final_layernorm": "output_norm"},
        layer={"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    ),
    "seed_oss": ModelType(
        "seed_oss",
        defaults={"head_dim": 128},
        harmless={"attention_out_bias": "tensors say it"},
        layer={"post_attention_layernorm": "post_attention_norm"},
    ),
    "hunyuan_v1_dense": ModelType(
        "hunyuan-dense",
        neutral=_HUNYUAN_NEUTRAL,
        harmless=_HUNYUAN_HARMLESS,
        layer=_HUNYUAN_NORMS,
    ),
    "hunyuan_v1_moe": ModelType(
        "hunyuan-moe",
        keys={
            "intermediate_size": (
                *("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
            ),
            "moe_intermediate_size": ("expert_feed_forward_length",),
            "num_experts": ("expert_count",),
            "moe_topk": ("expert_used_count",),
            "num_shared_expert": ("expert_shared_count",),
        },
        defaults={"num_experts": 1, "moe_topk": 1},
        neutral={
            **_HUNYUAN_NEUTRAL,
            "use_mixed_mlp_moe": (True,),
            "moe_layer_num_skipped": (0,),
            "norm_topk_prob": (True,),
        },
        harmless={
            **_HUNYUAN_HARMLESS,
            **dict.fromkeys(("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"), "for training"),
            **dict.fromkeys(
                ("group_limited_greedy", "n_group", "topk_group", "routed_scaling_factor"), "nobody reads it"
            ),
        },
        layer={
            **_HUNYUAN_NORMS,
            **_QWEN_EXPERTS,
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
    ),
    "ernie4_5": ModelType("ernie4_5", theta=500000.0, defaults={"head_dim": 128}),
    "ernie4_5_moe": ModelType(
        "ernie4_5-moe",
        theta=500000.0,
        keys={
            "moe_num_experts": ("expert_count",),
            "moe_k": ("expert_used_count",),
            "moe_intermediate_size": ("expert_feed_forward_length",),
            "moe_num_shared_experts": ("expert_shared_count",),
            "moe_layer_start_index": ("leading_dense_block_count",),
            "moe_layer_interval": ("interleave_moe_layer_step",),
        },
        defaults={
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
        harmless={
            "moe_layer_end_index": "tensors say it",
            "moe_norm_min": "a sum of softmax values is never as small",
            **dict.fromkeys(("moe_capacity", "moe_gate", "moe_aux_loss_lambda"), "for training"),
            "num_nextn_predict_layers": _PREDICTS,
        },
        layer=_SHARED_EXPERTS,
        renames=_SELECTION_BIAS,
        ignored=r"model\.mtp_",
    ),
    "glm4_moe": ModelType(
        "glm4moe",
        defaults={
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
        },
        keys={
            "n_routed_experts": ("expert_count",),
            "num_experts_per_tok": ("expert_used_count",),
            "moe_intermediate_size": ("expert_feed_forward_length",),
            "n_shared_experts": ("expert_shared_count",),
            "first_k_dense_replace": ("leading_dense_block_count",),
            "routed_scaling_factor": ("expert_weights_scale",),
        },
        neutral={"norm_topk_prob": (True,), "n_group": (1,), "topk_group": (1,)},
        harmless=dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), _PREDICTS),
        layer={
            **_SHARED_EXPERTS,
            "post_attention_layernorm": "post_attention_norm",
            "eh_proj": "nextn.eh_proj",
            "enorm": "nextn.enorm",
            "hnorm": "nextn.hnorm",
            "embed_tokens": "nextn.embed_tokens",
            "shared_head.head": "nextn.shared_head_head",
            "shared_head.norm": "nextn.shared_head_norm",
        },
        renames=_SELECTION_BIAS,
    ),
    "minimax_m2": ModelType(
        "minimax-m2",
        theta=5e6,
        keys={
            **_EXPERT_KEYS,
            "intermediate_size": ("feed_forward_length", "expert_feed_forward_length"),
        },
        defaults={"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "partial_rotary_factor": 1.0},
        neutral={
            "attn_type_list": (1,),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "qk_norm_type": ("per_layer",),
            "shared_intermediate_size": (0,),
        },
        harmless={
            **dict.fromkeys(("use_mtp", "num_mtp_modules", "mtp_transformer_layers"), _PREDICTS),
            **dict.fromkeys(
                (
                    *(
                        f"layernorm_{part}_{factor}"
                        for part in ("full_attention", "linear_attention", "mlp")
                        for factor in ("alpha", "beta")
                    ),
                    *("mlp_intermediate_size", "shared_moe_mode"),
                ),
                "of an earlier model; nobody reads it",
            ),
        },
        layer={**_MIXTRAL_EXPERTS, "block_sparse_moe.exp_probs_b": "exp_probs_b"},
        renames=((r"\.block_sparse_moe\.e_score_correction_bias$", ".block_sparse_moe.exp_probs_b.bias"),),
    ),
    "glm": ModelType(
        "chatglm", defaults={"head_dim": 128, "partial_rotary_factor": 0.5}, layer={"mlp.gate_up_proj": "ffn_up"}
    ),
    "nemotron": ModelType(
        "nemotron",
        norm_offset=1.0,
        keys={"norm_eps": ("attention.layer_norm_epsilon",)},
        defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        older={"kv_channels": "head_dim"},
        neutral={"hidden_act": ("relu2",)},
    ),
    "arcee": ModelType("arcee", pairs=True, neutral={"hidden_act": ("relu2",)}),
    "gpt_oss": ModelType(
        "gpt-oss",
        theta=150000.0,
        window=True,
        full_every=2,
        keys={**_EXPERT_KEYS, "intermediate_size": ("feed_forward_length", "expert_feed_forward_length")},
        defaults={
            "head_dim": 64,
            "sliding_window": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        neutral={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        layer={
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": (
                TensorSplit("ffn_gate_exps", "even", transposed=True),
                TensorSplit("ffn_up_exps", "odd", transposed=True),
            ),
            "mlp.experts.down_proj": (TensorSplit("ffn_down_exps", transposed=True),),
        },
        renames=(
            (r"(\.experts\.(gate_up|down)_proj)_bias$", r"\1.bias"),
            (r"(\.experts\.(gate_up|down)_proj|\.sinks)$", r"\1.weight"),
        ),
    ),
    "olmoe": ModelType("olmoe", keys=_EXPERT_KEYS, neutral={"norm_topk_prob": (False,)}, layer=_QWEN_EXPERTS),
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
            **_EXPERT_KEYS,
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


def row_of(name: str, config: Mapping[str, Any]) -> ModelType:
    """The row of a folder. Granite 4 and Nemotron-H have forms with experts or without under one name."""
    if name == "nemotron_h":
        kinds = config.get("layers_block_type", config.get("layer_types", config.get("hybrid_override_pattern")))
        has_experts = isinstance(kinds, (list, str)) and ("moe" in kinds or "E" in kinds)
        return _NEMOTRON_H_MOE if has_experts else _NEMOTRON_H
    if name != "granitemoehybrid" or config.get("num_local_experts", 8):
        return MODEL_TYPES[name]
    kinds = config.get("layer_types")
    attends = isinstance(kinds, list) and all(each in ("attention", "full_attention") for each in kinds)
    return _GRANITE4 if attends else _GRANITE4_DENSE_HYBRID
