"""config.json → the metadata that a GGUF file of the same model has. Knows keys, not tensors of files.

What has another name is in the tables of `models`; here is what needs computing: rope, windows, scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from .model_type import ModelType, one_of
from .models import MODEL_TYPES, row_of

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Layers by the letters of hybrid_override_pattern, and by their names in older and newer files.
_PATTERN: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_LAYER_KINDS: Mapping[str, str] = {
    **{name: name for name in _PATTERN.values()},
    "linear_attention": "mamba",
    "full_attention": "attention",
}
_ONE_FACTOR = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_UNLIMITED = 1 << 20  # the context that converters write where positions are not rotated
_NEVER = 1e30  # what GGUF divides the frequencies of values by that are not rotated


class FolderConfig:
    """The keys of config.json: each is taken once, and what nobody takes stays in the metadata for refusal."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = config.get("model_type")
        if not isinstance(name, str) or name not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise ModelError(f"config.json: model_type is {name!r}; supported in folders: {known}. A GGUF file may run")
        self.row: ModelType = row_of(name, config)
        flat = _flat(config, self.row.nested)
        for older, newer in self.row.older.items():
            if older in flat and flat.get(newer, flat[older]) == flat[older]:  # it may have both names
                flat[newer] = flat.pop(older)
        self._unread = {**self.row.defaults, **flat}
        self.vocabulary = self.whole("vocab_size")
        self.tied = self.take("tie_word_embeddings")
        if not isinstance(self.tied, (bool, NoneType)):
            raise ModelError(f"config.json: tie_word_embeddings must be true or false, it is {self.tied!r:.60}")
        self.quantisation = self.take("quantization_config")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, NDArray[np.float32]] = {}  # that GGUF stores, and folders compute
        # What rows of matrices are multiplied by, which GGUF's are already: so many rows, and the factor.
        self.factors: dict[str, list[tuple[int, float]]] = {}
        self._fill()

    def take(self, key: str, default: Any = None) -> Any:
        """A value, which is then dealt with."""
        value = self._unread.pop(key, default)
        return default if value is None else value

    def whole(self, key: str) -> int:
        """A whole number from 1 to 2²⁴."""
        return _whole(key, self.take(key))

    def set(self, key: str, value: Any) -> None:
        """An entry of the metadata. `key` is without the architecture."""
        self.metadata[f"{self.row.architecture}.{key}"] = value

    def get(self, key: str) -> Any:
        """An entry that was set."""
        return self.metadata.get(f"{self.row.architecture}.{key}")

    def _fill(self) -> None:
        self.metadata["general.architecture"] = self.row.architecture
        kinds = self._kinds()
        for key, names in self.row.gguf_keys().items():
            if key in self.row.keys and self._unread.get(key, 0) is None and self.row.defaults.get(key) is not None:
                continue  # switched off by null where GGUF has no "off": it stays, and is refused
            value = one_of(self.take(key))
            for name in names if value is not None else ():
                self.set(name, value)
        if self.row.scan == "alone":
            self._alone()
            return
        heads, hidden = (_whole(key, self.get(key)) for key in ("attention.head_count", "embedding_length"))
        self.head_width = _whole("head_dim", self.get("attention.key_length") or hidden // heads)
        if self.get("feed_forward_length") is None:
            self.set("feed_forward_length", 4 * hidden)  # n_inner of GPT-2
        self._adjusted_ffn()
        self._full_layers()
        self._recurrent()
        self._scan(kinds)
        self._factors()
        self._window()
        self._unrotated()
        self._mixed()
        if self.row.rope:
            _rope(self)
        scalar = self.take("query_pre_attn_scalar")
        if scalar is not None:
            self.set("attention.scale", 1 / math.sqrt(_number("query_pre_attn_scalar", scalar)))
        self._leave()

    def _leave(self) -> None:
        """What nobody has taken, for refusal."""
        for key, value in self._unread.items():
            if not self.row.is_harmless(key, value):
                self.set(f"config.{key}", value)

    def _adjusted_ffn(self) -> None:
        """The width of LFM2's network: two thirds, times a factor, in whole multiples."""
        if not self.row.adjusted_ffn:
            return
        adjust, factor = self.take("block_auto_adjust_ff_dim"), self.take("block_ffn_dim_multiplier")
        multiple = self.whole("block_multiple_of")
        if not isinstance(adjust, bool):
            raise ModelError(f"config.json: block_auto_adjust_ff_dim must be true or false, it is {adjust!r:.60}")
        factor = _number("block_ffn_dim_multiplier", factor)
        if adjust:
            width = int(factor * int(2 * _whole("intermediate_size", self.get("feed_forward_length")) / 3))
            self.set("feed_forward_length", multiple * -(-width // multiple))

    def _full_layers(self) -> None:
        """Gemma 4: layers without a window have heads of another width and number, and some networks are wider."""
        if not self.row.full_layers:
            return
        count, width = _whole("num_hidden_layers", self.get("block_count")), self.head_width
        kv_heads = _whole("num_key_value_heads", self.get("attention.head_count_kv"))
        full, own = self._full_of(count), self.take("per_layer_config")
        one_product = self._switch("attention_k_eq_v")
        named = {"head_dim": self.take("global_head_dim", 512), "num_key_value_heads": None}
        if (global_kv_heads := self.take("num_global_key_value_heads")) is not None and one_product:
            named["num_key_value_heads"] = global_kv_heads
        if own is None:
            own = {str(i): {key: value for key, value in named.items() if value is not None} for i in full}
        _check_per_layer(own, count)
        layers = [own.get(str(i), {}) for i in range(count)]
        widths = {i: _whole("head_dim", each.get("head_dim", width)) for i, each in enumerate(layers)}
        if len({widths[i] for i in full}) != 1 or any(widths[i] != width for i in range(count) if i not in full):
            raise ModelError(
                "config.json: per_layer_config must give all layers of one kind heads of the same width, "
                f"{_FULL!r} have {sorted({widths[i] for i in full})}"
            )
        self.head_width = widths[full[0]]
        for key, value in (("key_length", self.head_width), ("key_length_swa", width)):
            self.set(f"attention.{key}", value)
            self.set(f"attention.{key.replace('key', 'value')}", value)
        counts = [_whole("num_key_value_heads", each.get("num_key_value_heads", kv_heads)) for each in layers]
        self.set("attention.head_count_kv", one_of(counts))
        self.set("rope.dimension_count_swa", width)
        self.set("config.attention_k_eq_v", one_product)
        shared, ffn = self.get("attention.shared_kv_layers") or 0, self.get("feed_forward_length")
        if self._switch("use_double_wide_mlp") and isinstance(shared, int) and isinstance(ffn, int):
            self.set("feed_forward_length", [ffn if i < count - shared else 2 * ffn for i in range(count)])
        has_experts = self._switch("enable_moe_block")
        if has_experts and self.get("expert_count") is None:
            raise ModelError("config.json: enable_moe_block is true, and num_experts says no number")
        if not has_experts:
            for key in ("count", "used_count", "feed_forward_length"):
                self.metadata.pop(f"{self.row.architecture}.expert_{key}", None)

    def _full_of(self, count: int) -> list[int]:
        """Which layers have no window. The last is one of them."""
        usual = [_FULL if i % self.row.full_every == self.row.full_every - 1 else _SLIDING for i in range(count)]
        types = self._unread.get("layer_types") or usual
        if not isinstance(types, list) or len(types) != count or types[-1] != _FULL:
            raise ModelError(f"config.json: layer_types must have {count} entries, the last of them {_FULL!r}")
        return [i for i, each in enumerate(types) if each == _FULL]

    def _switch(self, key: str) -> bool:
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} must be true or false, it is {value!r:.60}")
        return value

    def _recurrent(self) -> None:
        """Which layers keep a state, as GGUF says it."""
        name, layers = self.row.recurrent, _whole("num_hidden_layers", self.get("block_count"))
        if not name:
            return
        types, attending = self.take("layer_types"), self.take("full_attn_idxs")
        if not isinstance(attending, (list, NoneType)):
            raise ModelError(f"config.json: full_attn_idxs must list layers, it is {attending!r:.60}")
        listed = None if attending is None else [_FULL if i in attending else name for i in range(layers)]
        types = listed if types is None else types
        if listed is not None and listed != types:
            raise ModelError("config.json: full_attn_idxs and layer_types differ")
        if name == "linear_attention":
            every = _whole("full_attention_interval", self.take("full_attention_interval", _every(types)))
            usual = [_FULL if i % every == every - 1 else name for i in range(layers)]
            if types not in (None, usual):
                raise ModelError(f"config.json: layer_types must have {_FULL!r} once for every {every} layers")
            self.set("full_attention_interval", every)
            heads = _whole("linear_num_value_heads", self.get("ssm.time_step_rank"))
            self.set("ssm.inner_size", heads * self.whole("linear_value_head_dim"))
            self.set("config.grouped_value_heads", True)
            return
        if not isinstance(types, list) or len(types) != layers or not all(each in (_FULL, name) for each in types):
            raise ModelError(f"config.json: layer_types must have {layers} times {_FULL!r} or {name!r}")
        kv_heads = self.get("attention.head_count_kv") or self.get("attention.head_count")
        self.set("attention.head_count_kv", [kv_heads if each == _FULL else 0 for each in types])

    def _kinds(self) -> list[str]:
        """What each layer is, of models where it is one thing of several."""
        if self.row.scan not in ("instead", "plain"):
            return []
        types, pattern = self.take("layer_types"), self.take("hybrid_override_pattern")
        if isinstance(pattern, str):
            named = [_PATTERN.get(letter, letter) for letter in pattern]
            if types is not None and named != [_LAYER_KINDS.get(each, each) for each in types]:
                raise ModelError("config.json: hybrid_override_pattern and layers_block_type differ")
            types = named
        layers = self._unread.get("num_hidden_layers")
        if types is None and self.row.scan == "instead":
            types = ["mamba"] * _whole("num_hidden_layers", layers)
        if not isinstance(types, list) or not types or not all(isinstance(each, str) for each in types):
            raise ModelError(f"config.json: layer_types must name the kind of each layer, it is {types!r:.60}")
        kinds = [_LAYER_KINDS.get(each, each) for each in types]
        if wrong := sorted(set(kinds) - set(_PATTERN.values())):
            raise ModelError(f"config.json: layer_types has {wrong[0]!r:.60}; known are {', '.join(_LAYER_KINDS)}")
        if layers is None and self.row.scan == "plain":
            self._unread["num_hidden_layers"] = layers = len(kinds)
        if layers != len(kinds):
            raise ModelError(f"config.json: num_hidden_layers is {layers!r:.60}, layer_types has {len(kinds)} entries")
        return kinds

    def _scan(self, kinds: list[str]) -> None:
        """Sizes of selective scans, and which layers have one, as GGUF says it."""
        if not self.row.scan:
            return
        heads, width = _whole("the number of heads", self.get("ssm.time_step_rank")), self.take("mamba_d_head", "auto")
        inner, expand = self.take("mamba_d_ssm"), self.take("mamba_expand")
        if self.row.scan == "plain":
            inner = heads * _whole("mamba_head_dim", width)
        elif inner is None:
            inner = _whole("expand", expand) * _whole("hidden_size", self.get("embedding_length"))
        inner = _whole("mamba_d_ssm", inner)
        if width != "auto" and inner != heads * _whole("mamba_d_head", width):
            raise ModelError(f"config.json: {heads} heads of the width {width} are not {inner} values")
        self.set("ssm.inner_size", inner)
        self._step_limits()
        if self.row.scan == "beside":
            normalised, before = self._switch("mamba_rms_norm"), self._switch("mamba_norm_before_gate")
            self.set("config.mamba_rms_norm", normalised)
            if normalised and before:
                self.set("config.mamba_norm_before_gate", True)
        if self.row.scan == "instead":
            kv_heads = self.get("attention.head_count_kv") or self.get("attention.head_count")
            self.set("attention.head_count_kv", [kv_heads if each == "attention" else 0 for each in kinds])
            rotated = self.take("position_embedding_type")
            if rotated not in (None, "nope", "rope"):
                self.set("config.position_embedding_type", rotated)
            self.set("rope.scaling.finetuned", rotated == "rope")
            if rotated != "rope":
                self.set("context_length", _UNLIMITED)
        elif self.row.scan == "plain":
            kv_heads, network = self.get("attention.head_count_kv"), "moe" if "moe" in kinds else "mlp"
            ffn = self.get(f"{'expert_' if network == 'moe' else ''}feed_forward_length")
            self.set("attention.head_count_kv", [kv_heads if each == "attention" else 0 for each in kinds])
            self.set("context_length", _UNLIMITED)
            self.set("feed_forward_length", [ffn if each == network else 0 for each in kinds])
            if {"moe", "mlp"} <= set(kinds):
                self.set("config.layer_types", "layers with experts and without")

    def _step_limits(self) -> None:
        """Of time steps; files of newer versions write infinity as an object."""
        limits = self.take("time_step_limit", [0.0, math.inf])
        if isinstance(limits, list):
            limits = [math.inf if each == {"__float__": "Infinity"} else each for each in limits]
        numbers = isinstance(limits, list) and all(type(each) in (int, float) and each >= 0 for each in limits)
        if not numbers or len(limits) != 2 or limits[0] > limits[1]:
            raise ModelError(f"config.json: time_step_limit must be two numbers of at least 0, it is {limits!r:.60}")
        if limits != [0, math.inf]:
            self.set("config.time_step_limit", [limits[0], 0.0 if limits[1] == math.inf else limits[1]])

    def _alone(self) -> None:
        """Mamba-2: no attention and no network."""
        self.set("attention.head_count", 0)
        self.set("feed_forward_length", 0)
        self.set("context_length", _UNLIMITED)
        self._scan([])
        self._leave()

    def _factors(self) -> None:
        """Falcon-H1: what its matrices are multiplied by."""
        if not self.row.factors:
            return

        def several(key: str, count: int) -> list[float]:
            values = self.take(key, [1.0] * count)
            if not isinstance(values, list) or len(values) != count:
                raise ModelError(f"config.json: {key} must list {count} numbers, it is {values!r:.60}")
            return [_number(key, value) for value in values]

        one = {name: _number(name, self.take(name, 1.0)) for name in _ONE_FACTOR}
        into, gate_down, scan = (
            one["attention_in_multiplier"],
            several("mlp_multipliers", 2),
            several("ssm_multipliers", 5),
        )
        matrices = {
            "token_embd": one["embedding_multiplier"],
            "output": one["lm_head_multiplier"],
            "attn_q": into,
            "attn_k": into * one["key_multiplier"],
            "attn_v": into,
            "attn_output": one["attention_out_multiplier"],
            "ssm_out": one["ssm_out_multiplier"],
            "ffn_gate": gate_down[0],
            "ffn_down": gate_down[1],
        }
        self.factors = {stem: [(0, factor)] for stem, factor in matrices.items() if factor != 1}
        inner, groups, state = (
            _whole(key, self.get(f"ssm.{key}")) for key in ("inner_size", "group_count", "state_size")
        )
        widths = (inner, inner, groups * state, groups * state, 0)
        into = one["ssm_in_multiplier"]
        self.factors["ssm_in"] = [(rows, into * factor) for rows, factor in zip(widths, scan, strict=True)]
        if self.tied and one["embedding_multiplier"] != one["lm_head_multiplier"]:
            self.set("config.tie_word_embeddings", True)  # one matrix cannot have two factors

    def _unrotated(self) -> None:
        """Layers without rope must be those that GGUF's readers know of."""
        every, layers = self.row.unrotated_every, _whole("num_hidden_layers", self.get("block_count"))
        if not every:
            return
        interval = _whole("no_rope_layer_interval", self.take("no_rope_layer_interval", every))
        usual = [int((i + 1) % every != 0) for i in range(layers)]
        if self.take("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)]) != usual:
            self.set("config.no_rope_layers", "other layers than every fourth")

    def _mixed(self) -> None:
        """Which layers have experts."""
        if not self.row.mixed:
            return
        layers, every = _whole("num_hidden_layers", self.get("block_count")), self.take("decoder_sparse_step", 1)
        every, without = _whole("decoder_sparse_step", every), self.take("mlp_only_layers", [])
        if not isinstance(without, list) or not all(type(i) is int and 0 <= i < layers for i in without):
            raise ModelError(f"config.json: mlp_only_layers must list layers, it is {without!r:.60}")
        experts = [i not in without and (i + 1) % every == 0 for i in range(layers)]
        self.set("config.layers_with_experts", experts)

    def _window(self) -> None:
        layers = _whole("num_hidden_layers", self.get("block_count"))
        size, used = self.take("sliding_window"), self.take("use_sliding_window", self.row.window)
        if self.row.window and size and used is not True:  # models of this type have a window all the same
            self.set("config.use_sliding_window", used)
            used = True
        types = self.take("layer_types")
        if isinstance(types, list):
            types = [_FULL if each == "attention" else each for each in types]
        pattern = None
        if self.row.pattern:
            pattern = self.take("sliding_window_pattern", self.take("_sliding_window_pattern"))
        if types is None:
            every = pattern if pattern is not None else self.row.full_every
            every = _whole("sliding_window_pattern", every) if every else 0
            full = [not (used and size) or (every > 0 and i % every == every - 1) for i in range(layers)]
            if not self.row.window:  # use_sliding_window, from a layer on
                first = self.take("max_window_layers", 0)
                full = [full[i] or (isinstance(first, int) and i < first) for i in range(layers)]
        elif isinstance(types, list) and len(types) == layers and all(each in (_FULL, _SLIDING) for each in types):
            full = [each == _FULL for each in types]
        else:
            raise ModelError(f"config.json: layer_types must have {layers} times {_FULL!r} or {_SLIDING!r}")
        if self.row.window and not self.row.full_every and size and any(full):
            raise ModelError(f"config.json: there is a sliding_window, but layer_types have {_FULL!r}")
        # Layers without a window may not rotate positions where the model has one, even if no layer uses it.
        if all(full) and not (size and self.row.full_every):
            if self.row.full_every:
                self.set("attention.sliding_window", 0)  # GGUF may have a default
            return
        self.set("attention.sliding_window", _whole("sliding_window", size))
        usual = self.row.full_every
        if full != [usual > 0 and i % usual == usual - 1 for i in range(layers)]:
            self.set("attention.sliding_window_pattern", [not each for each in full])


def _every(types: Any) -> int:
    """How often a layer attends, by layer_types; 4 where there are none."""
    return types.index(_FULL) + 1 if isinstance(types, list) and _FULL in types else 4


# Rope ----------------------------------------------------------------------------------------------------


def _rope(config: FolderConfig) -> None:
    """rope_theta with rope_scaling, or since 2025 rope_parameters, which may have one entry per kind of layer."""
    parameters = config.take("rope_parameters", config.row.defaults.get("rope_parameters", {}))
    if isinstance(parameters, dict) and set(parameters) & {_FULL, _SLIDING}:
        local = parameters.get(_SLIDING) or {}
        if not isinstance(local, dict):
            raise ModelError(f"config.json: {_SLIDING} of rope_parameters must be an object, it is {local!r:.60}")
        if local.get("rope_type", "default") != "default":
            raise ModelError(f"config.json: rope_type of {_SLIDING} must be 'default', it is {local['rope_type']!r}")
        unknown = {key: value for key, value in local.items() if key not in ("rope_type", "rope_theta")}
        unknown |= {key: value for key, value in parameters.items() if key not in (_FULL, _SLIDING)}
        if unknown:
            config.set("config.rope_parameters", unknown)
        parameters = parameters.get(_FULL) or {}
        theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        if "rope_theta" in local and (config.row.local_rope or local["rope_theta"] != theta):
            config.set("rope.freq_base_swa", _number("rope_theta", local["rope_theta"]))
    if not isinstance(parameters, dict):
        raise ModelError(f"config.json: rope_parameters must be an object, it is {parameters!r:.60}")
    older = config.take("rope_scaling", {})
    if not older and not parameters and config.row.defaults.get("rope_scaling"):
        raise ModelError("config.json: rope_scaling must be an object, it is null")
    if not isinstance(older, dict) or (
        older and parameters and older not in (parameters, config.row.defaults.get("rope_scaling"))
    ):
        raise ModelError(f"config.json: rope_scaling must be an object like rope_parameters, it is {older!r:.60}")
    scaling = dict(parameters or older)
    context = scaling.pop("max_position_embeddings", None)  # which newer versions write here, too
    if context is not None and context != config.get("context_length"):
        raise ModelError(
            f"config.json: max_position_embeddings is {config.get('context_length')!r:.60} and, in rope_parameters, "
            f"{context!r:.60}"
        )
    usual = config.take("rope_theta", config.row.theta)
    theta = _number("rope_theta", scaling.pop("rope_theta", usual))
    config.set("rope.freq_base", theta)
    local_theta = config.take("rope_local_base_freq")
    if local_theta is not None:
        if config.get("rope.freq_base_swa") not in (None, local_theta):
            raise ModelError("config.json: rope_local_base_freq and rope_parameters differ")
        config.set("rope.freq_base_swa", _number("rope_local_base_freq", local_theta))
    rotary_dim = config.take("rotary_dim")
    usual = config.take("partial_rotary_factor", 1)
    if rotary_dim is not None:
        usual = _whole("rotary_dim", rotary_dim) / config.head_width
    # Where it is proportional, `_proportional` takes it.
    kept = 1 if scaling.get("rope_type") == "proportional" else scaling.pop("partial_rotary_factor", usual)
    part = _number("partial_rotary_factor", kept)
    if part > 1:
        raise ModelError(f"config.json: partial_rotary_factor must be a number from 0 to 1, it is {part:g}")
    if "partial_rotary_factor" not in config.row.defaults and part != 1:
        config.set("config.partial_rotary_factor", part)
    rotary = int(config.head_width * part)
    config.set("rope.dimension_count", rotary)
    sections = scaling.pop("mrope_section", None)
    if sections is not None:
        scaling.pop("mrope_interleaved", None)
        config.set("rope.dimension_sections", sections)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    make = _SCALINGS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ModelError(f"config.json: the rope scaling {kind!r} is not supported; {', '.join(_SCALINGS)} are")
    make(config, scaling, theta, rotary)
    if scaling:
        config.set("config.rope_scaling", scaling)


def _linear(config: FolderConfig, scaling: dict[str, Any], theta: float, rotary: int) -> None:
    config.set("rope.scaling.type", "linear")
    config.set("rope.scaling.factor", _number("factor", scaling.pop("factor", None)))


def _dynamic(config: FolderConfig, scaling: dict[str, Any], theta: float, rotary: int) -> None:
    """Hunyuan's has a factor for the base. Without, the base grows with the text, which is not supported."""
    alpha = scaling.pop("alpha", None)
    if not alpha or scaling.get("factor", 1) != 1 or rotary <= 2:
        raise ModelError("config.json: the rope scaling 'dynamic' is not supported without alpha and with a factor")
    config.set("rope.freq_base", theta * _number("alpha", alpha) ** (rotary / (rotary - 2)))
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # nothing reads them
        scaling.pop(key, None)


def _llama3(config: FolderConfig, scaling: dict[str, Any], theta: float, rotary: int) -> None:
    """Slow frequencies are divided by `factor`, fast ones by nothing, those between by something between.

    GGUF has the divisors as a tensor.
    """
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, trained = (_number(key, scaling.pop(key, None)) for key in keys)
    if high <= low:
        raise ModelError(f"config.json: high_freq_factor must be above low_freq_factor, got {high} and {low}")
    turns = trained / (2 * np.pi * theta ** (np.arange(0, rotary, 2, dtype=np.float64) / rotary))  # within `trained`
    fast = np.clip((turns - low) / (high - low), 0, 1)
    config.tensors["rope_freqs.weight"] = (1 / ((1 - fast) / factor + fast)).astype(np.float32)


def _yarn(config: FolderConfig, scaling: dict[str, Any], theta: float, rotary: int) -> None:
    factor = _number("factor", scaling.pop("factor", None))
    if factor < 1:
        raise ModelError(f"config.json: the factor of yarn must be at least 1, it is {factor:g}")
    config.set("rope.scaling.type", "yarn")
    config.set("rope.scaling.factor", factor)
    trained = scaling.pop("original_max_position_embeddings", None) or config.get("context_length")
    config.set("rope.scaling.original_context_length", _whole("original_max_position_embeddings", trained))
    for key in ("beta_fast", "beta_slow"):
        if scaling.get(key) is not None:
            config.set(f"rope.scaling.yarn_{key}", _number(key, scaling[key]))
        scaling.pop(key, None)
    _yarn_magnitude(config, scaling, factor)
    if scaling.get("llama_4_scaling_beta") is not None:
        config.set("attention.temperature_scale", scaling["llama_4_scaling_beta"])
    scaling.pop("llama_4_scaling_beta", None)
    if scaling.pop("truncate", True) is not True:
        config.set("rope.scaling.yarn_truncate", False)


def _yarn_magnitude(config: FolderConfig, scaling: dict[str, Any], factor: float) -> None:
    """Under a key that GGUF does not have, where it is not the usual one, 1 + 0.1 ln(factor)."""

    def usual(share: float) -> float:
        return 1 + 0.1 * share * math.log(factor) if factor > 1 else 1.0

    above, below, whole = (scaling.pop(key, None) for key in ("mscale", "mscale_all_dim", "attention_factor"))
    magnitude = usual(1)
    if whole is not None:
        magnitude = _number("attention_factor", whole)
    elif above and below:
        magnitude = usual(_number("mscale", above)) / usual(_number("mscale_all_dim", below))
    if not math.isclose(magnitude, usual(1), rel_tol=1e-6):
        config.set("rope.scaling.yarn_magnitude", magnitude)


def _longrope(config: FolderConfig, scaling: dict[str, Any], theta: float, rotary: int) -> None:
    context = _whole("max_position_embeddings", config.get("context_length"))
    beside, inside = config.get("rope.scaling.original_context_length"), "original_max_position_embeddings"
    trained = _whole(inside, scaling.pop(inside, None) or beside)
    if beside not in (None, trained):
        raise ModelError(f"config.json: {inside} is {beside} and, in the scaling of rope, {trained}")
    if trained < 2:
        raise ModelError(f"config.json: {inside} must be at least 2, it is {trained}")
    config.set("rope.scaling.original_context_length", trained)
    factor = context / trained
    grown = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    magnitude = scaling.pop("attention_factor", None)
    config.set("rope.scaling.attn_factor", _number("attention_factor", grown if magnitude is None else magnitude))
    for length in ("long", "short"):
        values = scaling.pop(f"{length}_factor", None)
        if not isinstance(values, list) or len(values) != rotary // 2:
            raise ModelError(f"config.json: {length}_factor must have {rotary // 2} numbers")
        numbers = [_number(f"{length}_factor", value) for value in values]
        config.tensors[f"rope_factors_{length}.weight"] = np.array(numbers, np.float32)


def _proportional(config: FolderConfig, scaling: dict[str, Any], theta: float, rotary: int) -> None:
    """Frequencies are those of the whole head. A part of its pairs is rotated, the others by nothing."""
    part = _number("partial_rotary_factor", scaling.pop("partial_rotary_factor", 1.0))
    if part > 1:
        raise ModelError(f"config.json: partial_rotary_factor must be a number from 0 to 1, it is {part:g}")
    factor, rotated = _number("factor", scaling.pop("factor", 1.0)), int(part * rotary // 2)
    factors = [factor] * rotated + [_NEVER] * (rotary // 2 - rotated)
    config.tensors["rope_freqs.weight"] = np.array(factors, np.float32)


def _default(config: FolderConfig, scaling: dict[str, Any], theta: float, rotary: int) -> None:
    scaling.pop("factor", None)


_SCALINGS: Mapping[str, Callable[[FolderConfig, dict[str, Any], float, int], None]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}


def _flat(config: Mapping[str, Any], nested: str | None) -> dict[str, Any]:
    """The keys of the text model, where they are in an object of their own, before those beside it."""
    flat = dict(config)
    inner = flat.pop(nested, {}) if nested else {}
    if not isinstance(inner, dict):
        raise ModelError(f"config.json: {nested} must be an object, it is {inner!r:.60}")
    return flat | inner


def _check_per_layer(own: Any, count: int) -> None:
    known, objects = {str(i) for i in range(count)}, isinstance(own, dict)
    if not objects or not set(own) <= known or not all(isinstance(each, dict) for each in own.values()):
        raise ModelError(f"config.json: per_layer_config must have objects by the numbers of layers, it is {own!r:.60}")
    others = sorted({str(key) for each in own.values() for key in each} - {"head_dim", "num_key_value_heads"})
    if others:
        raise ModelError(f"config.json: per_layer_config has {others[0]!r:.60}, which is not supported")


# Numbers -------------------------------------------------------------------------------------------------


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise ModelError(f"config.json: {key} must be a whole number from 1 to 2²⁴, it is {value!r:.60}")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {key} must be a number above 0, it is {value!r:.60}")
    return float(value)
