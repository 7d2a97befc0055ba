"""Dense decoders: norm, attention with grouped heads and rotary positions, norm, gated FFN, layer by layer.

What architectures of this kind share; the file of one says only where it differs. No architecture itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..graph.batch import RUN_ROWS
from ..graph.graph import Builder, Graph
from .architecture import EMBEDDING, OUTPUT, Config, Metadata, Rope, Shapes, Step, expect
from .metadata_keys import check_keys, check_tensors

OUTPUT_NORM, FACTORS = "output_norm.weight", "rope_freqs.weight"


@dataclass(frozen=True)
class Dense:
    """An architecture of this kind. `name` is GGUF's, and begins the keys of its metadata."""

    name: str
    interleaved: bool  # how rope pairs the values of a head
    head_norms: bool = False  # every head of q and k is normalised before it is rotated: attn_q_norm, attn_k_norm

    def read(self, metadata: Mapping[str, Any], shapes: Shapes, formats: Mapping[str, str]) -> Config:
        """The config of a checkpoint. Every number, every key and every tensor is checked."""
        own = Metadata(metadata, self.name)
        config = self._config(own, shapes, formats)
        check_keys(own, config)
        tensors = self._tensors(config)
        check_tensors(self.name, shapes, {*tensors, *([config.rope.factors] if config.rope.factors else [])})
        for name, shape in tensors.items():
            expect(shapes, name, shape)
        return config

    def tensors(self, metadata: Mapping[str, Any], shapes: Shapes) -> Shapes:
        """Every tensor that such a checkpoint has; `shapes` needs the embeddings, and what is optional."""
        return self._tensors(self._config(Metadata(metadata, self.name), shapes, {}))

    def build(self, c: Config, step: Step) -> Graph:
        """A batch of tokens → hidden [tokens, hidden]; keys and values go to the cache."""
        return _Build(self, c, step).graph()

    def head(self, c: Config, rows: int, tokens: int, /, *, logits: bool = True) -> Graph:
        """hidden [tokens, hidden] → logits [rows, vocabulary] of the rows in `outputs` (one token: its row).

        Without `logits`: the states [rows, hidden] after the output norm.
        """
        return _head(c, rows, tokens, logits)

    def _config(self, own: Metadata, shapes: Shapes, formats: Mapping[str, str]) -> Config:
        hidden = own.whole("embedding_length")
        heads = own.whole("attention.head_count", maximum=4096)
        kv_heads = own.whole("attention.head_count_kv", heads, maximum=4096)
        if heads % kv_heads:
            given = f"got {heads} and {kv_heads}"
            raise ModelError(f"{own.full('attention.head_count')} must be a multiple of head_count_kv, {given}")
        width = own.whole("attention.key_length", hidden // heads)
        if own.whole("attention.value_length", width) != width:
            raise ModelError(f"{own.full('attention.value_length')} differs from key_length; that is not supported")
        if EMBEDDING not in shapes or len(shapes[EMBEDDING]) != 2:
            raise ModelError(f"the checkpoint has no matrix {EMBEDDING!r}: it is incomplete, or not a language model")
        return Config(
            architecture=self.name,
            layers=own.whole("block_count", maximum=1024),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            ffn=own.whole("feed_forward_length"),
            vocabulary=shapes[EMBEDDING][0],
            context=own.whole("context_length"),
            eps=own.number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(own, shapes, width),
            formats=formats,
            shapes=shapes,
        )

    def _rope(self, own: Metadata, shapes: Shapes, width: int) -> Rope:
        rotary = own.whole("rope.dimension_count", width)
        if rotary % 2 or rotary > width:
            raise own.wrong("rope.dimension_count", f"even and at most {width}", rotary)
        if FACTORS in shapes:
            expect(shapes, FACTORS, (rotary // 2,))
        theta = own.number("rope.freq_base", 10000.0)
        return Rope(rotary, theta, self.interleaved, _linear_scale(own), FACTORS if FACTORS in shapes else None)

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


def _linear_scale(own: Metadata) -> float:
    """What positions are divided by. As llama.cpp has it, a factor without a type is linear, and 0 means 1."""
    newer, older = (own.get(key) for key in ("rope.scaling.factor", "rope.scale_linear"))
    key, given = ("rope.scale_linear", older) if newer is None else ("rope.scaling.factor", newer)
    factor = own.number(key) if given else 1.0
    kind = own.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        both = " ".join(f"--ignore-key {own.full(name)}" for name in ("rope.scaling.type", "rope.scaling.factor"))
        raise ModelError(
            f"{own.full('rope.scaling.type')} is {kind!r}: positions are rotated in another way, which is not "
            f"supported; 'none' and 'linear' are. {both} reads the file as if its positions were not scaled"
        )
    return factor if kind == "linear" else 1.0


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


def _norm(
    b: Builder, c: Config, layer: str, out: str, x: str, weight: str, shape: tuple[int, ...], batch: Mapping[str, str]
) -> str:
    """weight · x / sqrt(mean(x²) + eps) over the last axis of x [tokens, width] or [tokens, heads, width]."""
    heads = shape[1] if len(shape) == 3 else 1
    plain = b.tensor(f"{out}.plain", *shape)
    dims = {"tokens": shape[0], "heads": heads, "width": shape[-1], "eps": c.eps, "batched": bool(batch)}
    b.add("rms_norm", dims, {"x": x, **batch}, layer, out=plain)
    made = b.tensor(out, *shape)
    dims = {"tokens": shape[0], "count": math.prod(shape), "period": shape[-1], "batched": bool(batch)}
    b.add("mul", dims, {"a": plain, "b": weight, **batch}, layer, out=made)
    return made


def _head(c: Config, rows: int, tokens: int, wants_logits: bool) -> Graph:
    b = Builder()
    b.tensor(OUTPUT_NORM, c.hidden, role="weight", format=c.formats[OUTPUT_NORM])
    x = b.tensor("hidden", tokens, c.hidden, role="input")
    if tokens > 1:
        b.tensor("batch", 1 + tokens, 4, role="input", format="u32")
        b.tensor("outputs", rows, 8, role="input", format="u32")
        taken = b.tensor("output.rows", rows, c.hidden)
        dims = {"tokens": tokens, "rows": rows, "width": c.hidden}
        b.add("take_rows", dims, {"x": x, "outputs": "outputs", "batch": "batch"}, "output", out=taken)
        x = taken
    out = "output.output_norm" if wants_logits else "states"
    x = _norm(b, c, "output", out, x, OUTPUT_NORM, (rows, c.hidden), {})
    if not wants_logits:
        return b.graph(x)
    weight = OUTPUT if OUTPUT in c.shapes else EMBEDDING
    b.tensor(weight, c.vocabulary, c.hidden, role="weight", format=c.formats[weight])
    logits = b.tensor("logits", rows, c.vocabulary)
    product = {"tokens": rows, "K": c.hidden, "N": c.vocabulary, "format": c.formats[weight]}
    b.add("linear", product, {"x": x, "weight": weight}, "output", out=logits)
    return b.graph(logits)


class _Build:
    """The graph of the layers, in the making."""

    def __init__(self, kind: Dense, c: Config, step: Step) -> None:
        self.kind, self.c, self.step, self.b = kind, c, step, Builder()
        for name, shape in kind._tensors(c).items():
            self.b.tensor(name, *shape, role="weight", format=c.formats[name])
        self.b.tensor("batch", 1 + step.tokens, 4, role="input", format="u32")
        self.b.tensor("tokens", 1, role="input", format="u32")
        self.b.tensor("page_table", 1, role="input", format="u32")
        self.b.tensor("rope_table", 1, c.rope.rotary // 2, 2, role="table")
        # One row is always there; of more, some may be padding.
        self.batch = {"batch": "batch"} if step.tokens > 1 else {}

    def graph(self) -> Graph:
        c, tokens = self.c, self.step.tokens
        x = self.b.tensor("embedding", tokens, c.hidden)
        dims = {"tokens": tokens, "N": c.vocabulary, "K": c.hidden, "format": c.formats[EMBEDDING]}
        inputs = {"batch": "batch", "tokens": "tokens", "weight": EMBEDDING}
        self.b.add("embedding", dims, inputs, "embedding", out=x)
        for i in range(c.layers):
            layer = f"blk.{i}"
            x = self._sum(layer, f"{layer}.attn_sum", x, self._attention(layer, self._norm(layer, "attn_norm", x)))
            out = "hidden" if i == c.layers - 1 else f"{layer}.ffn_sum"
            x = self._sum(layer, out, x, self._ffn(layer, self._norm(layer, "ffn_norm", x)))
        return self.b.graph(x)

    def _norm(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None) -> str:
        """Over the last axis of x [tokens, hidden], or of another shape."""
        shape = shape or (self.step.tokens, self.c.hidden)
        return _norm(self.b, self.c, layer, f"{layer}.{name}", x, f"{layer}.{name}.weight", shape, self.batch)

    def _linear(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None) -> str:
        """[tokens, n], or the same values in another shape."""
        n, k = _matrices(self.c)[name]
        weight, bias = f"{layer}.{name}.weight", f"{layer}.{name}.bias"
        has_bias = bias in self.c.shapes
        out = self.b.tensor(f"{layer}.{name}", *(shape or (self.step.tokens, n)))
        dims = {"tokens": self.step.tokens, "K": k, "N": n, "format": self.c.formats[weight], "bias": has_bias}
        inputs = {"x": x, "weight": weight, "bias": bias if has_bias else None, **self.batch}
        self.b.add("linear", {**dims, "batched": bool(self.batch)}, inputs, layer, out=out)
        return out

    def _rotated(self, layer: str, name: str, x: str, heads: int) -> str:
        c, tokens = self.c, self.step.tokens
        out = self.b.tensor(f"{layer}.{name}.rotated", tokens, heads, c.head_width)
        dims = {"tokens": tokens, "H": heads, "D": c.head_width, "rotary": c.rope.rotary}
        inputs = {"x": x, "batch": "batch", "table": "rope_table"}
        self.b.add("rope", {**dims, "interleaved": c.rope.interleaved}, inputs, layer, out=out)
        return out

    def _projected(self, layer: str, x: str) -> tuple[str, str, str]:
        """q [tokens, heads, width], k and v [tokens, kv heads, width]; q and k are normalised where heads are."""
        if not self.kind.head_norms:
            q, k, v = (self._linear(layer, name, x) for name in ("attn_q", "attn_k", "attn_v"))
            return q, k, v
        tokens, width = self.step.tokens, self.c.head_width
        queries, keys = (tokens, self.c.heads, width), (tokens, self.c.kv_heads, width)
        q, k = self._linear(layer, "attn_q", x, queries), self._linear(layer, "attn_k", x, keys)
        v = self._linear(layer, "attn_v", x)
        return self._norm(layer, "attn_q_norm", q, queries), self._norm(layer, "attn_k_norm", k, keys), v

    def _attention(self, layer: str, x: str) -> str:
        c, step = self.c, self.step
        q, k, v = self._projected(layer, x)
        q, k = self._rotated(layer, "attn_q", q, c.heads), self._rotated(layer, "attn_k", k, c.kv_heads)
        caches = {
            key: self.b.tensor(f"{layer}.{key}", 1, c.kv_heads, c.head_width, role="state", format=step.cache)
            for key in ("k_cache", "v_cache")
        }
        kept = {"tokens": step.tokens, "Hkv": c.kv_heads, "D": c.head_width, "cache": step.cache}
        self.b.add("kv_write", kept, {"k": k, "v": v, "batch": "batch", **caches}, layer, **caches)
        out = self.b.tensor(f"{layer}.attended", step.tokens, c.heads * c.head_width)
        dims = {**kept, "Hq": c.heads, "context": step.context, "paged": step.paged}
        dims["runs"] = step.tokens >= RUN_ROWS and not step.decode
        pages = {"page_table": "page_table"} if step.paged else {}
        self.b.add("attention", dims, {"q": q, **caches, "batch": "batch", **pages}, layer, out=out)
        return self._linear(layer, "attn_output", out)

    def _ffn(self, layer: str, x: str) -> str:
        gate, up = self._linear(layer, "ffn_gate", x), self._linear(layer, "ffn_up", x)
        out = self.b.tensor(f"{layer}.gated", self.step.tokens, self.c.ffn)
        self._pointwise("silu_mul", layer, gate, up, out, self.c.ffn)
        return self._linear(layer, "ffn_down", out)

    def _sum(self, layer: str, name: str, x: str, y: str) -> str:
        out = self.b.tensor(name, self.step.tokens, self.c.hidden)
        self._pointwise("add", layer, x, y, out, self.c.hidden)
        return out

    def _pointwise(self, op: str, layer: str, a: str, b: str, out: str, width: int) -> None:
        tokens = self.step.tokens
        dims = {"tokens": tokens, "count": tokens * width, "batched": bool(self.batch)}
        self.b.add(op, dims, {"a": a, "b": b, **self.batch}, layer, out=out)
