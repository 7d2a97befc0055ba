"""What a row about a Hugging Face `model_type` may say, and what most models have. Plain data, and nothing of files.

A key of config.json that is in no table becomes the metadata key ARCHITECTURE.config.KEY, and a tensor that is in none
keeps its name: the architecture reads neither, and refuses the checkpoint as it does for a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

# config.json → GGUF, without the architecture before it. `config` has the keys that need more than a new name.
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
_HARMLESS: Mapping[str, str] = {
    "says where the model comes from": "_name_or_path name_or_path _from_model_config transformers_version "
    "architectures auto_map model_type is_llama_config transformers.js_config unsloth_fixed unsloth_version "
    "tokenizer_class custom_pipeline custom_pipelines internal_version",
    "tensors say it": "dtype torch_dtype use_bfloat16",
    "says how a program computes, or what it returns": "attn_implementation _attn_implementation "
    "_attn_implementation_autoset use_cache cache_implementation output_attentions output_hidden_states "
    "output_router_logits return_dict torchscript reorder_and_upcast_attn tf_legacy_loss output_past",
    "for training, or for switches that are off": "initializer_range attention_dropout attn_pdrop embd_pdrop "
    "resid_pdrop hidden_dropout embedding_dropout residual_dropout attention_probs_dropout_prob hidden_dropout_prob "
    "router_aux_loss_coef router_jitter_noise gradient_checkpointing pretraining_tp max_window_layers",
    "the tokenizer has them": "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id "
    "forced_bos_token_id forced_eos_token_id prefix",
    "for other tasks": "id2label label2id num_labels _num_labels problem_type task_specific_params finetuning_task "
    "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj",
    "for sampling": "do_sample temperature top_k top_p typical_p max_length min_length num_beams num_beam_groups "
    "repetition_penalty length_penalty diversity_penalty early_stopping no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size num_return_sequences bad_words_ids suppress_tokens begin_suppress_tokens "
    "exponential_decay_length_penalty remove_invalid_values output_scores return_dict_in_generate "
    "chunk_size_feed_forward",
    "there are such tensors, or none": "attention_bias mlp_bias qkv_bias use_bias use_qk_norm",
    "says a second time what another key says": "n_ctx sliding_window_size initial_context_length experts_per_token "
    "no_rope_layer_interval",
}
HARMLESS: Mapping[str, str] = {key: reason for reason, keys in _HARMLESS.items() for key in keys.split()}


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
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "lm_head_bias": (False,),
    "clip_qkv": (None,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
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


def one_of(value: Any) -> Any:
    """Of a list with the same number for every layer: this number."""
    alike = isinstance(value, list) and value and isinstance(value[0], int) and all(each == value[0] for each in value)
    return value[0] if alike else value


class TensorSplit(NamedTuple):
    """A part of a tensor that GGUF has by itself. `part` is a word of `matrices.part_of`, "" for all of it.

    "by kind": all of it, where q, k and v of a head follow each other. transposed: columns become rows.
    """

    name: str
    part: str = ""
    transposed: bool = False


@dataclass(frozen=True)
class ModelType:
    """One row. `keys`, `neutral`, `harmless`, `whole` and `layer` are added to those of most models.

    pairs: GGUF's converter puts the rows of q and k that rope turns together beside each other.
    norm_offset: what is added to the weights of norms, but to those of `plain_norms`. rope: are positions rotated?
    theta: rope_theta of files that do not say; None where versions of transformers differ, so that they must.
    window: is there one where config.json has sliding_window, whatever use_sliding_window says? full_every: a layer
    without a window is every so many; 0 if all layers are alike. pattern: sliding_window_pattern says how many.
    local_rope: layers with a window have a base of rope of their own.
    unrotated_every: positions are not rotated in every so many layers, which GGUF does not say.
    mixed: decoder_sparse_step and mlp_only_layers say which layers have experts.
    full_layers: layers without a window have heads of other sizes, by per_layer_config or keys that begin with global.
    recurrent: what layer_types calls layers that keep a state in place of keys and values.
    scan: where layers have a selective scan (Mamba-2): in place of keys and values, beside them, in layers that have
    nothing else ("plain"), or in all layers, which then have nothing else ("alone").
    factors: matrices are multiplied by numbers of config.json, as Falcon-H1's are.
    adjusted_ffn: block_auto_adjust_ff_dim says that the network is narrower than intermediate_size.
    defaults: of keys that config.json may lack. partial_rotary_factor is read where it has one.
    older: keys by the names that they had before.
    nested: the key that holds those of the text model.
    renames: expressions and what takes their place in names of tensors, before all else; the first that is found
    counts. ignored: names of tensors that the logits of text do not need.
    """

    architecture: str
    pairs: bool = False
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    rope: bool = True
    theta: float | None = 10000.0
    window: bool = False
    full_every: int = 0
    pattern: bool = False
    local_rope: bool = False
    unrotated_every: int = 0
    mixed: bool = False
    full_layers: bool = False
    recurrent: str = ""
    scan: Literal["", "instead", "beside", "plain", "alone"] = ""
    factors: bool = False
    adjusted_ffn: bool = False
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    nested: str | None = None
    whole: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str | tuple[TensorSplit, ...]] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    ignored: str | None = None

    def gguf_keys(self) -> Mapping[str, tuple[str, ...]]:
        """GGUF's keys by those of config.json."""
        return {**KEYS, **self.keys}

    def neutral_values(self) -> Mapping[str, tuple[Any, ...]]:
        """By key, the values that change nothing."""
        return {**NEUTRAL, **self.neutral}

    def is_harmless(self, key: str, value: Any) -> bool:
        """Does this entry of config.json change nothing? Null is "not set" for a key that no table has."""
        values = self.neutral_values().get(key)
        value = one_of(value)
        unset = value is None and values is None and key not in self.gguf_keys()
        return key in HARMLESS or key in self.harmless or unset or any(value == each for each in values or ())

    def whole_names(self) -> Mapping[str, str]:
        """GGUF's names of tensors outside of layers."""
        return {**_WHOLE, **self.whole}

    def layer_names(self) -> Mapping[str, str | tuple[TensorSplit, ...]]:
        """GGUF's names of a layer's tensors; {e} stands for the number of an expert."""
        return {**_LAYER, **self.layer}
