"""Hugging Face's models as GGUF has them: a row for each `model_type`, with what is not as in most models.

Before the table are the parts that several rows share, and the rows that others are made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ModelError
from .model_type import ModelType, TensorSplit
from .recurrent import RECURRENT, recurrent_row
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

_POST_NORMS: Mapping[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SANDWICH: Mapping[str, str] = {**_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm"}
_MIXTRAL_EXPERTS: Mapping[str, str] = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{e}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{e}.w3": "ffn_up_exps",
    "block_sparse_moe.experts.{e}.w2": "ffn_down_exps",
}
# Of models whose shared network is a number of experts wide.
_SHARED_EXPERTS: Mapping[str, str] = {
    **QWEN_EXPERTS,
    "mlp.exp_probs_b": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_SELECTION_BIAS = ((r"\.(gate|moe_statics)\.e_score_correction_bias$", ".exp_probs_b.bias"),)
_TANH = "gelu_pytorch_tanh"
_GELU: Mapping[str, tuple[Any, ...]] = {"hidden_act": (_TANH, None), "hidden_activation": (_TANH, None)}
_CAPS: Mapping[str, tuple[str, ...]] = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}


_TEXT_INSIDE: Mapping[str, Any] = {
    "nested": "text_config",
    "renames": (
        (r"^language_model\.model\.", "model."),
        (r"^model\.language_model\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
    "ignored": r"(model\.)?(vision_tower|multi_modal_projector)\.",
}
_PROJECTOR_KEYS = (
    *IMAGE_KEYS,
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
    *("vision_feature_select_strategy", "image_seq_length"),
)
_LLAVA: Mapping[str, Any] = {
    "pairs": True,
    "harmless": {
        **dict.fromkeys(_PROJECTOR_KEYS, FOR_IMAGES),
        "is_composition": "says that there is text_config",
        "ignore_index": "for training",
    },
    **_TEXT_INSIDE,
}
# Of the text model of a LLaVA: what the class has where text_config says nothing. Few files say all.
_LLAVA_TEXTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048, "vocab_size": 32000},
    "mistral": {
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "vocab_size": 32000,
        "num_key_value_heads": 8,
    },
    "qwen2": {"intermediate_size": 22016, "max_position_embeddings": 32768, "vocab_size": 151936},
}
_LLAVA_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_QWEN2VL = ModelType(
    "qwen2vl",
    theta=1e6,
    harmless=dict.fromkeys((*IMAGE_KEYS, *(f"{name}_token_id" for name in QWEN_IMAGE_TOKENS)), FOR_IMAGES),
    **{**_TEXT_INSIDE, "ignored": r"(model\.)?visual\."},
)
_SMOLVLM = ModelType(
    "llama",
    pairs=True,
    harmless={
        **dict.fromkeys((*IMAGE_KEYS, "scale_factor"), FOR_IMAGES),
        "_pad_token_id": "padding is not run",
        **dict.fromkeys(("is_llama_config", "transformers.js_config"), "for other programs"),
        "neftune_noise_alpha": "for training",
        **dict.fromkeys(("perceiver_config", "pixel_shuffle_factor"), FOR_IMAGES),
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


# Defaults are those of the classes in transformers.
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType("llama", pairs=True, older={"max_sequence_length": "max_position_embeddings"}),
    "mistral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL, theta=1e6, keys=EXPERT_KEYS, layer=_MIXTRAL_EXPERTS, defaults={"sliding_window": None}
    ),
    "ministral3": ModelType("mistral3", pairs=True, theta=None, window=True),
    "mistral3": ModelType(
        "mistral3",
        pairs=True,
        theta=None,
        window=True,
        defaults={"sliding_window": 4096},
        harmless=dict.fromkeys(_PROJECTOR_KEYS, FOR_IMAGES),
        **_TEXT_INSIDE,
    ),
    "llava": ModelType("llama", **_LLAVA),  # of a text model that is a llama; `row_of` has others
    "qwen2": ModelType("qwen2"),
    "qwen3": ModelType("qwen3", defaults={"head_dim": 128}),
    "qwen2_moe": ModelType(
        "qwen2moe",
        keys=QWEN_EXPERT_KEYS,
        mixed=True,
        neutral={"norm_topk_prob": (False,)},
        layer=QWEN_EXPERTS,
    ),
    "qwen3_moe": ModelType(
        "qwen3moe",
        keys=QWEN_EXPERT_KEYS,
        defaults={"norm_topk_prob": False},
        mixed=True,
        neutral={"norm_topk_prob": (True,)},
        layer=QWEN_EXPERTS,
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
        harmless=dict.fromkeys((*IMAGE_KEYS, "mm_tokens_per_image", "boi_token_index", "eoi_token_index"), FOR_IMAGES),
        **_TEXT_INSIDE,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4": replace(
        _GEMMA4,
        harmless={
            **_GEMMA4.harmless,
            **dict.fromkeys(
                (*_GEMMA4_TOKENS.split(), "vision_config", "audio_config", "vision_soft_tokens_per_image"), FOR_IMAGES
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
    "granite": ModelType("granite", pairs=True, keys=MULTIPLIERS, defaults={"attention_multiplier": 1.0}),
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
            **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), SAYS_PRECISION),
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
            **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), SAYS_PRECISION),
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
            **QWEN_EXPERTS,
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
            "num_nextn_predict_layers": PREDICTS_FURTHER,
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
        harmless=dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), PREDICTS_FURTHER),
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
            **EXPERT_KEYS,
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
            **dict.fromkeys(("use_mtp", "num_mtp_modules", "mtp_transformer_layers"), PREDICTS_FURTHER),
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
        keys={**EXPERT_KEYS, "intermediate_size": ("feed_forward_length", "expert_feed_forward_length")},
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
    "olmoe": ModelType("olmoe", keys=EXPERT_KEYS, neutral={"norm_topk_prob": (False,)}, layer=QWEN_EXPERTS),
    **RECURRENT,
}


def row_of(name: str, config: Mapping[str, Any]) -> ModelType:
    """The row of a folder whose config.json names this model_type."""
    if name == "llava":
        return _llava(config)
    return recurrent_row(name, config) if name in RECURRENT else MODEL_TYPES[name]


def _llava(config: Mapping[str, Any]) -> ModelType:
    """The row of its text model, which is inside."""
    text = config.get("text_config")
    name = text.get("model_type", "llama") if isinstance(text, dict) else "llama"
    if name not in _LLAVA_TEXTS:
        known = ", ".join(_LLAVA_TEXTS)
        raise ModelError(f"config.json: text_config.model_type is {name!r:.60}; in folders of llava: {known}")
    row, defaults = MODEL_TYPES[name], {**_LLAVA_SIZES, **_LLAVA_TEXTS[name]}
    return replace(row, **{**_LLAVA, "pairs": row.pairs, "defaults": {**row.defaults, **defaults}})
