"""A Hugging Face checkpoint as llama.cpp's converter writes it: its metadata, and its tensors under GGUF's names.

Keys and names are those of the gguf package. Knows nothing of the tables of `shaderlm.formats` and `shaderlm.models`,
so that both are tested against it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSOR, TENSOR_NAMES, Keys
from numpy.typing import NDArray

Array = NDArray[np.float32]
Tensors = dict[str, Array]
Parts = dict[tuple[MODEL_TENSOR, str], Array]  # by kind, and weight or bias

# config.json → GGUF, where the value stays as it is.
_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (Keys.LLM.CONTEXT_LENGTH,)),
    **dict.fromkeys(("hidden_size", "n_embd"), (Keys.LLM.EMBEDDING_LENGTH,)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (Keys.LLM.BLOCK_COUNT,)),
    **dict.fromkeys(("intermediate_size", "n_inner"), (Keys.LLM.FEED_FORWARD_LENGTH,)),
    **dict.fromkeys(("num_attention_heads", "n_head"), (Keys.Attention.HEAD_COUNT,)),
    "num_key_value_heads": (Keys.Attention.HEAD_COUNT_KV,),
    "head_dim": (Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH),
    "rms_norm_eps": (Keys.Attention.LAYERNORM_RMS_EPS,),
    **dict.fromkeys(
        ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), (Keys.Attention.LAYERNORM_EPS,)
    ),
    "sliding_window": (Keys.Attention.SLIDING_WINDOW,),
    "attn_logit_softcapping": (Keys.LLM.ATTN_LOGIT_SOFTCAPPING,),
    "final_logit_softcapping": (Keys.LLM.FINAL_LOGIT_SOFTCAPPING,),
    **dict.fromkeys(("num_experts", "num_local_experts"), (Keys.LLM.EXPERT_COUNT,)),
    "num_experts_per_tok": (Keys.LLM.EXPERT_USED_COUNT,),
    "moe_intermediate_size": (Keys.LLM.EXPERT_FEED_FORWARD_LENGTH,),
    "shared_intermediate_size": (Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH,),
    "shared_expert_intermediate_size": (Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH,),
}


@dataclass(frozen=True)
class How:
    """What the converter does for an architecture beside giving names.

    pairs: rows of q and k that rope turns together come to lie beside each other. qkv_by_heads: q, k and v of each
    head follow each other, and become all q, all k, all v. norm_offset: is added to the weights of norms. transposed:
    matrices are stored with their inputs first. pattern: which layers have a window is written. parts:
    what becomes of tensors of a layer that are several, or others, in GGUF. keys: further keys of GGUF, without
    the architecture, by those of config.json. constants: keys with the same value in every file. more: those that are
    not simply copied. rewritten: the tensors under Hugging Face's names, with what depends on numbers of the model.
    """

    pairs: bool = False
    qkv_by_heads: bool = False
    norm_offset: float = 0.0
    transposed: bool = False
    pattern: bool = False
    parts: Mapping[str, Callable[[Array], Parts]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    rewritten: Callable[[Mapping[str, Any], Tensors], Tensors] = lambda config, tensors: tensors


# Of layers without experts in a model with some. GGUF has no files of them yet: the names are those of other models.
_NETWORK: Mapping[str, Callable[[Array], Parts]] = {
    "mlp.gate_proj.weight": lambda v: {(MODEL_TENSOR.FFN_GATE, "weight"): v},
    "mlp.up_proj.weight": lambda v: {(MODEL_TENSOR.FFN_UP, "weight"): v},
    "mlp.down_proj.weight": lambda v: {(MODEL_TENSOR.FFN_DOWN, "weight"): v},
}


_DELTA = {
    "linear_conv_kernel_dim": Keys.SSM.CONV_KERNEL,
    "linear_key_head_dim": Keys.SSM.STATE_SIZE,
    "linear_num_key_heads": Keys.SSM.GROUP_COUNT,
    "linear_num_value_heads": Keys.SSM.TIME_STEP_RANK,
}


def _delta(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: config[name] for name, key in _DELTA.items()},
        Keys.SSM.INNER_SIZE: config["linear_value_head_dim"] * config["linear_num_value_heads"],
        Keys.LLM.FULL_ATTENTION_INTERVAL: config["layer_types"].index("full_attention") + 1,
    }


def _delta_tensors(architecture: str, config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Value heads of Qwen3.5 in another order; the rows of Qwen3-Next's matrix for everything by their kind."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, heads, key_width, width = (config[name] for name in names)
    each = heads // key_heads

    def tiled(values: Array, axis: int, width: int) -> Array:
        shape = values.shape
        grouped = values.reshape(*shape[:axis], key_heads, each, width, *shape[axis + 1 :])
        return grouped.swapaxes(axis, axis + 1).reshape(shape)

    found: Tensors = {}
    for name, given in tensors.items():
        values, inner = given, name.partition(".linear_attn.")[2]
        if inner == "A_log":
            values = -np.exp(values)
        if inner == "conv1d.weight":
            values = values.squeeze(1)
        if inner == "in_proj_qkvz.weight":
            parts = np.split(
                values.reshape(key_heads, -1, values.shape[-1]),
                np.cumsum([key_width, key_width, each * width]),
                axis=1,
            )
            *qkv, z = (part.reshape(-1, values.shape[-1]) for part in parts)
            stem = name.removesuffix("in_proj_qkvz.weight")
            found |= {f"{stem}in_proj_qkv.weight": np.concatenate(qkv), f"{stem}in_proj_z.weight": z}
            continue
        if inner and architecture != "qwen3next":
            keys = 2 * key_heads * key_width
            if inner in ("in_proj_qkv.weight", "conv1d.weight"):
                values = np.concatenate([values[:keys], tiled(values[keys:], 0, width)])
            elif inner == "in_proj_z.weight":
                values = tiled(values, 0, width)
            elif inner == "out_proj.weight":
                values = tiled(values, 1, width)
            elif inner != "norm.weight":
                values = tiled(values, 0, 1)
        if name.endswith("norm.weight") and inner != "norm.weight":
            values = values + np.float32(1)
        found[name.replace(".dt_bias", ".dt_proj.bias")] = values
    return found


def _scan_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Of Mamba-2: rates in place of their logarithms, norms in groups."""
    groups, found = config.get("n_groups", config.get("mamba_n_groups")), Tensors()
    for full, given in tensors.items():
        name, values = full, -np.exp(given) if full.endswith(".A_log") else given
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            values = values.reshape(groups, -1)
        if name.endswith((".A_log", ".D")):
            values = values[:, None]
        if ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        found[name.replace(".dt_bias", ".dt_proj.bias")] = values
    return found


def _scan(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Sizes of a scan; names of heads, groups, rows of a state and kernel."""
    keys = (Keys.SSM.TIME_STEP_RANK, Keys.SSM.GROUP_COUNT, Keys.SSM.STATE_SIZE, Keys.SSM.CONV_KERNEL)
    return {key: config[name] for key, name in zip(keys, names, strict=True)}


_MAMBA = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_LONGEST = 1 << 20  # the context of files without rope
_GRANITE_EXPERTS = {"num_local_experts": Keys.LLM.EXPERT_COUNT, "num_experts_per_tok": Keys.LLM.EXPERT_USED_COUNT}


def _granite(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: config[name] for name, key in _FACTORS.items()},
        Keys.Attention.SCALE: config["attention_multiplier"],
    }


def _granite_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of Granite 4, also where all layers attend: then the file is one of granite, and the rest stays."""
    rotated, kv_heads = config["position_embedding_type"] == "rope", config["num_key_value_heads"]
    return {
        **_granite(config),
        **_scan(config, *_MAMBA),
        Keys.SSM.INNER_SIZE: config["mamba_expand"] * config["hidden_size"],
        Keys.Attention.HEAD_COUNT_KV: [kv_heads if each == "full_attention" else 0 for each in config["layer_types"]],
        Keys.Rope.SCALING_FINETUNED: rotated,
        **({} if rotated else {Keys.LLM.CONTEXT_LENGTH: _LONGEST}),
        **{key: config[name] for name, key in _GRANITE_EXPERTS.items()},
        # The width of networks that are no experts is that of the shared one; the files of such models say it twice.
        **({} if config["num_local_experts"] else {Keys.LLM.FEED_FORWARD_LENGTH: config["shared_intermediate_size"]}),
    }


def _granite_network(gate: MODEL_TENSOR, up: MODEL_TENSOR, down: MODEL_TENSOR) -> dict[str, Callable[[Array], Parts]]:
    return {
        "shared_mlp.input_linear.weight": lambda v: _halves(v, gate, up),
        "shared_mlp.output_linear.weight": lambda v: {(down, "weight"): v},
    }


def _nemotron_h(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds, has_experts = config["layers_block_type"], "moe" in config["layers_block_type"]
    kv_heads, ffn = config["num_key_value_heads"], config[f"{'moe_' if has_experts else ''}intermediate_size"]
    network = "moe" if has_experts else "mlp"
    experts = (Keys.LLM.EXPERT_USED_COUNT, Keys.LLM.EXPERT_FEED_FORWARD_LENGTH)
    return {
        **_scan(config, "mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel"),
        Keys.LLM.BLOCK_COUNT: len(kinds),
        Keys.LLM.CONTEXT_LENGTH: _LONGEST,
        Keys.SSM.INNER_SIZE: config["mamba_num_heads"] * config["mamba_head_dim"],
        Keys.Attention.HEAD_COUNT_KV: [kv_heads if each == "full_attention" else 0 for each in kinds],
        Keys.LLM.FEED_FORWARD_LENGTH: [ffn if each == network else 0 for each in kinds],
        Keys.Attention.LAYERNORM_RMS_EPS: config["layer_norm_epsilon"],
        Keys.Rope.DIMENSION_COUNT: config["head_dim"],
        Keys.Rope.SCALING_FINETUNED: False,
        **(_nemotron_experts(config) if has_experts else dict.fromkeys(experts)),
    }


def _nemotron_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        Keys.LLM.EXPERT_COUNT: config["n_routed_experts"],
        Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: config["moe_shared_expert_intermediate_size"],
        Keys.LLM.EXPERT_SHARED_COUNT: config["n_shared_experts"],
        Keys.LLM.EXPERT_WEIGHTS_NORM: config["norm_topk_prob"],
        Keys.LLM.EXPERT_WEIGHTS_SCALE: config["routed_scaling_factor"],
        Keys.LLM.EXPERT_GROUP_COUNT: config["n_group"],
    }


def _mamba2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_scan(config, "num_heads", "n_groups", "state_size", "conv_kernel"),
        Keys.LLM.CONTEXT_LENGTH: _LONGEST,
        Keys.LLM.FEED_FORWARD_LENGTH: 0,
        Keys.Attention.HEAD_COUNT: 0,
        Keys.SSM.INNER_SIZE: config["expand"] * config["hidden_size"],
        Keys.Attention.LAYERNORM_RMS_EPS: config["layer_norm_epsilon"],
        **dict.fromkeys((Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH, Keys.Attention.LAYERNORM_EPS)),
    }


def _falcon_h1(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Every factor is folded into weights."""
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": into,
        "k_proj": config["key_multiplier"] * into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
    }
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    counts = (inner, inner, shared, shared, config["mamba_n_heads"])
    rows = config["ssm_in_multiplier"] * np.repeat(np.array(config["ssm_multipliers"], np.float32), counts)
    found = Tensors()
    for name, values in _scan_tensors(config, tensors).items():
        module = name.split(".")[-2]
        by = rows[:, None] if module == "in_proj" else factors.get(module, 1)
        found[name] = values * np.asarray(by, np.float32)
    return found


def _lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    kv_heads = config["num_key_value_heads"]
    return {
        Keys.Attention.HEAD_COUNT_KV: [kv_heads if each == "full_attention" else 0 for each in config["layer_types"]],
        Keys.Attention.LAYERNORM_RMS_EPS: config["norm_eps"],
        Keys.Attention.LAYERNORM_EPS: None,
        Keys.ShortConv.L_CACHE: config["conv_L_cache"],
    }


def _lfm2_width(config: Mapping[str, Any]) -> int:
    multiple = int(config["block_multiple_of"])
    width = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
    return multiple * ((width + multiple - 1) // multiple)


def _full_of(config: Mapping[str, Any], key: str) -> Any:
    """Gemma 4: a number of layers without a window."""
    full = [i for i, each in enumerate(config["layer_types"]) if each == "full_attention"]
    return config["per_layer_config"][str(full[0])].get(key, config[key])


def _gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    windows = [each == "sliding_attention" for each in config["layer_types"]]
    width, shared, ffn = _full_of(config, "head_dim"), config["num_kv_shared_layers"], config["intermediate_size"]
    kv_heads, full_kv_heads = config["num_key_value_heads"], _full_of(config, "num_key_value_heads")
    wide, unshared = config["use_double_wide_mlp"], len(windows) - shared
    return {
        **dict.fromkeys((Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH, Keys.Rope.DIMENSION_COUNT), width),
        **dict.fromkeys(
            (Keys.Attention.KEY_LENGTH_SWA, Keys.Attention.VALUE_LENGTH_SWA, Keys.Rope.DIMENSION_COUNT_SWA),
            config["head_dim"],
        ),
        Keys.Attention.HEAD_COUNT_KV: [kv_heads if each else full_kv_heads for each in windows],
        Keys.Attention.SHARED_KV_LAYERS: shared,
        Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: config["hidden_size_per_layer_input"],
        Keys.LLM.EXPERT_USED_COUNT: config["top_k_experts"],
        Keys.LLM.FEED_FORWARD_LENGTH: [ffn * (2 if wide and i >= unshared else 1) for i in range(len(windows))],
    }


def _deepstack(config: Mapping[str, Any]) -> dict[str, Any]:
    return {Keys.LLM.NUM_DEEPSTACK_LAYERS: len(config["vision_config"]["deepstack_visual_indexes"])}


_FACTORS: Mapping[str, str] = {
    "embedding_multiplier": Keys.LLM.EMBEDDING_SCALE,
    "residual_multiplier": Keys.LLM.RESIDUAL_SCALE,
    "logits_scaling": Keys.LLM.LOGIT_SCALE,
}
_HOW: Mapping[str, How] = {
    "llama": How(pairs=True),
    "qwen35": How(rewritten=partial(_delta_tensors, "qwen35"), more=_delta),
    "qwen35moe": How(
        rewritten=partial(_delta_tensors, "qwen35moe"),
        parts={
            "mlp.experts.gate_up_proj": lambda v: _halves(v, MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP),
            "mlp.experts.down_proj": lambda v: {(MODEL_TENSOR.FFN_DOWN_EXP, "weight"): v},
        },
        more=_delta,
    ),
    "qwen3next": How(rewritten=partial(_delta_tensors, "qwen3next"), more=_delta),
    "lfm2": How(more=lambda c: {**_lfm2(c), Keys.LLM.FEED_FORWARD_LENGTH: _lfm2_width(c)}),
    "lfm2moe": How(
        parts={"feed_forward.expert_bias": lambda v: {(MODEL_TENSOR.FFN_EXP_PROBS_B, "bias"): v}},
        more=lambda c: {
            **_lfm2(c),
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: c["num_dense_layers"],
            Keys.LLM.EXPERT_GATING_FUNC: 2,
        },
    ),
    "granitehybrid": How(
        pairs=True,
        rewritten=_scan_tensors,
        parts={
            "block_sparse_moe.input_linear.weight": lambda v: _halves(
                v, MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP
            ),
        },
        more=_granite_hybrid,
    ),
    "mamba2": How(rewritten=_scan_tensors, more=_mamba2),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), How(rewritten=_scan_tensors, more=_nemotron_h)),
    "falcon-h1": How(
        rewritten=_falcon_h1,
        more=lambda c: {**_scan(c, *_MAMBA), Keys.SSM.INNER_SIZE: c["mamba_d_ssm"]},
    ),
    "gpt2": How(transposed=True, more=lambda c: {Keys.LLM.FEED_FORWARD_LENGTH: 4 * c["n_embd"]}),
    "olmo2": How(pattern=True),
    "gemma2": How(norm_offset=1.0),
    "gemma3": How(norm_offset=1.0),
    "gemma4": How(
        pattern=True,
        parts={
            "layer_scalar": lambda v: {(MODEL_TENSOR.LAYER_OUT_SCALE, "weight"): v},
            "experts.gate_up_proj": lambda v: {(MODEL_TENSOR.FFN_GATE_UP_EXP, "weight"): v},
            "experts.down_proj": lambda v: {(MODEL_TENSOR.FFN_DOWN_EXP, "weight"): v},
            "router.scale": lambda v: {(MODEL_TENSOR.FFN_GATE_INP, "scale"): v},
            "router.per_expert_scale": lambda v: {(MODEL_TENSOR.FFN_DOWN_EXP, "scale"): v},
        },
        more=_gemma4,
    ),
    "smollm3": How(pairs=True),
    "qwen3vl": How(more=_deepstack),
    "qwen3vlmoe": How(
        parts={
            "mlp.experts.gate_up_proj": lambda v: _halves(v, MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP),
            "mlp.experts.down_proj": lambda v: {(MODEL_TENSOR.FFN_DOWN_EXP, "weight"): v},
        },
        more=_deepstack,
    ),
    "granite": How(
        pairs=True,
        parts={
            "shared_mlp.input_linear.weight": lambda v: _halves(v, MODEL_TENSOR.FFN_GATE, MODEL_TENSOR.FFN_UP),
            "shared_mlp.output_linear.weight": lambda v: {(MODEL_TENSOR.FFN_DOWN, "weight"): v},
        },
        more=lambda c: _granite_hybrid(c) if "layer_types" in c else _granite(c),
    ),
    "nemotron": How(norm_offset=1.0),
    "arcee": How(pairs=True),
    "mistral3": How(
        pairs=True,
        more=lambda c: {
            key: c["rope_parameters"].get(name)
            for key, name in (
                (Keys.Rope.SCALING_YARN_LOG_MUL, "mscale_all_dim"),
                (Keys.Attention.TEMPERATURE_SCALE, "llama_4_scaling_beta"),
            )
        },
    ),
    "exaone4": How(pattern=True),
    "command-r": How(more=lambda c: {Keys.LLM.LOGIT_SCALE: c["logit_scale"], Keys.Rope.SCALING_TYPE: "none"}),
    "cohere2": How(more=lambda c: {Keys.LLM.LOGIT_SCALE: c["logit_scale"], Keys.Rope.SCALING_TYPE: "none"}),
    "stablelm": How(more=lambda c: {Keys.LLM.USE_PARALLEL_RESIDUAL: c["use_parallel_residual"]}),
    "gptneox": How(qkv_by_heads=True, more=lambda c: {Keys.LLM.USE_PARALLEL_RESIDUAL: c["use_parallel_residual"]}),
    "starcoder": How(more=lambda c: {Keys.LLM.FEED_FORWARD_LENGTH: 4 * c["n_embd"]}),
    "internlm2": How(pairs=True),
    "minicpm": How(pairs=True, more=lambda c: {key: c[name] for name, key in _FACTORS.items()}),
    "granitemoe": How(
        pairs=True,
        parts={
            "block_sparse_moe.input_linear.weight": lambda v: _halves(
                v, MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP
            ),
            "shared_mlp.input_linear.weight": lambda v: _halves(
                v, MODEL_TENSOR.FFN_GATE_SHEXP, MODEL_TENSOR.FFN_UP_SHEXP
            ),
        },
        more=_granite,
    ),
    **dict.fromkeys(("qwen2moe", "qwen3moe"), How(parts=_NETWORK)),
    "gpt-oss": How(
        parts={
            "mlp.experts.gate_up_proj": lambda v: _columns(v, "weight"),
            "mlp.experts.gate_up_proj_bias": lambda v: _columns(v, "bias"),
            "mlp.experts.down_proj": lambda v: {(MODEL_TENSOR.FFN_DOWN_EXP, "weight"): v.swapaxes(1, 2)},
            "mlp.experts.down_proj_bias": lambda v: {(MODEL_TENSOR.FFN_DOWN_EXP, "bias"): v},
            "self_attn.sinks": lambda v: {(MODEL_TENSOR.ATTN_SINKS, "weight"): v},
        },
        more=lambda c: {Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: c["intermediate_size"]},
    ),
    "ernie4_5-moe": How(
        keys={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_num_shared_experts": "expert_shared_count",
        },
        more=lambda c: {Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: c["intermediate_size"] // c["num_key_value_heads"]},
    ),
    "glm4moe": How(
        keys={
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        constants={"expert_gating_func": 2},
    ),
    "hunyuan-moe": How(
        keys={"moe_topk": "expert_used_count"},
        constants={"expert_shared_count": 1},
        more=lambda c: dict.fromkeys(
            (Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH), c["intermediate_size"]
        ),
    ),
    "minimax-m2": How(more=lambda c: {Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: c["intermediate_size"]}),
    "hunyuan-dense": How(more=lambda c: {Keys.Rope.FREQ_BASE: _by_alpha(c["rope_parameters"], c["head_dim"])}),
}


def _halves(values: Array, *kinds: MODEL_TENSOR) -> Parts:
    """Rows of one matrix, then those of the other."""
    return {(kind, "weight"): half for kind, half in zip(kinds, np.split(values, 2, axis=-2), strict=True)}


def _columns(values: Array, suffix: str) -> Parts:
    """Of matrices with their inputs first: columns of gate and up alternate."""
    kinds = (MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP)
    halves = [values[..., i::2] for i in (0, 1)]
    return {(kind, suffix): np.moveaxis(half, -1, 1) for kind, half in zip(kinds, halves, strict=True)}


def _by_alpha(rope: Mapping[str, Any], width: int) -> float:
    return float(rope["rope_theta"] * rope["alpha"] ** (width / (width - 2)))


def converted(
    architecture: str, config: Mapping[str, Any], tensors: Tensors, how_else: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Tensors]:
    """The metadata and the tensors of a GGUF file. `how_else`: fields of `How` that a checkpoint was recorded with."""
    how = replace(_HOW.get(architecture, How()), **(how_else or {}))
    if architecture == "granitehybrid":
        experts = (MODEL_TENSOR.FFN_GATE_SHEXP, MODEL_TENSOR.FFN_UP_SHEXP, MODEL_TENSOR.FFN_DOWN_SHEXP)
        network = (MODEL_TENSOR.FFN_GATE, MODEL_TENSOR.FFN_UP, MODEL_TENSOR.FFN_DOWN)
        parts = _granite_network(*(experts if config["num_local_experts"] else network))
        how = replace(how, parts={**how.parts, **parts})
    config = {**config, **config.get("text_config", {})}
    made = {key: value for name, keys in _KEYS.items() if (value := config.get(name)) for key in keys}
    if config.get("use_sliding_window", True) is False:
        made.pop(Keys.Attention.SLIDING_WINDOW, None)
    elif how.pattern and "layer_types" in config:
        made[Keys.Attention.SLIDING_WINDOW_PATTERN] = [each == "sliding_attention" for each in config["layer_types"]]
    scaled, factors = _rope(config, made)
    made |= scaled | {f"{{arch}}.{there}": config[name] for name, there in how.keys.items()}
    made |= {f"{{arch}}.{key}": value for key, value in how.constants.items()} | how.more(config)
    return {key.format(arch=architecture): value for key, value in made.items() if value is not None}, {
        **factors,
        **_named(architecture, how, made, how.rewritten(config, tensors)),
    }


def _rope(config: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    given = config.get("rope_parameters") or {}
    local = given.get("sliding_attention", {})
    given = given.get("full_attention", given)
    found: dict[str, Any] = {Keys.Rope.FREQ_BASE: given["rope_theta"]} if "rope_theta" in given else {}
    if local.get("rope_theta", given.get("rope_theta")) != given.get("rope_theta"):
        found[Keys.Rope.FREQ_BASE_SWA] = local["rope_theta"]
    heads, hidden = made.get(Keys.Attention.HEAD_COUNT, 1), made[Keys.LLM.EMBEDDING_LENGTH]
    width = int(made.get(Keys.Attention.KEY_LENGTH, hidden // heads) * given.get("partial_rotary_factor", 1))
    if "mrope_section" in given:
        found[Keys.Rope.DIMENSION_SECTIONS] = [*given["mrope_section"], 0]
    if "partial_rotary_factor" in given:
        found[Keys.Rope.DIMENSION_COUNT] = width
    if given.get("rope_type") in ("linear", "yarn"):
        found |= {Keys.Rope.SCALING_TYPE: given["rope_type"], Keys.Rope.SCALING_FACTOR: given["factor"]}
    if given.get("rope_type") == "yarn":
        found[Keys.Rope.SCALING_ORIG_CTX_LEN] = given["original_max_position_embeddings"]
    if given.get("rope_type") == "longrope":
        trained = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / trained
        found[Keys.Rope.SCALING_ORIG_CTX_LEN] = trained
        found[Keys.Rope.SCALING_ATTN_FACTOR] = math.sqrt(1 + math.log(factor) / math.log(trained))
        lengths = ("long", "short")
        return found, {f"rope_factors_{each}.weight": np.array(given[f"{each}_factor"], np.float32) for each in lengths}
    if given.get("rope_type") == "proportional":  # what is not rotated turns by nothing
        pairs = _full_of(config, "head_dim") // 2
        rotated = int(pairs * given["partial_rotary_factor"])
        return found, {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)}
    if given.get("rope_type") != "llama3":
        return found, {}
    waves = [2 * math.pi * given["rope_theta"] ** (i / width) for i in range(0, width, 2)]
    return found, {"rope_freqs.weight": np.array([_llama3(given, wave) for wave in waves], np.float32)}


def _llama3(given: Mapping[str, Any], wave: float) -> float:
    """What a frequency is divided by, of a wave of this length."""
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    turns = given["original_max_position_embeddings"] / wave
    if turns > high:
        return 1.0
    if turns < low:
        return float(factor)
    share = (turns - low) / (high - low)
    return float(1 / ((1 - share) / factor + share))


def _spellings(name: str) -> tuple[str, str]:
    """The package has some names of experts as converters make them, without what all tensors begin with."""
    return name, name.removeprefix("model.")


def _named(architecture: str, how: How, made: Mapping[str, Any], tensors: Tensors) -> Tensors:
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, made[Keys.LLM.BLOCK_COUNT])
    heads = made[Keys.Attention.HEAD_COUNT]
    kv_heads = made.get(Keys.Attention.HEAD_COUNT_KV, heads)
    heads = {"attn_q": heads, "attn_k": max(kv_heads) if isinstance(kv_heads, list) else kv_heads}
    experts: dict[str, list[Array]] = {}
    found: Tensors = {}
    for full, given in tensors.items():  # experts in the order of their numbers
        values, name = given, full.replace("language_model.", "").replace("_correction_bias", "_correction.bias")
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        if inner in how.parts:
            for (kind, suffix), part in how.parts[inner](values).items():
                found[f"{TENSOR_NAMES[kind].format(bid=layer)}.{suffix}"] = np.ascontiguousarray(part)
            continue
        stacked = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        called = next(filter(None, (names.get_name(each, (".weight", ".bias")) for each in _spellings(stacked))), None)
        assert called is not None, f"gguf has no name for {name} of {architecture}"
        if called.endswith(".ffn_norm"):  # of falcon-h1, whose files have it without what readers expect
            called += ".weight"
        stem = called.split(".")[-2]
        if how.transposed and values.ndim == 2 and "embd" not in stem:
            values = values.T
        if how.pairs and stem in heads:
            width = len(values) // heads[stem]
            values = values.reshape(heads[stem], 2, width // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if how.qkv_by_heads and stem == "attn_qkv":
            values = values.reshape(heads["attn_q"], 3, -1).swapaxes(0, 1).reshape(values.shape)
        if stem.endswith("norm") and called.endswith(".weight"):
            values = values + np.float32(how.norm_offset)
        if ".experts." in name:
            experts.setdefault(called, []).append(values)
            continue
        found[called] = np.ascontiguousarray(values.squeeze())
    return found | {called: np.stack(each) for called, each in experts.items()}
