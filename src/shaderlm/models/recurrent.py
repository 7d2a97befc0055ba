"""Layers whose state stands for all tokens before: their numbers, their tensors and their part of the graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..graph.graph import Builder, TensorSlice
from .config import Config, DeltaRule, Layer, Metadata, Mixer, StepSpec

_KV_HEADS = "attention.head_count_kv"
_MAX_KERNEL = 16
# No key of GGUF, whose readers know by the architecture in which order value heads lie. Folders have their own.
_GROUPED = "config.grouped_value_heads"


def layers_that_attend(mixer: Mixer, meta: Metadata, heads: int, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Heads of keys and values, and which layers attend."""
    if mixer == "short_conv":
        return _heads_of_layers(meta, heads, layers)
    attends = _every_so_many(meta, layers) if mixer == "delta_rule" else (True,) * layers
    return meta.whole(_KV_HEADS, heads, maximum=4096), attends


def read_mixer(mixer: Mixer, meta: Metadata, config: Config, attends: tuple[bool, ...]) -> Config:
    """The config with the layers that do not attend, and their sizes."""
    read = _read_short_conv if mixer == "short_conv" else _read_delta_rule
    return read(meta, _with_mixer(mixer, config, attends))


def mixer_matrices(config: Config, mixer: Mixer) -> dict[str, tuple[int, int]]:
    """Of a layer that does not attend."""
    return _conv_matrices(config) if mixer == "short_conv" else _delta_matrices(config)


def _heads_of_layers(meta: Metadata, heads: int, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Key and value heads, and which layers attend, of files that have a number for each layer: 0 where none does."""
    listed = meta.get(_KV_HEADS)
    expected = f"{layers} whole numbers, all 0 or the same"
    if not isinstance(listed, list) or len(listed) != layers:
        raise meta.wrong(_KV_HEADS, expected, listed)
    counts = {count for count in listed if count != 0 or isinstance(count, bool)}
    if len(counts) > 1 or any(isinstance(count, bool) or not isinstance(count, int) for count in counts):
        raise meta.wrong(_KV_HEADS, expected, listed)
    kv_heads = next(iter(counts), heads)
    if not 1 <= kv_heads <= heads:
        raise meta.wrong(_KV_HEADS, f"from 1 to {heads}", listed)
    return kv_heads, tuple(count != 0 for count in listed)


def _with_mixer(mixer: Mixer, config: Config, attends: tuple[bool, ...]) -> Config:
    """The config with the layers that do not attend."""
    layers = config.per_layer or (Layer(),) * config.layers
    mixed = tuple(
        layer if attends[i] else replace(layer, mixer=mixer, window=0, rope=None) for i, layer in enumerate(layers)
    )
    return replace(config, per_layer=mixed)


def _read_short_conv(meta: Metadata, config: Config) -> Config:
    """LFM2: how many tokens its convolutions see."""
    return replace(config, conv_kernel=meta.whole("shortconv.l_cache", maximum=_MAX_KERNEL))


def _every_so_many(meta: Metadata, layers: int) -> tuple[bool, ...]:
    """Which layers attend, of files where the last of every so many does."""
    every = meta.whole("full_attention_interval", maximum=1024)
    return tuple(i % every == every - 1 for i in range(layers))


def _read_delta_rule(meta: Metadata, config: Config) -> Config:
    """Qwen3-Next and Qwen3.5: sizes of layers with the gated delta rule, and of the convolutions before it."""
    key_width, key_heads = meta.whole("ssm.state_size", maximum=1024), meta.whole("ssm.group_count", maximum=4096)
    value_heads, values = meta.whole("ssm.time_step_rank", maximum=4096), meta.whole("ssm.inner_size")
    if value_heads % key_heads:
        raise meta.wrong("ssm.time_step_rank", f"a multiple of group_count, {key_heads}", value_heads)
    if values % value_heads:
        raise meta.wrong("ssm.inner_size", f"a multiple of time_step_rank, {value_heads}", values)
    grouped = meta.get(_GROUPED, _joint(config))
    if not isinstance(grouped, bool):
        raise meta.wrong(_GROUPED, "true or false", grouped)
    delta = DeltaRule(key_heads, value_heads, key_width, values // value_heads, grouped)
    return replace(config, conv_kernel=meta.whole("ssm.conv_kernel", maximum=_MAX_KERNEL), delta=delta)


def _delta_matrices(config: Config) -> dict[str, tuple[int, int]]:
    """Of a layer with the gated delta rule."""
    delta, hidden = _delta(config), config.hidden
    factors = {"ssm_ba": 2 * delta.value_heads} if _joint(config) else dict.fromkeys(_FACTORS, delta.value_heads)
    return {
        "attn_qkv": (delta.channels, hidden),
        "attn_gate": (delta.values, hidden),
        **{name: (rows, hidden) for name, rows in factors.items()},
        "ssm_out": (hidden, delta.values),
    }


_FACTORS = ("ssm_beta", "ssm_alpha")


def _joint(config: Config) -> bool:
    """Do files have beta and alpha in one matrix, ssm_ba, those of a key head one after the other?"""
    return config.architecture == "qwen3next"


def _delta(config: Config) -> DeltaRule:
    assert config.delta is not None
    return config.delta


def _conv_matrices(config: Config) -> dict[str, tuple[int, int]]:
    """Of a layer with a short convolution."""
    hidden = config.hidden
    return {"shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}


def vectors(config: Config, mixer: Mixer) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer beside matrices and norms."""
    if mixer == "short_conv":
        return {"shortconv.conv.weight": (config.hidden, config.conv_kernel)}
    if mixer == "delta_rule":
        delta = _delta(config)
        return {
            "ssm_conv1d.weight": (delta.channels, config.conv_kernel),
            "ssm_a": (delta.value_heads,),
            "ssm_dt.bias": (delta.value_heads,),
            "ssm_norm.weight": (delta.value_width,),
        }
    return {}


@dataclass(frozen=True)
class LayerBuilder:
    """Adds the nodes of one layer to a graph. `batch`: some of the step's rows may be padding."""

    b: Builder
    config: Config
    layer: str
    step: StepSpec
    batch: Mapping[str, str]

    def add(self, op: str, out: str, shape: tuple[int, ...], dims: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
        """A node, and the tensor [tokens, …] that it makes."""
        name = self.b.tensor(f"{self.layer}.{out}", self.step.tokens, *shape)
        sizes = {"tokens": self.step.tokens, **dims, "batched": bool(self.batch)}
        self.b.add(op, sizes, {**inputs, **self.batch}, self.layer, out=name)
        return name

    def product(
        self, out: str, x: str, stored: str, rows: int, columns: int, first: int = 0, groups: int = 1, stride: int = 0
    ) -> str:
        """x times some rows of a matrix of the checkpoint: so many groups of neighbours, at this distance."""
        full, each = f"{self.layer}.{stored}.weight", rows // groups
        kind = self.config.formats[full]
        parts = [TensorSlice(full, each, first + i * stride) for i in range(groups)]
        weight = self.b.view(f"{self.layer}.{out}.weight", rows, columns, of=parts, format=kind)
        dims = {"K": columns, "N": rows, "format": kind, "bias": False}
        return self.add("linear", out, (rows,), dims, {"x": x, "weight": weight})

    def pair(self, op: str, out: str, a: str, b: str, width: int) -> str:
        """An op of two tensors [tokens, width], value by value."""
        return self.add(op, out, (width,), {"count": self.step.tokens * width}, {"a": a, "b": b})

    def vector(self, name: str, *shape: int) -> str:
        """A tensor of the checkpoint whose values lie one after the other."""
        return self.b.tensor(f"{self.layer}.{name}", math.prod(shape), role="weight")

    def recurrent(
        self, op: str, out: str, width: int, dims: Mapping[str, Any], inputs: Mapping[str, str], state: tuple[int, ...]
    ) -> str:
        """An op with a state for each sequence."""
        kept = self.b.tensor(f"{self.layer}.{out}.state", 1, *state, role="recurrent")
        name = self.b.tensor(f"{self.layer}.{out}", self.step.tokens, width)
        single = self.step.tokens == 1 or self.step.decode
        operands = {**inputs, "batch": "batch", "page_table": "page_table", "state": kept}
        sizes = {"tokens": self.step.tokens, **dims, "single": single}
        self.b.add(op, sizes, operands, self.layer, out=name, state=kept)
        return name

    def mixed(self, mixer: Mixer, x: str) -> str:
        """What the layer makes of its input, before the residual."""
        return self._short_conv(x) if mixer == "short_conv" else self._delta_rule(x)

    def _short_conv(self, x: str) -> str:
        """LFM2: what a convolution over the last tokens gives is gated before and after."""
        hidden, kernel = self.config.hidden, self.config.conv_kernel
        before, after, values = (
            self.product(f"shortconv.{name}", x, "shortconv.in_proj", hidden, hidden, i * hidden)
            for i, name in enumerate(("before", "after", "values"))
        )
        gated = self.pair("mul", "shortconv.gated", before, values, hidden)
        dims = {"width": hidden, "kernel": kernel, "silu": False}
        inputs = {"x": gated, "weight": self.vector("shortconv.conv.weight", hidden, kernel)}
        y = self.recurrent("short_conv", "shortconv.conv", hidden, dims, inputs, (kernel, hidden))
        y = self.pair("mul", "shortconv.mixed", after, y, hidden)
        return self.product("shortconv.out_proj", y, "shortconv.out_proj", hidden, hidden)

    def _delta_rule(self, x: str) -> str:
        """Qwen3-Next and Qwen3.5: a convolution over queries, keys and values, the gated delta rule, a gated norm."""
        config, hidden, tokens = self.config, self.config.hidden, self.step.tokens
        delta, kernel = _delta(config), config.conv_kernel
        heads, values = delta.value_heads, delta.values
        mixed = self.product("attn_qkv", x, "attn_qkv", delta.channels, hidden)
        gate = self.product("attn_gate", x, "attn_gate", values, hidden)
        beta, alpha = self._factors(x)
        dims: dict[str, Any] = {"width": delta.channels, "kernel": kernel, "silu": True}
        inputs = {"x": mixed, "weight": self.vector("ssm_conv1d.weight", delta.channels, kernel)}
        mixed = self.recurrent("short_conv", "ssm_conv", delta.channels, dims, inputs, (kernel, delta.channels))
        inputs = {"x": mixed, "alpha": alpha, "beta": beta, "decay": self._decay(heads)}
        dims = {"Hk": delta.key_heads, "Hv": heads, "Dk": delta.key_width, "Dv": delta.value_width}
        shape = (heads, delta.key_width, delta.value_width)
        y = self.recurrent("gated_delta_rule", "ssm", values, {**dims, "grouped": delta.grouped}, inputs, shape)
        dims = {"heads": heads, "width": delta.value_width, "eps": config.eps}
        y = self.add("rms_norm", "ssm_norm.plain", (values,), dims, {"x": y})
        dims = {"count": tokens * values, "period": delta.value_width}
        weight = self.vector("ssm_norm.weight", delta.value_width)
        y = self.add("mul", "ssm_norm", (values,), dims, {"a": y, "b": weight})
        y = self.pair("silu_mul", "ssm_gated", gate, y, values)
        return self.product("ssm_out", y, "ssm_out", hidden, values)

    def _decay(self, heads: int) -> str:
        """Two numbers of each value head, as one vector: few devices bind more than eight buffers."""
        parts = [TensorSlice(f"{self.layer}.{name}", heads) for name in ("ssm_a", "ssm_dt.bias")]
        return self.b.view(f"{self.layer}.ssm_decay", 2 * heads, of=parts, format="f32")

    def _factors(self, x: str) -> list[str]:
        """What beta and alpha are made of, [tokens, value heads] each."""
        delta, hidden = _delta(self.config), self.config.hidden
        heads, each = delta.value_heads, delta.value_heads // delta.key_heads
        if not _joint(self.config):
            return [self.product(name, x, name, heads, hidden) for name in _FACTORS]
        return [
            self.product(name, x, "ssm_ba", heads, hidden, i * each, delta.key_heads, 2 * each)
            for i, name in enumerate(_FACTORS)
        ]
