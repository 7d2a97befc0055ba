"""Dense decoders: norm, attention with grouped heads and rotary positions, norm, gated FFN, layer by layer.

What architectures of this kind share; the file of one says only where it differs. No architecture itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..graph.graph import Builder, Graph
from .architecture import EMBEDDING, OUTPUT, Config, Rope, Shapes, Step, expect, number, whole

OUTPUT_NORM, FACTORS = "output_norm.weight", "rope_freqs.weight"


@dataclass(frozen=True)
class Dense:
    """An architecture of this kind. `name` is GGUF's, and begins the keys of its metadata."""

    name: str
    interleaved: bool  # how rope pairs the values of a head
    head_norms: bool = False  # every head of q and k is normalised before it is rotated: attn_q_norm, attn_k_norm

    def read(self, metadata: Mapping[str, Any], shapes: Shapes, formats: Mapping[str, str]) -> Config:
        """The config of a checkpoint, every number and every tensor's shape checked."""
        config = self._config(metadata, shapes, formats)
        for name, shape in self._tensors(config).items():
            expect(shapes, name, shape)
        return config

    def tensors(self, metadata: Mapping[str, Any], shapes: Shapes) -> Shapes:
        """Every tensor that such a checkpoint has; `shapes` needs the embeddings, and what is optional."""
        return self._tensors(self._config(metadata, shapes, {}))

    def build(self, c: Config, step: Step) -> Graph:
        """ids [rows], positions [rows] → logits of the last row [1, vocabulary], of all rows, or caches only."""
        return _Build(self, c, step).graph()

    def _config(self, metadata: Mapping[str, Any], shapes: Shapes, formats: Mapping[str, str]) -> Config:
        own = self.name
        hidden = whole(metadata, f"{own}.embedding_length")
        heads = whole(metadata, f"{own}.attention.head_count", most=4096)
        kv_heads = whole(metadata, f"{own}.attention.head_count_kv", heads, most=4096)
        if heads % kv_heads:
            given = f"got {heads} and {kv_heads}"
            raise ModelError(f"{own}.attention.head_count must be a multiple of head_count_kv, {given}")
        width = whole(metadata, f"{own}.attention.key_length", hidden // heads)
        if whole(metadata, f"{own}.attention.value_length", width) != width:
            raise ModelError(f"{own}.attention.value_length differs from key_length; that is not supported")
        if metadata.get(f"{own}.expert_count"):
            raise ModelError(f"this model has {metadata[f'{own}.expert_count']} experts; mixtures are not supported")
        if EMBEDDING not in shapes or len(shapes[EMBEDDING]) != 2:
            raise ModelError(f"the checkpoint has no matrix {EMBEDDING!r}: it is incomplete, or no model for text")
        return Config(
            architecture=own,
            layers=whole(metadata, f"{own}.block_count", most=1024),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            ffn=whole(metadata, f"{own}.feed_forward_length"),
            vocabulary=shapes[EMBEDDING][0],
            context=whole(metadata, f"{own}.context_length"),
            eps=number(metadata, f"{own}.attention.layer_norm_rms_epsilon"),
            rope=self._rope(metadata, shapes, width),
            formats=formats,
            shapes=shapes,
        )

    def _rope(self, metadata: Mapping[str, Any], shapes: Shapes, width: int) -> Rope:
        own = f"{self.name}.rope"
        rotary = whole(metadata, f"{own}.dimension_count", width)
        if rotary % 2 or rotary > width:
            raise ModelError(f"{own}.dimension_count must be even and at most {width}, the file has {rotary}")
        kind = metadata.get(f"{own}.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise ModelError(f"{own}.scaling.type must be 'none' or 'linear', the file has {kind!r}")
        scale = number(metadata, f"{own}.scaling.factor", 1.0) if kind == "linear" else 1.0
        scale = number(metadata, f"{own}.scale_linear", scale)  # its name in older files
        if FACTORS in shapes:
            expect(shapes, FACTORS, (rotary // 2,))
        theta = number(metadata, f"{own}.freq_base", 10000.0)
        return Rope(rotary, theta, self.interleaved, scale, FACTORS if FACTORS in shapes else None)

    def _tensors(self, c: Config) -> dict[str, tuple[int, ...]]:
        """Every tensor that the graph reads, with its shape."""
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocabulary, c.hidden), OUTPUT_NORM: (c.hidden,)}
        if OUTPUT in c.shapes:  # else the embeddings serve as output matrix
            found[OUTPUT] = (c.vocabulary, c.hidden)
        norms = dict.fromkeys(("attn_norm", "ffn_norm"), (c.hidden,))
        if self.head_norms:
            norms |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (c.head_width,))
        for i in range(c.layers):
            found |= {f"blk.{i}.{norm}.weight": shape for norm, shape in norms.items()}
            for name, shape in _matrices(c).items():
                found[f"blk.{i}.{name}.weight"] = shape
                if f"blk.{i}.{name}.bias" in c.shapes:
                    found[f"blk.{i}.{name}.bias"] = shape[:1]
        return found


def _matrices(c: Config) -> dict[str, tuple[int, int]]:
    q, kv = c.heads * c.head_width, c.kv_heads * c.head_width
    return {
        "attn_q": (q, c.hidden),
        "attn_k": (kv, c.hidden),
        "attn_v": (kv, c.hidden),
        "attn_output": (c.hidden, q),
        "ffn_gate": (c.ffn, c.hidden),
        "ffn_up": (c.ffn, c.hidden),
        "ffn_down": (c.hidden, c.ffn),
    }


class _Build:
    """One graph in the making."""

    def __init__(self, kind: Dense, c: Config, step: Step) -> None:
        self.kind, self.c, self.step, self.b = kind, c, step, Builder()
        for name, shape in kind._tensors(c).items():
            self.b.tensor(name, *shape, role="weight", format=c.formats[name])
        self.b.tensor("ids", step.rows, role="input")
        self.b.tensor("positions", step.rows, role="input")
        self.b.tensor("rope_table", step.capacity, c.rope.rotary // 2, 2, role="input")

    def graph(self) -> Graph:
        c, rows = self.c, self.step.rows
        x = self.b.tensor("embedding", rows, c.hidden)
        dims = {"T": rows, "N": c.vocabulary, "K": c.hidden, "format": c.formats[EMBEDDING]}
        self.b.add("embedding", dims, {"ids": "ids", "weight": EMBEDDING}, "embedding", out=x)
        for i in range(c.layers):
            layer = f"blk.{i}"
            x = self._sum(layer, "attn_sum", x, self._attention(layer, self._norm(layer, "attn_norm", x)))
            x = self._sum(layer, "ffn_sum", x, self._ffn(layer, self._norm(layer, "ffn_norm", x)))
        if self.step.logits == "none":
            return self.b.graph()
        if rows > 1 and self.step.logits == "last":
            last = self.b.tensor("last_row", 1, c.hidden)
            dims = {"rows": 1, "width": rows * c.hidden, "first": (rows - 1) * c.hidden, "count": c.hidden}
            self.b.add("columns", dims, {"x": x}, "output", out=last)
            x, rows = last, 1
        x = self._norm("output", "output_norm", x, (rows, c.hidden), OUTPUT_NORM)
        weight = OUTPUT if OUTPUT in self.c.shapes else EMBEDDING
        logits = self.b.tensor("logits", rows, c.vocabulary)
        dims = {"M": rows, "K": c.hidden, "N": c.vocabulary, "format": c.formats[weight]}
        self.b.add("linear", dims, {"x": x, "weight": weight}, "output", out=logits)
        return self.b.graph(logits)

    def _norm(
        self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None, weight: str | None = None
    ) -> str:
        """Over the last axis of x [rows, hidden], or of another shape."""
        shape = shape or (self.step.rows, self.c.hidden)
        count, width = math.prod(shape), shape[-1]
        plain = self.b.tensor(f"{layer}.{name}.plain", *shape)
        self.b.add("rms_norm", {"rows": count // width, "width": width, "eps": self.c.eps}, {"x": x}, layer, out=plain)
        out = self.b.tensor(f"{layer}.{name}", *shape)
        inputs = {"a": plain, "b": weight or f"{layer}.{name}.weight"}
        self.b.add("mul", {"count": count, "period": width}, inputs, layer, out=out)
        return out

    def _linear(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None) -> str:
        """[rows, n], or the same values in another shape."""
        n, k = _matrices(self.c)[name]
        weight, bias = f"{layer}.{name}.weight", f"{layer}.{name}.bias"
        has_bias = bias in self.c.shapes
        out = self.b.tensor(f"{layer}.{name}", *(shape or (self.step.rows, n)))
        dims = {"M": self.step.rows, "K": k, "N": n, "format": self.c.formats[weight], "bias": has_bias}
        self.b.add("linear", dims, {"x": x, "weight": weight, "bias": bias if has_bias else None}, layer, out=out)
        return out

    def _rotated(self, layer: str, name: str, x: str, heads: int) -> str:
        c, rows = self.c, self.step.rows
        out = self.b.tensor(f"{layer}.{name}.rotated", rows, heads, c.head_width)
        dims = {"T": rows, "H": heads, "D": c.head_width, "rotary": c.rope.rotary}
        dims |= {"positions": self.step.capacity, "interleaved": c.rope.interleaved}
        inputs = {"x": x, "positions": "positions", "table": "rope_table"}
        self.b.add("rope", dims, inputs, layer, out=out)
        return out

    def _projected(self, layer: str, x: str) -> tuple[str, str, str]:
        """q [rows, heads, width], k and v [rows, kv heads, width]; q and k are normalised where heads are."""
        if not self.kind.head_norms:
            q, k, v = (self._linear(layer, name, x) for name in ("attn_q", "attn_k", "attn_v"))
            return q, k, v
        rows, width = self.step.rows, self.c.head_width
        queries, keys = (rows, self.c.heads, width), (rows, self.c.kv_heads, width)
        q, k = self._linear(layer, "attn_q", x, queries), self._linear(layer, "attn_k", x, keys)
        v = self._linear(layer, "attn_v", x)
        return self._norm(layer, "attn_q_norm", q, queries), self._norm(layer, "attn_k_norm", k, keys), v

    def _attention(self, layer: str, x: str) -> str:
        c, step = self.c, self.step
        q, k, v = self._projected(layer, x)
        q, k = self._rotated(layer, "attn_q", q, c.heads), self._rotated(layer, "attn_k", k, c.kv_heads)
        room = (step.capacity, c.kv_heads, c.head_width)
        caches = {
            key: self.b.tensor(f"{layer}.{key}", *room, role="state", format=step.cache)
            for key in ("k_cache", "v_cache")
        }
        dims: dict[str, int | str] = {
            "Hq": c.heads,
            "Hkv": c.kv_heads,
            "D": c.head_width,
            "S": step.rows,
            "C": step.capacity,
        }
        dims |= {"pos": step.capacity - step.rows, "cache": step.cache}
        where = {"positions": "positions"}
        self.b.add("kv_write", dims, {"k": k, "v": v, **where, **caches}, layer, **caches)
        out = self.b.tensor(f"{layer}.attended", step.rows, c.heads * c.head_width)
        self.b.add("attention", dims, {"q": q, **caches, **where}, layer, out=out)
        return self._linear(layer, "attn_output", out)

    def _ffn(self, layer: str, x: str) -> str:
        gate, up = self._linear(layer, "ffn_gate", x), self._linear(layer, "ffn_up", x)
        out = self.b.tensor(f"{layer}.gated", self.step.rows, self.c.ffn)
        self.b.add("silu_mul", {"count": self.step.rows * self.c.ffn}, {"a": gate, "b": up}, layer, out=out)
        return self._linear(layer, "ffn_down", out)

    def _sum(self, layer: str, name: str, x: str, y: str) -> str:
        out = self.b.tensor(f"{layer}.{name}", self.step.rows, self.c.hidden)
        self.b.add("add", {"count": self.step.rows * self.c.hidden}, {"a": x, "b": y}, layer, out=out)
        return out
