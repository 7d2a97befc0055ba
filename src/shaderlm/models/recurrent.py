"""Layers whose state stands for all tokens before: their numbers, their tensors and their part of the graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..graph.graph import Builder, TensorSlice
from .config import Config, DeltaRule, Layer, Metadata, Mixer, Scan, StepSpec

_KV_HEADS = "attention.head_count_kv"
_MAX_KERNEL = 16
_FFN = "feed_forward_length"
# No keys of GGUF, whose readers know by the architecture in which order value heads lie, and that nothing limits the
# steps of a scan. Folders have their own, and say whether what a scan gives is normalised.
_GROUPED, _STEP_LIMITS = "config.grouped_value_heads", "config.time_step_limit"
_SCAN_NORMALISED = "config.mamba_rms_norm"
SCAN_KEYS = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)

# Layers that keep a state in place of keys and values, or beside them; layers that are a mixer or a network, and not
# both; layers that keep a state and have no network.
Layout = Literal["instead", "beside", "plain", "alone"]


def read_layers(mixer: Mixer, meta: Metadata, heads: int, layers: int, how: Layout) -> tuple[int, tuple[Layer, ...]]:
    """Heads of keys and values, and what each layer has; none where all attend and have a network."""
    if mixer == "attention":
        return meta.whole(_KV_HEADS, heads, maximum=4096), ()
    if how == "alone":
        return 0, (Layer(rope=None, mixers=(mixer,), network=False),) * layers
    if how == "beside":
        return meta.whole(_KV_HEADS, heads, maximum=4096), (Layer(mixers=("attention", mixer)),) * layers
    if mixer == "delta_rule":
        kv_heads, attends = meta.whole(_KV_HEADS, heads, maximum=4096), _every_so_many(meta, layers)
    else:
        kv_heads, attends = _heads_of_layers(meta, heads, layers)
    if how == "plain":
        return kv_heads, _plain_layers(mixer, meta, attends)
    return kv_heads, tuple(Layer() if each else Layer(rope=None, mixers=(mixer,)) for each in attends)


def _plain_layers(mixer: Mixer, meta: Metadata, attends: tuple[bool, ...]) -> tuple[Layer, ...]:
    """Of files that list how wide the network of each layer is: such layers have nothing else."""
    widths = _of_layers(meta, _FFN, len(attends))
    expected = f"{len(attends)} whole numbers, 0 where a layer has no network"
    if not isinstance(widths, list) or len(widths) != len(attends):
        raise meta.wrong(_FFN, expected, widths)
    if not all(type(width) is int and 0 <= width <= 1 << 24 for width in widths):
        raise meta.wrong(_FFN, expected, widths)
    if both := [i for i, width in enumerate(widths) if width and attends[i]]:
        raise meta.wrong(_FFN, f"0 where {_KV_HEADS} is not, as in layer {both[0]}", widths)
    return tuple(
        Layer(rope=None, mixers=(), ffn=width)
        if width
        else Layer(rope=None, mixers=("attention" if attends[i] else mixer,), network=False)
        for i, width in enumerate(widths)
    )


def read_mixer(mixer: Mixer, meta: Metadata, config: Config) -> Config:
    """The config with the sizes of layers that keep a state."""
    readers = {"short_conv": _read_short_conv, "delta_rule": _read_delta_rule, "mamba2": _read_scan}
    return readers[mixer](meta, config)


def mixer_matrices(config: Config, mixer: Mixer) -> dict[str, tuple[int, int]]:
    """Of a layer that keeps a state."""
    makers = {"short_conv": _conv_matrices, "delta_rule": _delta_matrices, "mamba2": _scan_matrices}
    return makers[mixer](config)


def _heads_of_layers(meta: Metadata, heads: int, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Key and value heads, and which layers attend, of files that have a number for each layer: 0 where none does."""
    listed = _of_layers(meta, _KV_HEADS, layers)
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


def _of_layers(meta: Metadata, key: str, layers: int) -> Any:
    """A list of a file without its last entries, which are of layers that predict further tokens, as block_count is."""
    listed = meta.get(key)
    return listed[:layers] if isinstance(listed, list) and len(listed) == meta.whole("block_count") else listed


def _read_short_conv(meta: Metadata, config: Config) -> Config:
    """LFM2: how many tokens its convolutions see."""
    return replace(config, conv_kernel=_kernel(meta, "shortconv.l_cache"))


def _kernel(meta: Metadata, key: str) -> int:
    """How many tokens a convolution sees: of one alone there is no state."""
    tokens = meta.whole(key, maximum=_MAX_KERNEL)
    if tokens < 2:
        raise meta.wrong(key, f"a whole number from 2 to {_MAX_KERNEL}", tokens)
    return tokens


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
    return replace(config, conv_kernel=_kernel(meta, "ssm.conv_kernel"), delta=delta)


def _read_scan(meta: Metadata, config: Config) -> Config:
    """Mamba-2: sizes of layers with a selective scan, and of the convolutions before it."""
    heads, values = meta.whole("ssm.time_step_rank", maximum=4096), meta.whole("ssm.inner_size")
    groups, state = meta.whole("ssm.group_count", maximum=4096), meta.whole("ssm.state_size", maximum=1024)
    if values % heads:
        raise meta.wrong("ssm.inner_size", f"a multiple of time_step_rank, {heads}", values)
    if heads % groups:
        raise meta.wrong("ssm.time_step_rank", f"a multiple of group_count, {groups}", heads)
    # Falcon-H1 may do without, by its files.
    normalised = config.architecture != "falcon-h1" or any(name.endswith(f".{_SCAN_NORM}") for name in config.shapes)
    if meta.get(_SCAN_NORMALISED, normalised) is not normalised:
        raise meta.wrong(_SCAN_NORMALISED, f"{normalised}, by the tensors of the layers", not normalised)
    limits = meta.get(_STEP_LIMITS, [0.0, 0.0])
    if not isinstance(limits, list) or len(limits) != 2 or not all(_is_limit(each) for each in limits):
        raise meta.wrong(_STEP_LIMITS, "two numbers of at least 0", limits)
    scan = Scan(heads, values // heads, state, groups, normalised, *map(float, limits))
    return replace(config, conv_kernel=_kernel(meta, "ssm.conv_kernel"), scan=scan)


def _is_limit(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e30


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


def _scan_matrices(config: Config) -> dict[str, tuple[int, int]]:
    """Of a layer with a selective scan."""
    scan, hidden = _scan(config), config.hidden
    return {"ssm_in": (scan.projected, hidden), "ssm_out": (hidden, scan.values)}


_FACTORS = ("ssm_beta", "ssm_alpha")
_SCAN_NORM = "ssm_norm.weight"


def _joint(config: Config) -> bool:
    """Do files have beta and alpha in one matrix, ssm_ba, those of a key head one after the other?"""
    return config.architecture == "qwen3next"


def _delta(config: Config) -> DeltaRule:
    assert config.delta is not None
    return config.delta


def _scan(config: Config) -> Scan:
    assert config.scan is not None
    return config.scan


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
    if mixer == "mamba2":
        scan = _scan(config)
        # Files have the norm as one vector, or in groups.
        in_groups = any(len(config.shapes.get(f"blk.{i}.{_SCAN_NORM}", ())) == 2 for i in range(config.layers))
        norm = (scan.groups, scan.values // scan.groups) if in_groups else (scan.values,)
        return {
            "ssm_conv1d.weight": (scan.channels, config.conv_kernel),
            "ssm_conv1d.bias": (scan.channels,),
            **dict.fromkeys(("ssm_a", "ssm_d", "ssm_dt.bias"), (scan.heads,)),
            **({_SCAN_NORM: norm} if scan.normalised else {}),
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
        inputs = {"x": x, "weight": self.b.view(f"{self.layer}.{out}.weight", rows, columns, of=parts, format=kind)}
        bias = f"{self.layer}.{stored}.bias"
        if bias in self.config.shapes:
            parts = [part._replace(name=bias) for part in parts]
            inputs["bias"] = self.b.view(f"{self.layer}.{out}.bias", rows, of=parts, format=self.config.formats[bias])
        dims = {"K": columns, "N": rows, "format": kind, "bias": "bias" in inputs}
        return self.add("linear", out, (rows,), dims, inputs)

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
        makers = {"short_conv": self._short_conv, "delta_rule": self._delta_rule, "mamba2": self._selective_scan}
        return makers[mixer](x)

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

    def _selective_scan(self, x: str) -> str:
        """Mamba-2: a convolution over values, B and C, the scan, a gate, and a norm after it."""
        config, hidden, tokens, kernel = self.config, self.config.hidden, self.step.tokens, self.config.conv_kernel
        scan = _scan(config)
        values, channels, heads = scan.values, scan.channels, scan.heads
        gate = self.product("ssm_gate", x, "ssm_in", values, hidden)
        mixed = self.product("ssm_values", x, "ssm_in", channels, hidden, values)
        deltas = self.product("ssm_deltas", x, "ssm_in", heads, hidden, values + channels)
        dims: dict[str, Any] = {"width": channels, "kernel": kernel, "silu": False}
        inputs = {"x": mixed, "weight": self.vector("ssm_conv1d.weight", channels, kernel)}
        mixed = self.recurrent("short_conv", "ssm_conv", channels, dims, inputs, (kernel, channels))
        parts = [TensorSlice(f"{self.layer}.{name}", heads) for name in ("ssm_a", "ssm_dt.bias", "ssm_d")]
        factors = self.b.view(f"{self.layer}.ssm_factors", 3 * heads, of=parts, format="f32")
        inputs = {"x": mixed, "bias": self.vector("ssm_conv1d.bias", channels), "deltas": deltas, "factors": factors}
        dims = {"H": heads, "P": scan.width, "N": scan.state, "G": scan.groups}
        dims |= {"dt_min": scan.least, "dt_max": scan.most}
        y = self.recurrent("mamba2_scan", "ssm", values, dims, inputs, (heads, scan.state, scan.width))
        y = self.pair("silu_mul", "ssm_gated", gate, y, values)
        if scan.normalised:
            dims = {"heads": scan.groups, "width": values // scan.groups, "eps": config.eps}
            y = self.add("rms_norm", "ssm_norm.plain", (values,), dims, {"x": y})
            dims = {"count": tokens * values, "period": values}
            y = self.add("mul", "ssm_norm", (values,), dims, {"a": y, "b": self.vector(_SCAN_NORM, values)})
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
