"""What becomes of the metadata and the tensors of a checkpoint that its architecture does not read.

A file that says something which is not computed would give wrong answers in silence. So every key is read by the
architecture, or is in one of the two tables here, or is unknown; only harmless ones pass. Every tensor must be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..errors import ModelError
from .config import Config, Metadata, Shapes

# Keys that change no logits, and why. Names as in gguf.constants.Keys; a test asks for every key of that package.
HARMLESS: Mapping[str, str] = {
    "vocab_size": "the embedding matrix has as many rows",
    "pooling_type": "for embeddings of whole texts, which are not computed",
    "attention.layer_norm_epsilon": "the norms are RMS norms, which have an epsilon of their own",
    "rope.scaling.finetuned": "says how the model was trained",
}


def _off(value: Any, config: Config) -> bool:
    """0, false, nothing, or a list of them."""
    return not any(value) if isinstance(value, list) else not value


def _one(value: Any, config: Config) -> bool:
    """A factor of 1. Files write 0 for "not set"."""
    return not isinstance(value, bool) and value in (0, 1)


_GATINGS: Mapping[str, int] = {"softmax": 1, "sigmoid": 2, "softmax_used": 3}


def _gating(value: Any, config: Config) -> bool:
    """The function by which the architecture chooses experts. Files write 0 for "not set"."""
    expected = _GATINGS[config.experts.mixture.gating] if config.experts is not None else 0
    return value in (0, expected) and not isinstance(value, bool)


class Refused(NamedTuple):
    """A key that changes what is computed: how, in words; and the values with which it does not."""

    effect: str
    neutral: Callable[[Any, Config], bool] = _off


def _group(effect: str, prefix: str, names: str) -> dict[str, Refused]:
    return {f"{prefix}{name}": Refused(effect) for name in names.split()}


_EXPERTS = "the feed-forward network consists of experts"
_WINDOW = "layers with a sliding window are of another shape"
_LATENT = "queries, keys and values pass through matrices of low rank"
_RECURRENT = "layers are recurrent"
_IMAGES = "the model is one for images or sound"

REFUSED: Mapping[str, Refused] = {
    # Attention
    "attention.causal": Refused("tokens see those after them", lambda value, config: value is True),
    "attention.scale": Refused(
        "scores are scaled by another factor than 1 / sqrt(head width)",
        lambda value, config: value == 0 or _close(value, 1 / math.sqrt(max(1, config.head_width))),
    ),
    "attention.sliding_window": Refused(
        "a token sees only that many tokens before it (no difference within a --context of as many)",
        lambda value, config: _off(value, config) or (isinstance(value, int) and value >= config.context),
    ),
    "attention.sliding_window_pattern": Refused("some layers have a sliding window"),
    "attention.max_alibi_bias": Refused("scores fall with the distance between tokens (ALiBi)"),
    "attention.clamp_kqv": Refused("queries, keys and values are clamped"),
    "attention.output_scale": Refused("what attention gives is scaled", _one),
    "attention.relative_buckets_count": Refused("scores depend on the distance between tokens"),
    "attention.shared_kv_layers": Refused("layers share their keys and values"),
    **_group("queries are scaled by their position", "attention.temperature_", "length scale"),
    **_group("values are normalised in groups", "attention.group_norm_", "epsilon groups"),
    **_group(_LATENT, "attention.", "q_lora_rank kv_lora_rank key_length_mla value_length_mla"),
    **_group(_WINDOW, "attention.", "key_length_swa value_length_swa"),
    **_group("attention is sparse", "attention.indexer.", "head_count key_length top_k"),
    **_group(
        _RECURRENT,
        "attention.",
        "decay_lora_rank iclr_lora_rank value_residual_mix_lora_rank gate_lora_rank",
    ),
    "attn_logit_softcapping": Refused("scores are capped"),
    "full_attention_interval": Refused("only some layers attend to all tokens"),
    # Positions
    "rope.dimension_sections": Refused("positions have several dimensions"),
    "rope.scaling.alpha": Refused("positions are rotated at other frequencies"),
    "rope.dimension_count_swa": Refused(_WINDOW, lambda value, config: value in (0, config.rope.rotary)),
    "rope.freq_base_swa": Refused(
        "layers with a sliding window rotate positions at other frequencies",
        lambda value, config: value == 0 or _close(value, config.rope.theta),
    ),
    # Factors and caps
    "embedding_scale": Refused("embeddings are scaled", _one),
    "residual_scale": Refused("what a layer adds is scaled", _one),
    "logit_scale": Refused("logits are scaled", _one),
    "final_logit_softcapping": Refused("logits are capped"),
    "router_logit_softcapping": Refused(_EXPERTS),
    **_group("the gate of the feed-forward network is clamped", "swiglu_clamp_", "exp shexp"),
    "activation_sparsity_scale": Refused("only the largest activations count"),
    # Experts
    **_group(
        _EXPERTS,
        "expert_",
        "count used_count shared_count feed_forward_length shared_feed_forward_length chunk_feed_forward_length "
        "weights_scale group_scale",
    ),
    "expert_group_count": Refused("experts are chosen in groups", _one),
    "expert_group_used_count": Refused("experts are chosen in groups", _one),
    "expert_weights_norm": Refused(
        "it says whether the factors of the chosen experts add up to 1",
        lambda value, config: value is (config.experts is not None and config.experts.mixture.normalise),
    ),
    "expert_gating_func": Refused("experts are chosen by another function", _gating),
    **_group(
        _EXPERTS,
        "",
        "experts_per_group leading_dense_block_count moe_every_n_layers interleave_moe_layer_step",
    ),
    "moe_latent_size": Refused("experts read a shorter vector"),
    # Layers
    "use_parallel_residual": Refused("attention and feed-forward network read the same input"),
    "n_deepstack_layers": Refused(_IMAGES),
    "swin_norm": Refused("norms come after the layers"),
    "rescale_every_n_layers": Refused("activations are halved every few layers"),
    **_group("the model has an encoder and a decoder", "decoder_", "start_token_id block_count"),
    **_group("layers read several streams", "altup.", "active_idx num_inputs"),
    "embedding_length_per_layer_input": Refused("layers have embeddings of their own"),
    "embedding_length_out": Refused(
        "logits come from a vector of another length", lambda value, config: value in (0, config.hidden)
    ),
    "tensor_data_layout": Refused(
        "weights lie in another order", lambda value, config: value in ("reference", "Meta AI original pth")
    ),
    **_group("a dense head follows the layers", "dense_", "2_feat_in 2_feat_out 3_feat_in 3_feat_out"),
    "classifier.output_labels": Refused("the model sorts texts into classes"),
    # Other kinds of models
    "features_length": Refused(_IMAGES),
    **_group(_RECURRENT, "", "time_mix_extra_dim time_decay_extra_dim token_shift_count wkv.head_size kda.head_dim"),
    **_group(_RECURRENT, "ssm.", "conv_kernel inner_size state_size time_step_rank group_count dt_b_c_rms"),
    "shortconv.l_cache": Refused("layers are convolutions"),
    **_group(_IMAGES, "posnet.", "embedding_length block_count"),
    **_group(_IMAGES, "convnext.", "embedding_length block_count"),
}


# Keys of other kinds of models and files, which begin with no architecture's name: how they begin, what they say.
_OTHER_KINDS: Mapping[str, str] = {
    "adapter.": "the file is an adapter (LoRA), which changes the weights of a model",
    "clip.": _IMAGES,
    "diffusion.": "the model does not generate one token after the other",
    "imatrix.": "the file has statistics of activations",
    "xielu.": "the activation is xIELU",
}
# Values of general.type that are not "model".
_OTHER_TYPES: Mapping[str, str] = {
    "adapter": _OTHER_KINDS["adapter."],
    "imatrix": _OTHER_KINDS["imatrix."],
    "mmproj": "the file is the part of a model that reads images or sound; its language model is another file",
}


def check_kind(metadata: Mapping[str, Any]) -> None:
    """Refuse files that are not language models."""
    kind = metadata.get("general.type")
    if isinstance(kind, str) and kind in _OTHER_TYPES:
        raise ModelError(f"general.type is {kind!r}: {_OTHER_TYPES[kind]}. A file of the type 'model' is needed")
    for key, value in metadata.items():
        effect = next((words for start, words in _OTHER_KINDS.items() if key.startswith(start)), None)
        if effect is not None:
            raise ModelError(f"{key} is {value!r:.60}: {effect}, which is not supported")


def _close(value: Any, expected: float) -> bool:
    return isinstance(value, (int, float)) and math.isclose(value, expected, rel_tol=1e-6)  # files have f32


def check_keys(meta: Metadata, config: Config) -> None:
    """Refuse keys that would change what is computed."""
    for key, value in meta.unread().items():
        known = REFUSED.get(key)
        if key in HARMLESS or (known is not None and known.neutral(value, config)):
            continue
        effect = known.effect if known is not None else "it is not known what that changes"
        shown, name = repr(value), meta.full(key)
        raise ModelError(
            f"{name} is {shown if len(shown) <= 60 else f'{shown[:59]}…'}: {effect}, which the architecture "
            f"{config.architecture} does not support. --ignore-key {name} (in Python ignore_keys=[{name!r}]) reads the "
            "file as if it did not have this key"
        )


# What tensors would change, by a pattern of their names.
_TENSORS: tuple[tuple[str, str], ...] = (
    (r"\.(input_)?scale$", "scales of weights"),
    (r"attn_sinks", "attention sinks"),
    (r"attn_[qk]_norm", "norms of queries and keys"),
    (r"post_.*norm|attn_output_norm|layer_output_norm", "norms after attention or feed-forward network"),
    (r"attn_norm_2", "a second norm of what a layer reads"),
    (r"(ffn_norm|pre_ffw_norm_2)\.weight$", "a norm before the feed-forward network"),
    (r"norm\.bias$", "biases of norms"),
    (r"^output\.bias$", "a bias of the logits"),
    (r"ffn_latent_", "experts that read a shorter vector"),
    (r"_exps\b|_shexp\b|ffn_gate_inp|exp_probs_b", "experts"),
    (r"rope_factors_", "frequencies of longrope"),
    (r"rope_freqs|attn_rot_embd", "frequencies of positions"),
    (r"attn_qkv", "queries, keys and values in one matrix"),
    (r"attn_(q|k|v|gate|output)\.weight$", "attention"),
    (r"ssm_in\b", "all that recurrent layers read, in one matrix"),
    (r"ssm_|shortconv", "recurrent layers"),
    (r"ffn_(gate|up|down)\.weight$", "a feed-forward network without experts"),
    (r"inp_gate|\.proj\b|per_layer_", "embeddings of layers"),
    (r"^cls", "a classifier"),
    (r"^dense_", "a dense head after the layers"),
    (r"\.bias$", "biases"),
)
_LISTED = 4


def check_tensors(architecture: str, shapes: Shapes, read: Collection[str]) -> None:
    """Refuse tensors that nobody reads; those of all layers count as one."""
    unread = [name for name in shapes if name not in read]
    if not unread:
        return
    kinds: dict[str, str] = {}
    for name in unread:
        kinds.setdefault(re.sub(r"^blk\.\d+\.", "blk.N.", name), name)
    listed = ", ".join(map(_described, list(kinds.values())[:_LISTED]))
    more = f" and {len(kinds) - _LISTED} more" if len(kinds) > _LISTED else ""
    raise ModelError(
        f"the file has {len(unread)} {'tensor' if len(unread) == 1 else 'tensors'} that the architecture "
        f"{architecture} does not read: {listed}{more}. It is a variant that is not supported, or has more layers than "
        f"{architecture}.block_count says"
    )


def _described(name: str) -> str:
    effect = next((words for pattern, words in _TENSORS if re.search(pattern, name)), None)
    return f"{name} ({effect})" if effect else name
