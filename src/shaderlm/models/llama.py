"""Llama 1 to 3.x, Mistral, SmolLM2: norm, attention with grouped heads and rotary positions, norm, gated FFN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from ..graph.graph import Builder, Graph
from .architecture import Config, Rope, Step, expect, number, whole

EMBEDDING, OUTPUT, OUTPUT_NORM, FACTORS = (
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
)


def read(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]) -> Config:
    """The config of a checkpoint, every number and every tensor's shape checked."""
    hidden = whole(metadata, "llama.embedding_length")
    heads = whole(metadata, "llama.attention.head_count", most=4096)
    kv_heads = whole(metadata, "llama.attention.head_count_kv", heads, most=4096)
    if heads % kv_heads:
        raise ModelError(f"llama.attention.head_count must be a multiple of head_count_kv, got {heads} and {kv_heads}")
    width = whole(metadata, "llama.attention.key_length", hidden // heads)
    if whole(metadata, "llama.attention.value_length", width) != width:
        raise ModelError("llama.attention.value_length differs from key_length; that is not supported")
    if metadata.get("llama.expert_count"):
        raise ModelError(f"this model has {metadata['llama.expert_count']} experts; mixtures are not supported")
    if EMBEDDING not in shapes or len(shapes[EMBEDDING]) != 2:
        raise ModelError(f"the checkpoint has no matrix {EMBEDDING!r}: it is incomplete, or no model for text")
    config = Config(
        architecture="llama",
        layers=whole(metadata, "llama.block_count", most=1024),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=width,
        ffn=whole(metadata, "llama.feed_forward_length"),
        vocabulary=shapes[EMBEDDING][0],
        context=whole(metadata, "llama.context_length"),
        eps=number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        rope=_rope(metadata, shapes, width),
        formats=formats,
        shapes=shapes,
    )
    for name, shape in tensors(config).items():
        expect(shapes, name, shape)
    return config


def _rope(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], width: int) -> Rope:
    rotary = whole(metadata, "llama.rope.dimension_count", width)
    if rotary % 2 or rotary > width:
        raise ModelError(f"llama.rope.dimension_count must be even and at most {width}, the file has {rotary}")
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"llama.rope.scaling.type must be 'none' or 'linear', the file has {kind!r}")
    scale = number(metadata, "llama.rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    scale = number(metadata, "llama.rope.scale_linear", scale)  # its name in older files
    if FACTORS in shapes:
        expect(shapes, FACTORS, (rotary // 2,))
    theta = number(metadata, "llama.rope.freq_base", 10000.0)
    return Rope(rotary, theta, interleaved=True, linear_scale=scale, factors=FACTORS if FACTORS in shapes else None)


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


def tensors(c: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that the graph reads, with its shape."""
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocabulary, c.hidden), OUTPUT_NORM: (c.hidden,)}
    if OUTPUT in c.shapes:  # else the embeddings serve as output matrix
        found[OUTPUT] = (c.vocabulary, c.hidden)
    for i in range(c.layers):
        found |= {f"blk.{i}.{norm}.weight": (c.hidden,) for norm in ("attn_norm", "ffn_norm")}
        for name, shape in _matrices(c).items():
            found[f"blk.{i}.{name}.weight"] = shape
            if f"blk.{i}.{name}.bias" in c.shapes:
                found[f"blk.{i}.{name}.bias"] = shape[:1]
    return found


def build(c: Config, step: Step) -> Graph:
    """ids [rows], positions [rows] → logits of the last row [1, vocabulary], of all rows, or only the caches filled."""
    return _Llama(c, step).graph()


class _Llama:
    def __init__(self, c: Config, step: Step) -> None:
        self.c, self.step, self.b = c, step, Builder()
        for name, shape in tensors(c).items():
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
        x = self._norm("output", "output_norm", x, rows, OUTPUT_NORM)
        weight = OUTPUT if OUTPUT in self.c.shapes else EMBEDDING
        logits = self.b.tensor("logits", rows, c.vocabulary)
        dims = {"M": rows, "K": c.hidden, "N": c.vocabulary, "format": c.formats[weight]}
        self.b.add("linear", dims, {"x": x, "weight": weight}, "output", out=logits)
        return self.b.graph(logits)

    def _norm(self, layer: str, name: str, x: str, rows: int | None = None, weight: str | None = None) -> str:
        rows, width = rows or self.step.rows, self.c.hidden
        plain = self.b.tensor(f"{layer}.{name}.plain", rows, width)
        self.b.add("rms_norm", {"rows": rows, "width": width, "eps": self.c.eps}, {"x": x}, layer, out=plain)
        out = self.b.tensor(f"{layer}.{name}", rows, width)
        inputs = {"a": plain, "b": weight or f"{layer}.{name}.weight"}
        self.b.add("mul", {"count": rows * width, "period": width}, inputs, layer, out=out)
        return out

    def _linear(self, layer: str, name: str, x: str) -> str:
        n, k = _matrices(self.c)[name]
        weight, bias = f"{layer}.{name}.weight", f"{layer}.{name}.bias"
        has_bias = bias in self.c.shapes
        out = self.b.tensor(f"{layer}.{name}", self.step.rows, n)
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

    def _attention(self, layer: str, x: str) -> str:
        c, step = self.c, self.step
        q, k, v = (self._linear(layer, name, x) for name in ("attn_q", "attn_k", "attn_v"))
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
