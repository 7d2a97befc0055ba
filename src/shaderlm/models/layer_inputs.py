"""Embeddings that each layer has of its own: tensors and their part of the graph.

A second table has a vector of a token for each layer. To it comes a product of the token's embedding; every layer ends
by multiplying with its part, gated by what it has computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..graph.graph import Builder
from .config import Config

_TABLE, _PRODUCT, _NORM = "per_layer_token_embd.weight", "per_layer_model_proj.weight", "per_layer_proj_norm.weight"


def layer_input_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of them; none where a model has no such embeddings."""
    width, hidden = config.layer_input, config.hidden
    if not width:
        return {}
    tensors: dict[str, tuple[int, ...]] = {
        _TABLE: (config.vocabulary, config.layers * width),
        _PRODUCT: (config.layers * width, hidden),
        _NORM: (width,),
    }
    for i in range(config.layers):
        tensors[f"blk.{i}.inp_gate.weight"] = (width, hidden)
        tensors[f"blk.{i}.proj.weight"] = (hidden, width)
        tensors[f"blk.{i}.post_norm.weight"] = (hidden,)
    return tensors


@dataclass(frozen=True)
class LayerInputs:
    """Adds their nodes to a graph. `batch`: some of the tokens may be padding."""

    b: Builder
    config: Config
    tokens: int
    batch: Mapping[str, str]

    def all_layers(self, x: str) -> str:
        """x [tokens, hidden], the scaled embeddings → [tokens, layers · width]."""
        config, width = self.config, self.config.layer_input
        columns = config.layers * width
        named = self.b.tensor("inputs.embedding", self.tokens, columns)
        kind = config.formats[_TABLE]
        table = self.b.tensor(_TABLE, config.vocabulary, columns, role="weight", format=kind)
        dims = {"tokens": self.tokens, "N": config.vocabulary, "K": columns, "format": kind}
        self.b.add("embedding", dims, {"batch": "batch", "tokens": "tokens", "weight": table}, "inputs", out=named)
        each = {"count": self.tokens * columns}
        named = self._add("scale", "inputs.scaled", (columns,), {**each, "factor": math.sqrt(width)}, {"x": named})
        y = self._linear("inputs", "inputs.product", x, _PRODUCT, columns, config.hidden)
        # The product is to be divided by √hidden before the norm, which only its eps notices.
        eps = config.eps * config.hidden
        y = self._norm("inputs", "inputs.normed", y, _NORM, (config.layers, width), eps)
        y = self._add("add", "inputs.sum", (columns,), each, {"a": y, "b": named})
        return self._add("scale", "inputs", (columns,), {**each, "factor": math.sqrt(0.5)}, {"x": y})

    def add_to(self, i: int, x: str, inputs: str, out: str) -> str:
        """What a layer has computed, with its part of all inputs."""
        layer, width, hidden = f"blk.{i}", self.config.layer_input, self.config.hidden
        gate = self._linear(layer, f"{layer}.inp_gate", x, f"{layer}.inp_gate.weight", width, hidden)
        columns = {"width": self.config.layers * width, "first": i * width, "count": width}
        part = self._add("slice", f"{layer}.input", (width,), columns, {"x": inputs})
        sizes = {"count": self.tokens * width}
        y = self._add("gelu_mul", f"{layer}.input_gated", (width,), sizes, {"a": gate, "b": part})
        y = self._linear(layer, f"{layer}.proj", y, f"{layer}.proj.weight", hidden, width)
        y = self._norm(layer, f"{layer}.post_norm", y, f"{layer}.post_norm.weight", (hidden,), self.config.eps)
        return self._add("add", out, (hidden,), {"count": self.tokens * hidden}, {"a": x, "b": y}, layer)

    def _add(
        self,
        op: str,
        out: str,
        shape: tuple[int, ...],
        dims: Mapping[str, Any],
        inputs: Mapping[str, str],
        layer: str = "",
    ) -> str:
        self.b.tensor(out, self.tokens, *shape)
        sizes = {"tokens": self.tokens, **dims, "batched": bool(self.batch)}
        self.b.add(op, sizes, {**inputs, **self.batch}, layer or out.rpartition(".")[0] or out, out=out)
        return out

    def _linear(self, layer: str, out: str, x: str, stored: str, rows: int, columns: int) -> str:
        kind = self.config.formats[stored]
        weight = self.b.tensor(stored, rows, columns, role="weight", format=kind)
        dims = {"K": columns, "N": rows, "format": kind}
        return self._add("linear", out, (rows,), dims, {"x": x, "weight": weight}, layer)

    def _norm(self, layer: str, out: str, x: str, stored: str, shape: tuple[int, ...], eps: float) -> str:
        weight = self.b.tensor(stored, shape[-1], role="weight", format=self.config.formats[stored])
        dims = {"heads": math.prod(shape[:-1]), "width": shape[-1], "eps": eps}
        plain = self._add("rms_norm", f"{out}.plain", shape, dims, {"x": x}, layer)
        dims = {"count": self.tokens * math.prod(shape), "period": shape[-1]}
        return self._add("mul", out, shape, dims, {"a": plain, "b": weight}, layer)
