"""The architectures that can run: one row for each, by the name that GGUF's `general.architecture` has.

A row says where an architecture differs from `Architecture`. Keys of its metadata that need code have a function above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import ModelError
from . import gemma4
from .architecture import GATE_UP, NORMS, QKV, Architecture
from .config import Config, Factors, Layer, Metadata, Mixture, Sections
from .recurrent import SCAN_KEYS
from .windows import all_layers, local_layers

# Functions of rows: what further keys say -----------------------------------------------------------------


def _optional(meta: Metadata, key: str) -> float | None:
    """A number above 0, which files may lack, or set to 0."""
    return meta.number(key) if meta.get(key) else None


def _falcon(meta: Metadata, config: Config) -> Config:
    expected = "jploski"  # all queries, all keys, all values. Every published file says so
    if (layout := meta.get("tensor_data_layout")) != expected:
        raise meta.wrong("tensor_data_layout", repr(expected), layout)
    return config


def _gemma(meta: Metadata, config: Config) -> Config:
    return replace(config, factors=Factors(embedding=math.sqrt(config.hidden)))


def _gemma_scores(meta: Metadata, config: Config, layers_27b: int) -> float:
    """The scores of the largest model are scaled by another width than that of a head, which no GGUF file says."""
    width = config.hidden // config.heads if config.layers == layers_27b else config.head_width
    return _optional(meta, "attention.scale") or 1 / math.sqrt(width)


def _gemma2(meta: Metadata, config: Config) -> Config:
    factors = Factors(
        embedding=math.sqrt(config.hidden),
        scores=_gemma_scores(meta, config, 46),
        score_cap=meta.number("attn_logit_softcapping", 50.0),
        logit_cap=meta.number("final_logit_softcapping", 30.0),
    )
    return local_layers(meta, replace(config, factors=factors), period=2, default=4096)


def _gemma3(meta: Metadata, config: Config) -> Config:
    factors = Factors(
        embedding=math.sqrt(config.hidden),
        scores=_gemma_scores(meta, config, 62),
        logit_cap=_optional(meta, "final_logit_softcapping") or 0.0,
    )
    theta = meta.number("rope.freq_base_swa", 10000.0)
    return local_layers(meta, replace(config, factors=factors), period=6, local_theta=theta)


_GELUS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}


def _gelu(meta: Metadata, config: Config, key: str) -> Config:
    """The GELU that config.json of a folder names, if it is not the architecture's usual one. GGUF has no such key."""
    name = meta.get(key)
    if name is None:
        return config
    if not isinstance(name, str) or name not in _GELUS:
        raise meta.wrong(key, f"one of {', '.join(_GELUS)}", name)
    return replace(config, activation=_GELUS[name])


def _gptneox(meta: Metadata, config: Config) -> Config:
    """The feed-forward network of most reads the norm of a layer's input, without what attention adds to it."""
    parallel = meta.get("use_parallel_residual")
    if not isinstance(parallel, bool):
        raise meta.wrong("use_parallel_residual", "true or false", parallel)
    return _gelu(meta, replace(config, ffn_input="input" if parallel else "sum"), "config.hidden_act")


def _granite(meta: Metadata, config: Config) -> Config:
    """Factors, where 0 stands for "not set". The logits are divided by theirs.

    Positions are rotated unless rope.scaling.finetuned says no: files have no key of its own for that. Those of Granite
    4 without recurrent layers say how such layers would be. Only images have features that are added to layers.
    """
    shared = "expert_shared_feed_forward_length"
    if config.experts is None and meta.get(shared, config.ffn) != config.ffn:
        raise meta.wrong(shared, f"feed_forward_length, {config.ffn}, in a file without experts", meta.get(shared))
    for key in ("deepstack_mapping", *(SCAN_KEYS if config.scan is None else ())):
        meta.get(key)
    embedding, residual, logits = (_optional(meta, f"{key}_scale") or 1.0 for key in ("embedding", "residual", "logit"))
    factors = Factors(embedding, residual, 1 / logits, _optional(meta, "attention.scale"))
    config, rotated = replace(config, factors=factors), meta.get("rope.scaling.finetuned", True)
    if not isinstance(rotated, bool):
        raise meta.wrong("rope.scaling.finetuned", "true or false", rotated)
    if rotated:
        return config
    layers = tuple(replace(layer, rope=None) for layer in config.per_layer or (Layer(),) * config.layers)
    return replace(config, per_layer=layers, rope=replace(config.rope, rotary=0, factors=None))


def _minicpm(meta: Metadata, config: Config) -> Config:
    """Factors. The logits are divided by theirs."""
    embedding, residual, logits = (meta.number(f"{key}_scale") for key in ("embedding", "residual", "logit"))
    return replace(config, factors=Factors(embedding, residual, 1 / logits))


def _mistral3(meta: Metadata, config: Config) -> Config:
    """Queries of Ministral 3 are scaled from the original context on (16,384 tokens), which is not supported.

    So it is the longest context.
    """
    if not meta.get("attention.temperature_scale"):
        return config
    meta.number("attention.temperature_scale")
    original = meta.whole("rope.scaling.original_context_length")
    return replace(config, context=min(config.context, meta.whole("attention.temperature_length", original)))


def _no_attention(meta: Metadata, config: Config) -> Config:
    """Files say that there are no heads, and no network."""
    for key in ("attention.head_count", "feed_forward_length"):
        if meta.get(key) != 0:
            raise meta.wrong(key, "0", meta.get(key))
    return config


def _no_rope(meta: Metadata, config: Config) -> Config:
    """Positions are not rotated, though files say how they would be."""
    for key in ("rope.dimension_count", "rope.freq_base"):
        meta.get(key)
    return config


def _sections(meta: Metadata, config: Config) -> Config:
    """Of text, all dimensions of a position are alike. Only images have features that are added to layers."""
    meta.get("n_deepstack_layers")
    value = meta.get("rope.dimension_sections")
    if value is None:  # then nothing says how images are rotated, and they are refused
        return config
    good = isinstance(value, list) and len(value) in (3, 4) and all(type(n) is int and n >= 0 for n in value)
    if not good or sum(value) != config.rope.rotary // 2 or any(value[3:]):
        raise meta.wrong("rope.dimension_sections", f"three numbers whose sum is {config.rope.rotary // 2}", value)
    temporal, vertical, horizontal = value[:3]
    grouped = config.architecture == "qwen2vl"
    return replace(config, sections=Sections(temporal, vertical, horizontal, grouped))


def _qwen35(meta: Metadata, config: Config) -> Config:
    """Of text, all dimensions of a position are alike."""
    meta.get("rope.dimension_sections")
    return config


def _scaled_logits(meta: Metadata, config: Config) -> Config:
    return replace(config, factors=Factors(logits=meta.number("logit_scale")))


def _smollm3(meta: Metadata, config: Config) -> Config:
    """Positions are not rotated in every fourth layer, which no file says."""
    return replace(config, per_layer=tuple(Layer(rope=None) if i % 4 == 3 else Layer() for i in range(config.layers)))


def _stablelm(meta: Metadata, config: Config) -> Config:
    """Where a layer has no norm before its feed-forward network, the network reads what attention does."""
    meta.get("use_parallel_residual")  # converters write true where the model does not say; the norms are decisive
    parallel, key = "blk.0.ffn_norm.weight" not in config.shapes, "config.use_parallel_residual"
    folder_says = meta.get(key, parallel)
    if folder_says is not parallel:
        raise meta.wrong(key, f"{parallel}, by the norms of the layers", folder_says)
    return replace(config, ffn_input="attn_norm") if parallel else config


# Rows -----------------------------------------------------------------------------------------------------

_ATTENTION = ("attn_q", "attn_k", "attn_v")
_GPT2_BIASES = (*NORMS, "attn_qkv", "attn_output", "ffn_up", "ffn_down")

_QWEN_NEXT: Mapping[str, Any] = {
    "head_norms": True,
    "gated": True,
    "mixer": "delta_rule",
    "ffn_norm": "post_attention_norm",
}
_QWEN_NEXT_MIXTURE = Mixture(shared="gated")

_NEMOTRON_H: Mapping[str, Any] = {
    "mixer": "mamba2",
    "layout": "plain",
    "ffn_norm": "attn_norm",
    "positions": "none",
    "activation": "relu_squared",
    "finalize_config": _no_rope,
}

_ROWS = (
    # Arcee's AFM: as llama, but squares of positive values in place of a gate.
    Architecture("arcee", interleaved=True, activation="relu_squared"),
    # GLM-4-9B and ChatGLM: half of a head is rotated in neighbouring pairs.
    Architecture("chatglm", interleaved=True, packed_tensors={**QKV, **GATE_UP}),
    # Command R7B and Command A: as Command R, with a window in three of four layers. The fourth does not rotate.
    Architecture(
        "cohere2",
        interleaved=True,
        norm="layer_norm",
        ffn_input="attn_norm",
        finalize_config=lambda meta, config: local_layers(meta, _scaled_logits(meta, config), period=4, full_rope=None),
    ),
    # Command R: attention and feed-forward network read the same layer norm, and logits have a factor.
    Architecture(
        "command-r", interleaved=True, norm="layer_norm", ffn_input="attn_norm", finalize_config=_scaled_logits
    ),
    # ERNIE 4.5, the dense ones: as llama.
    Architecture("ernie4_5", interleaved=True),
    # ERNIE 4.5 with experts: as ernie4_5. The first layers have none, and a network for all rows is beside the others.
    Architecture("ernie4_5-moe", interleaved=True, mixture=Mixture(shared="optional", selection_bias="optional")),
    # EXAONE 3 and 3.5: as llama, and rope pairs the halves of a head.
    Architecture("exaone"),
    # EXAONE 4: norms of heads, and norms only after attention and feed-forward network. The largest has a window in
    # three of four layers; the others of its layers do not rotate positions.
    Architecture(
        "exaone4",
        head_norms=True,
        norms_before=False,
        norms_after=True,
        finalize_config=partial(local_layers, period=4, default=0, full_rope=None),
    ),
    # Falcon-H1: attention and Mamba-2 read the same in every layer. Factors are in the weights.
    Architecture("falcon-h1", mixer="mamba2", layout="beside"),
    # Falcon 7B: attention and feed-forward network read the same layer norm, one head of keys and values, no gate.
    Architecture(
        "falcon",
        norm="layer_norm",
        ffn_input="attn_norm",
        activation="gelu_erf",
        packed_tensors=QKV,
        biases=NORMS,
        finalize_config=_falcon,
    ),
    # Gemma, the first: as llama with GELU, scaled embeddings and heads as wide as the metadata says.
    Architecture("gemma", activation="gelu_mul", finalize_config=_gemma),
    # Gemma 2: norms before and after, capped scores and logits, a window in every second layer.
    Architecture("gemma2", norms_after=True, activation="gelu_mul", finalize_config=_gemma2),
    # Gemma 3, text: as Gemma 2 without caps. Five of six layers have a window and a rope of their own.
    Architecture("gemma3", head_norms=True, norms_after=True, activation="gelu_mul", finalize_config=_gemma3),
    # Gemma 4, text: layers with a window differ from the others in nearly all sizes, the last layers read the keys and
    # values of others, and each may have embeddings of its own.
    Architecture(
        "gemma4",
        head_norms=True,
        value_norms=True,
        norms_after=True,
        activation="gelu_mul",
        layer_scales=True,
        mixture=Mixture(always=False, activation="gelu_mul", beside_network=True),
        per_layer_keys=(gemma4.KV_HEADS, gemma4.FFN),
        finalize_config=gemma4.finalize_config,
    ),
    # GLM-4-0414: norms before and after, half of a head rotated in neighbouring pairs.
    Architecture("glm4", interleaved=True, norms_after=True, packed_tensors=GATE_UP),
    # GLM-4.5, 4.6 and 4.7: half of a head is rotated, the largest normalise heads. Files call the norm before the
    # feed-forward network by the name of the one after attention.
    Architecture(
        "glm4moe",
        ffn_norm="post_attention_norm",
        head_norms="optional",
        mixture=Mixture(gating="sigmoid", shared="optional", selection_bias="always"),
    ),
    # gpt-oss: attention sinks, a window in every second layer, experts with biases and a clamped gate. Its files call
    # the norm before the feed-forward network by the name of the one after attention.
    Architecture(
        "gpt-oss",
        ffn_norm="post_attention_norm",
        sinks=True,
        biases=(*_ATTENTION, "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        mixture=Mixture(normalise=False, gating="softmax_used", activation="swiglu_clamped"),
        finalize_config=partial(local_layers, period=2),
    ),
    # GPT-2: learned positions, layer norms and biases, no gate.
    Architecture(
        "gpt2", norm="layer_norm", activation="gelu", positions="learned", packed_tensors=QKV, biases=_GPT2_BIASES
    ),
    # GPT-NeoX and Pythia: layer norms and biases, a part of each head is rotated, no gate.
    Architecture(
        "gptneox",
        norm="layer_norm",
        activation="gelu_erf",
        packed_tensors=QKV,
        biases=(*NORMS, "ffn_up", "ffn_down"),
        finalize_config=_gptneox,
    ),
    # Granite 3 and 4, the dense ones: as llama, with factors.
    Architecture("granite", interleaved=True, finalize_config=_granite),
    # Granite 4 with Mamba-2 in most layers: as granite and granitemoe, mostly without rope.
    Architecture(
        "granitehybrid",
        interleaved=True,
        mixer="mamba2",
        mixture=Mixture(always=False, own_width=False, shared="optional"),
        finalize_config=_granite,
    ),
    # Granite with experts, and in some files a network for all rows beside them. The factors of experts are the softmax
    # over the chosen ones: the same as that over all, made to add up to 1.
    Architecture(
        "granitemoe", interleaved=True, mixture=Mixture(own_width=False, shared="optional"), finalize_config=_granite
    ),
    # Hunyuan, the dense ones of 2025: heads of queries and keys are rotated, then normalised.
    Architecture("hunyuan-dense", head_norms=True, rope_first=True),
    # Hunyuan-A13B: the same with experts, and a network for all rows beside them.
    Architecture("hunyuan-moe", head_norms=True, rope_first=True, mixture=Mixture(shared="optional")),
    # InternLM2 and 2.5: as llama.
    Architecture("internlm2", interleaved=True),
    # LFM2: short convolutions in most layers, attention with norms of heads in the others.
    Architecture("lfm2", head_norms=True, mixer="short_conv", output_norm="token_embd_norm"),
    # LFM2 with experts: a sigmoid chooses them, with a bias that does not weigh. The first layers have none.
    Architecture(
        "lfm2moe",
        head_norms=True,
        mixer="short_conv",
        output_norm="token_embd_norm",
        mixture=Mixture(gating="sigmoid", selection_bias="always"),
    ),
    # Llama 1 to 3.x, Mistral, Mixtral, SmolLM2: rope pairs neighbours, as GGUF stores these models. Mistral 7B v0.1 has
    # a sliding window, which files converted for llama.cpp do not mention.
    Architecture("llama", interleaved=True, mixture=Mixture(always=False, own_width=False), finalize_config=all_layers),
    # Mamba-2: no attention and no network.
    Architecture("mamba2", mixer="mamba2", layout="alone", positions="none", finalize_config=_no_attention),
    # MiniCPM 1B and 2B: as llama, with factors.
    Architecture("minicpm", interleaved=True, positions="long_rope", finalize_config=_minicpm),
    # MiniMax-M2: norms of whole rows of q and k, a part of each head is rotated, and experts chosen by sigmoids.
    Architecture("minimax-m2", row_norms=True, mixture=Mixture(gating="sigmoid", selection_bias="always")),
    # Mistral Small 3.1 on, Ministral 3, Devstral, Magistral: as llama.
    Architecture("mistral3", interleaved=True, finalize_config=_mistral3),
    # Nemotron 3 and 4, Minitron: a part of each head is rotated, squares of positive values, no gate.
    Architecture("nemotron", norm="layer_norm", biases=NORMS, activation="relu_squared"),
    # Nemotron-H: each layer is Mamba-2, attention without rope, or a network of squares of positive values.
    # The largest have experts in place of networks, chosen by sigmoids.
    Architecture("nemotron_h", **_NEMOTRON_H),
    Architecture(
        "nemotron_h_moe",
        mixture=Mixture(gating="sigmoid", shared="width", selection_bias="always", activation="relu_squared"),
        **_NEMOTRON_H,
    ),
    # OLMo 2 and 3: norms of whole rows of q and k, and norms only after attention and feed-forward network. OLMo 3 has
    # a window in three of four layers, whose positions are never scaled.
    Architecture(
        "olmo2",
        norms_before=False,
        norms_after=True,
        row_norms=True,
        finalize_config=lambda meta, config: local_layers(
            meta, config, period=4, default=0, local_theta=config.rope.theta
        ),
    ),
    # OLMoE: norms of whole rows of q and k, and a mixture whose factors stay as they are.
    Architecture("olmoe", row_norms=True, mixture=Mixture(normalise=False, own_width=False)),
    # Phi-1, 1.5 and 2: attention and feed-forward network read the same layer norm, biases everywhere, no gate.
    Architecture(
        "phi2",
        norm="layer_norm",
        ffn_input="attn_norm",
        activation="gelu",
        packed_tensors=QKV,
        biases=(*_GPT2_BIASES, *_ATTENTION, "output"),
    ),
    # Phi-3 and Phi-4: factors of rope for long contexts.
    Architecture("phi3", positions="long_rope", packed_tensors={**QKV, **GATE_UP}, finalize_config=all_layers),
    # Qwen2 and Qwen2.5: biases of queries, keys and values.
    Architecture("qwen2", biases=_ATTENTION),
    # Qwen1.5 and Qwen2 with experts: a mixture whose factors stay as they are, and a gated network for all rows.
    Architecture("qwen2moe", mixture=Mixture(normalise=False, shared="gated")),
    # The text of Qwen2-VL and Qwen2.5-VL: as qwen2.
    Architecture("qwen2vl", biases=_ATTENTION, finalize_config=_sections),
    # Qwen3: heads of queries and keys have norms. They are as wide as the metadata says (128), whatever hidden / heads.
    Architecture("qwen3", head_norms=True),
    # The text of Qwen3.5, dense and with experts: the gated delta rule, and in every fourth layer gated attention.
    # Files call the norm before the feed-forward network post_attention_norm.
    Architecture("qwen35", finalize_config=_qwen35, **_QWEN_NEXT),
    Architecture("qwen35moe", mixture=_QWEN_NEXT_MIXTURE, finalize_config=_qwen35, **_QWEN_NEXT),
    # Qwen3-Next: as Qwen3.5 with experts.
    Architecture("qwen3next", mixture=_QWEN_NEXT_MIXTURE, **_QWEN_NEXT),
    # Qwen3 with experts: every feed-forward network is a mixture whose factors add up to 1.
    Architecture("qwen3moe", head_norms=True, mixture=Mixture()),
    # The text of Qwen3-VL, as qwen3 and qwen3moe.
    Architecture("qwen3vl", head_norms=True, finalize_config=_sections),
    Architecture("qwen3vlmoe", head_norms=True, mixture=Mixture(), finalize_config=_sections),
    # Seed-OSS: as qwen2, and files call the norm before the feed-forward network post_attention_norm.
    Architecture("seed_oss", ffn_norm="post_attention_norm", biases=_ATTENTION),
    # SmolLM3: as llama.
    Architecture("smollm3", interleaved=True, finalize_config=_smollm3),
    # StableLM 3B and StableLM 2: layer norms, and a part of each head is rotated.
    Architecture("stablelm", norm="layer_norm", biases=NORMS, finalize_config=_stablelm),
    # StarCoder, the first, and SantaCoder: as GPT-2 with one head of keys and values.
    Architecture(
        "starcoder",
        norm="layer_norm",
        activation="gelu",
        positions="learned",
        packed_tensors=QKV,
        biases=_GPT2_BIASES,
        finalize_config=partial(_gelu, key="config.activation_function"),
    ),
    # StarCoder2: layer norms and biases of norms and mostly of matrices, no gate.
    Architecture("starcoder2", norm="layer_norm", activation="gelu", biases=NORMS, finalize_config=all_layers),
)
ARCHITECTURES: Mapping[str, Architecture] = {row.name: row for row in _ROWS}


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture that a checkpoint names."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(f"this checkpoint's architecture is {name!r}; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
