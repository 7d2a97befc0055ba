"""Layers whose state stands for all tokens before: their numbers, their tensors and their part of the graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..graph.graph import Builder, TensorSlice
from .config import Config, Layer, Metadata, Mixer, StepSpec

_KV_HEADS = "attention.head_count_kv"
_MAX_KERNEL = 16


def attention_heads(meta: Metadata, heads: int, layers: int) -> tuple[int, tuple[bool, ...]]:
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


def read_layers(mixer: Mixer, meta: Metadata, config: Config, attends: tuple[bool, ...]) -> Config:
    """The config with the layers that do not attend."""
    layers = config.per_layer or (Layer(),) * config.layers
    mixed = tuple(
        layer if attends[i] else replace(layer, mixer=mixer, window=0, rope=None) for i, layer in enumerate(layers)
    )
    return replace(config, per_layer=mixed)


def read_short_conv(meta: Metadata, config: Config) -> Config:
    """LFM2: how many tokens its convolutions see."""
    return replace(config, conv_kernel=meta.whole("shortconv.l_cache", maximum=_MAX_KERNEL))


def conv_matrices(config: Config) -> dict[str, tuple[int, int]]:
    """Of a layer with a short convolution."""
    hidden = config.hidden
    return {"shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}


def vectors(config: Config, mixer: Mixer) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer beside matrices and norms."""
    if mixer == "short_conv":
        return {"shortconv.conv.weight": (config.hidden, config.conv_kernel)}
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

    def product(self, out: str, x: str, stored: str, rows: int, columns: int, first: int = 0) -> str:
        """x times some rows of a matrix of the checkpoint."""
        full = f"{self.layer}.{stored}.weight"
        kind = self.config.formats[full]
        weight = self.b.view(
            f"{self.layer}.{out}.weight", rows, columns, of=TensorSlice(full, rows, first), format=kind
        )
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

    def short_conv(self, x: str) -> str:
        """LFM2: what a convolution over the last tokens gives is gated before and after."""
        hidden, kernel = self.config.hidden, self.config.conv_kernel
        before, after, values = (
            self.product(f"shortconv.{name}", x, "shortconv.in_proj", hidden, hidden, i * hidden)
            for i, name in enumerate(("before", "after", "values"))
        )
        gated = self.pair("mul", "shortconv.gated", before, values, hidden)
        dims = {"width": hidden, "kernel": kernel, "silu": False}
        inputs = {"x": gated, "weight": self.vector("shortconv.conv.weight", hidden, kernel)}
        y = self.recurrent("short_conv", "shortconv.conv", hidden, dims, inputs, (kernel - 1, hidden))
        y = self.pair("mul", "shortconv.mixed", after, y, hidden)
        return self.product("shortconv.out_proj", y, "shortconv.out_proj", hidden, hidden)
