"""Makes tiny checkpoints and their logits with `transformers`: python -m tests.make_checkpoints [NAME ...].

Needs `torch` and `transformers`, which the tests do not: they read what is written to `data/checkpoints`.
One row of CHECKPOINTS makes one checkpoint. `tests/test_checkpoints.py` finds it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors import safe_open

from . import checkpoints as files
from .safetensors_files import write_safetensors

_GREEDY = 8  # tokens


class Row(NamedTuple):
    """GGUF's architecture, the class of transformers, and what its configuration has other than `_SIZES`.

    how: fields of `tests.converted.How`, where GGUF's converter does more than to give names.
    context: the largest number of tokens, where it decides what is computed.
    """

    architecture: str
    model: str
    config: dict[str, Any]
    how: Mapping[str, Any] = MappingProxyType({})
    context: int | None = None


_SIZES: dict[str, Any] = {
    "vocab_size": files.VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_MINISTRAL = {
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {
        **_YARN,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.1,
    },
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
_USED = {"num_local_experts": 5, "num_experts_per_tok": 2}
_MINICPM = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
    "attention_multiplier": 0.25,
}
_GRANITEMOE = {**_MINICPM, "attention_multiplier": 0.2, **_USED}
_GRANITE4 = {
    **_MINICPM,
    "attention_multiplier": 0.2,
    "intermediate_size": 32,
    "shared_intermediate_size": 96,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["attention"] * 2,
    "position_embedding_type": "rope",
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PARTIAL = {**_PLAIN, "partial_rotary_factor": 0.5}
# GGUF's converter takes the width of the shared network from these numbers.
_ERNIE_MOE = {
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
_GLM4MOE = {
    "num_hidden_layers": 3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "rope_parameters": _PARTIAL,
    "head_dim": 32,
}

_MROPE = {"rope_parameters": {**_PLAIN, "mrope_section": [2, 3, 3]}}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_VISION3 = {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 2}
_GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
_GEMMA3 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.0, 3.0, 4.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 8.0, 9.0],
}

_FALCON = {
    "keys": {"num_kv_heads": "attention.head_count_kv", "ffn_hidden_size": "feed_forward_length"},
    "constants": {"tensor_data_layout": "jploski"},
}

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DELTA_SECTIONS = {"rope_parameters": {**_PLAIN, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}}
_DELTA_ROPE = {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.25}}
# Files of today; newer classes write other names of kinds.
_SCANS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 1,
}
_GRANITE4_SCANS = {
    **_MINICPM,
    "attention_multiplier": 0.2,
    "intermediate_size": 32,
    "shared_intermediate_size": 64,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    **_SCANS,
}
_FALCON_H1 = {
    **_SCANS,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "head_dim": 32,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.8, 1.5],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.8],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
}
_NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "conv_kernel": 3,
}
_NEMOTRON_H_MOE = {
    **_NEMOTRON_H,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.7,
}
_CONV_LAYERS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}

_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "final_logit_softcapping": 5.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_GEMMA4_SHARED = {
    **_GEMMA4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": files.VOCABULARY,
}
_GEMMA4_MOE = {
    **_GEMMA4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

CHECKPOINTS: dict[str, Row] = {
    "gpt2": Row("gpt2", "GPT2", {}),
    "llama-llama3": Row("llama", "Llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": Row("llama", "Llama", {"rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True}),
    "mistral": Row("llama", "Mistral", {"sliding_window": 12, "head_dim": 32}),
    "qwen2moe": Row("qwen2moe", "Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3": Row("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama-yarn": Row("llama", "Llama", {"rope_parameters": _YARN}),
    "mixtral": Row("llama", "Mixtral", {"sliding_window": 12, **_USED}),
    "mistral3": Row("mistral3", "Ministral3", _MINISTRAL),
    "qwen2": Row("qwen2", "Qwen2", {"use_sliding_window": False}),
    "qwen3moe": Row("qwen3moe", "Qwen3Moe", {**_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3moe-mixed": Row(
        "qwen3moe", "Qwen3Moe", {**_MOE, "num_hidden_layers": 3, "norm_topk_prob": True, "mlp_only_layers": [1]}
    ),
    "qwen2moe-mixed": Row(
        "qwen2moe", "Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2}
    ),
    "qwen2vl": Row("qwen2vl", "Qwen2_5_VL", {"text_config": _MROPE, "vision_config": _VISION}),
    "qwen3vl": Row("qwen3vl", "Qwen3VL", {"text_config": {**_MROPE, "head_dim": 16}, "vision_config": _VISION3}),
    "qwen3vlmoe": Row(
        "qwen3vlmoe",
        "Qwen3VLMoe",
        {"text_config": {**_MROPE, **_MOE, "head_dim": 16, "norm_topk_prob": True}, "vision_config": _VISION3},
    ),
    "gemma2": Row("gemma2", "Gemma2", _GEMMA2),
    "gemma3": Row("gemma3", "Gemma3", _GEMMA3),
    "gemma4": Row("gemma4", "Gemma4", _GEMMA4_SHARED),
    "gemma4-moe": Row("gemma4", "Gemma4", _GEMMA4_MOE),
    "olmo2": Row("olmo2", "Olmo2", {}),
    "smollm3": Row("smollm3", "SmolLM3", {"num_hidden_layers": 4}),
    "granite": Row("granite", "Granite", {**_MINICPM, "attention_multiplier": 0.2}),
    "granite-4": Row("granite", "GraniteMoeHybrid", _GRANITE4),
    "starcoder2": Row("starcoder2", "Starcoder2", {"sliding_window": 12}),
    "glm4": Row("glm4", "Glm4", {"head_dim": 16, "attention_bias": True, "eos_token_id": 266}),
    "phi3": Row("phi3", "Phi3", {"sliding_window": 12}),
    "phi3-longrope": Row(
        "phi3", "Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}, context=64
    ),
    "gemma": Row("gemma", "Gemma", {"head_dim": 32}, {"norm_offset": 1.0}),
    "exaone4": Row("exaone4", "Exaone4", {"num_hidden_layers": 4, "sliding_window": 12, "rope_parameters": _LLAMA3}),
    "exaone4-full": Row("exaone4", "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4-unrotated": Row("exaone4", "Exaone4", {"sliding_window": 12, "layer_types": ["full_attention"] * 2}),
    "exaone": Row("exaone", "Llama", {"rope_parameters": _LLAMA3}),  # transformers has no class of its own
    "command-r": Row("command-r", "Cohere", {"logit_scale": 1.5}),
    "cohere2": Row("cohere2", "Cohere2", {"logit_scale": 1.5, "num_hidden_layers": 4, "sliding_window": 12}),
    "stablelm": Row("stablelm", "StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": Row("stablelm", "StableLm", {"use_parallel_residual": True}),
    "phi2": Row("phi2", "Phi", {}),
    "seed_oss": Row("seed_oss", "SeedOss", {"head_dim": 32}),
    "hunyuan-dense": Row("hunyuan-dense", "HunYuanDenseV1", {"head_dim": 32, "rope_parameters": _ALPHA}),
    "ernie4_5": Row("ernie4_5", "Ernie4_5", {"head_dim": 32}),
    "ernie4_5-moe": Row("ernie4_5-moe", "Ernie4_5_Moe", _ERNIE_MOE),
    "glm4moe": Row("glm4moe", "Glm4Moe", {**_GLM4MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4moe-air": Row("glm4moe", "Glm4Moe", _GLM4MOE),
    "hunyuan-moe": Row("hunyuan-moe", "HunYuanMoEV1", {"head_dim": 32, "num_experts": 5, "moe_topk": 2}),
    "minimax-m2": Row("minimax-m2", "MiniMaxM2", {**_USED, "head_dim": 32, "rope_parameters": _PARTIAL}),
    "internlm2": Row("internlm2", "Llama", {}),  # transformers has no class of its own
    "gptneox": Row("gptneox", "GPTNeoX", {}),
    "gptneox-sequential": Row("gptneox", "GPTNeoX", {"use_parallel_residual": False}),
    "starcoder": Row("starcoder", "GPTBigCode", {"num_key_value_heads": 1}),
    "chatglm": Row("chatglm", "Glm", {"head_dim": 16, "attention_bias": True, "eos_token_id": 266}),
    "minicpm": Row("minicpm", "Granite", _MINICPM),  # transformers has no class of its own
    "nemotron": Row("nemotron", "Nemotron", {}),
    "arcee": Row("arcee", "Arcee", {"rope_parameters": _YARN}),
    "olmoe": Row("olmoe", "Olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe": Row("granitemoe", "GraniteMoe", _GRANITEMOE),
    "granitemoe-shared": Row("granitemoe", "GraniteMoeShared", {**_GRANITEMOE, "shared_intermediate_size": 64}),
    "gpt-oss": Row("gpt-oss", "GptOss", {"head_dim": 16, "sliding_window": 12, "rope_parameters": _PLAIN, **_USED}),
    "qwen35": Row("qwen35", "Qwen3_5", {**_DELTA, **_DELTA_SECTIONS}),
    "qwen35moe": Row(
        "qwen35moe", "Qwen3_5Moe", {**_DELTA, **_DELTA_SECTIONS, **_MOE, "shared_expert_intermediate_size": 64}
    ),
    "qwen3next": Row(
        "qwen3next", "Qwen3Next", {**_DELTA, **_DELTA_ROPE, **_MOE, "shared_expert_intermediate_size": 32}
    ),
    "lfm2": Row("lfm2", "Lfm2", {**_CONV_LAYERS, "intermediate_size": 150, "block_multiple_of": 32}),
    "lfm2moe": Row("lfm2moe", "Lfm2Moe", {**_CONV_LAYERS, **_MOE, "num_dense_layers": 1, "num_attention_heads": 2}),
    "granitehybrid": Row("granitehybrid", "GraniteMoeHybrid", {**_GRANITE4_SCANS, **_USED}),
    "granitehybrid-dense": Row(
        "granitehybrid",
        "GraniteMoeHybrid",
        {**_GRANITE4_SCANS, "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"},
    ),
    "falcon-h1": Row("falcon-h1", "FalconH1", _FALCON_H1),
    "falcon-h1-norm": Row(
        "falcon-h1", "FalconH1", {**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "mamba2": Row(
        "mamba2",
        "Mamba2",
        {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 1, "expand": 2},
    ),
    "nemotron_h": Row("nemotron_h", "NemotronH", _NEMOTRON_H),
    "nemotron_h_moe": Row("nemotron_h_moe", "NemotronH", _NEMOTRON_H_MOE),
    "falcon": Row("falcon", "Falcon", {"num_kv_heads": 1, "ffn_hidden_size": 96}, _FALCON),
    "olmo3": Row("olmo2", "Olmo3", {"num_hidden_layers": 4, "sliding_window": 12}),
}


def main(wanted: list[str]) -> None:
    """Record these checkpoints, or all."""
    files.FOLDER.mkdir(exist_ok=True)
    for name in wanted or CHECKPOINTS:
        entry = made(CHECKPOINTS[name])
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
        (files.FOLDER / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        print(f"{name}: {len(lines)} bytes, logits up to {np.abs(entry['logits']).max():.2f}")


def made(row: Row) -> dict[str, Any]:
    """What is recorded of a checkpoint."""
    names = (f"{row.model}{suffix}" for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    kind = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    known = kind.config_class()
    given = {**{key: value for key, value in _SIZES.items() if hasattr(known, key)}, **row.config}
    if "text_config" in row.config:
        given = {**row.config, "text_config": {**_SIZES, **row.config["text_config"]}}
    config = kind.config_class(**given)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Names and shapes as they are stored, which is not always as they are in memory.
        kind(config).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            images = {key: file.get_tensor(key) for key in stored if files.IMAGES in key}
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key in ("transformers_version", "dtype"):
            about.pop(key, None)
        entry = {
            "architecture": row.architecture,
            "config": about,
            "shapes": files.shortened({key: shape for key, shape in stored.items() if key not in images}),
        }
        if row.how:
            entry["how"] = dict(row.how)
        write_safetensors(folder / "model.safetensors", {**images, **files.tensors_of(entry)})
        model, info = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
        assert not any(info.values()), info
    rows, greedy = zip(*(_run(model, prompt) for prompt in files.PROMPTS), strict=True)
    if row.context:
        entry["context"] = row.context
    return {**entry, "logits": rows, "greedy": greedy}


def _run(model: Any, prompt: list[int]) -> tuple[list[float], list[int]]:
    """Logits after the prompt, and the most likely tokens that follow."""
    ids, first = list(prompt), list[float]()
    with torch.no_grad():
        for _ in range(_GREEDY):
            logits = model(torch.tensor([ids])).logits[0, -1].numpy()
            second, best = np.sort(logits)[-2:]
            assert best - second > 1e-3, "two tokens are as likely: take other weights"
            first = first or [round(float(value), 5) for value in files.kept(logits)]
            ids.append(int(logits.argmax()))
    assert np.std(first) > 0.1
    return first, ids[len(prompt) :]


if __name__ == "__main__":
    main(sys.argv[1:])
