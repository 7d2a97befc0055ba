"""Hugging Face folders for tests, made of tiny GGUF files: the inverse of what GGUF's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.formats.gguf import GgufFile

from .safetensors_files import bf16, write_safetensors

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONFIG = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized")  # of tokens that are added


def folder_of(gguf: Path, folder: Path, *, parts: int = 1, dtype: str = "f32") -> Path:
    """Write a folder with the weights, the configuration and the tokenizer of a llama's or a qwen3's file."""
    folder.mkdir()
    with GgufFile.open(gguf) as file:
        own = str(file.metadata["general.architecture"])
        heads = {name: file.metadata[f"{own}.attention.head_count{kv}"] for name, kv in (("q", ""), ("k", "_kv"))}
        tensors: dict[str, NDArray[Any]] = {}
        for name in file.tensors:
            stem, suffix = name.split(".")[-2:]
            values = file.dense(name)
            if own == "llama" and stem in ("attn_q", "attn_k"):
                count = heads[stem[-1]]
                pairs = values.reshape(count, len(values) // count // 2, 2, -1)
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            there = _WHOLE.get(stem) or f"model.layers.{name.split('.')[1]}.{_NAMES[stem]}"
            tensors[f"{there}.{suffix}"] = _as(values, dtype)
        metadata = dict(file.metadata)
    _write_parts(folder, tensors, parts)
    config = {key: metadata[f"{own}.{there}"] for key, there in _CONFIG.items() if f"{own}.{there}" in metadata}
    config |= {"model_type": own, "vocab_size": len(metadata["tokenizer.ggml.tokens"]), "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer(folder, metadata)
    return folder


def replace_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def _as(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    return bf16(values) if dtype == "bf16" else values.astype(np.float16 if dtype == "f16" else np.float32)


def _write_parts(folder: Path, tensors: dict[str, NDArray[Any]], parts: int) -> None:
    if parts == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    where = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        write_safetensors(folder / file, {name: array for name, array in tensors.items() if where[name] == file})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    made = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True, **dict.fromkeys(_SWITCHES, False)}
            for i, text in enumerate(tokens)
            if types[i] == 3
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_GPT2]},
        "decoder": _GPT2,
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate(tokens) if types[i] != 3},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    config = {"eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]]}
    if "tokenizer.chat_template" in metadata:
        (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
