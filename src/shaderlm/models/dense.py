"""Dense decoders: norm, attention with grouped heads, norm, feed-forward network, layer by layer.

What architectures of this kind share; the file of one says only where it differs. No architecture itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ModelError
from ..graph.batch import RUN_ROWS
from ..graph.graph import Builder, Graph, TensorSlice
from .architecture import EMBEDDING, OUTPUT, Config, Experts, FfnInput, Metadata, Rope, Shapes, StepSpec, expect
from .experts import Mixture, add_experts, expert_matrices, expert_tensors, read_experts, with_dense_layers
from .metadata_keys import check_keys, check_tensors
from .rope import read_rope

Batch = Mapping[str, str]  # the batch by its name, or nothing

OUTPUT_NORM, OUTPUT_BIAS, POSITIONS = "output_norm", "output.bias", "position_embd.weight"
# Matrices of the checkpoint that hold the rows of several, one after the other.
QKV: Mapping[str, tuple[str, ...]] = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
GATE_UP: Mapping[str, tuple[str, ...]] = {"ffn_up": ("ffn_gate", "ffn_up")}


# Norms of layer-norm models, which mostly have biases.
NORMS = ("attn_norm", "ffn_norm", OUTPUT_NORM)


@dataclass(frozen=True)
class Dense:
    """An architecture of this kind. `name` is GGUF's, and begins the keys of its metadata."""

    name: str
    interleaved: bool = False  # how rope pairs the values of a head
    head_norms: bool = False  # every head of q and k is normalised before it is rotated: attn_q_norm, attn_k_norm
    rope_first: bool = False  # it is rotated before it is normalised
    row_norms: bool = False  # so are all heads of q, and of k, as one vector
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norms_before: bool = True  # attention and feed-forward network read what attn_norm and ffn_norm give
    ffn_norm: str = "ffn_norm"  # what files call the norm before the feed-forward network
    ffn_input: FfnInput = "sum"  # unless the file says otherwise
    norms_after: bool = False  # what they give is normalised before it is added: post_attention_norm, post_ffw_norm
    activation: Literal["silu_mul", "gelu_mul", "gelu", "gelu_erf", "relu_squared"] = "silu_mul"  # _mul: with a gate
    output_bias: bool = False  # the logits have one: output.bias
    positions: Literal["rope", "long_rope", "learned"] = "rope"
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sinks: bool = False  # every head has a score without a key: attn_sinks
    biases: tuple[str, ...] = ()  # matrices and norms that always have one, by the names in a checkpoint
    mixture: Mixture | None = None  # how the experts of a feed-forward network are chosen, where there are some
    # Reads further keys: layers that differ, factors.
    complete: Callable[[Metadata, Config], Config] = lambda own, config: config

    def read(self, metadata: Mapping[str, Any], shapes: Shapes, formats: Mapping[str, str]) -> Config:
        """The config of a checkpoint. Every number, every key and every tensor is checked."""
        own = Metadata(metadata, self.name)
        config = self._config(own, shapes, formats)
        check_keys(own, config)
        tensors = self._tensors(config)
        factors = {name for rope in config.ropes.values() for name in (rope.factors, rope.long_factors) if name}
        check_tensors(self.name, shapes, {*tensors, *factors})
        for name, shape in tensors.items():
            expect(shapes, name, shape)
        return config

    def tensors(self, metadata: Mapping[str, Any], shapes: Shapes) -> Shapes:
        """Every tensor that such a checkpoint has; `shapes` needs the embeddings, and what is optional."""
        return self._tensors(self._config(Metadata(metadata, self.name), shapes, {}))

    def build(self, c: Config, step: StepSpec) -> Graph:
        """A batch of tokens → hidden [tokens, hidden]; keys and values go to the cache."""
        return _Build(self, c, step).graph()

    def head(self, c: Config, rows: int, tokens: int, /, *, logits: bool = True) -> Graph:
        """hidden [tokens, hidden] → logits [rows, vocabulary] of the rows in `outputs` (one token: its row).

        Without `logits`: the states [rows, hidden] after the output norm.
        """
        return _head(self, c, rows, tokens, logits)

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
        layered = self.norm == "layer_norm"
        key = f"attention.layer_norm_{'' if layered else 'rms_'}epsilon"
        eps = own.number(key)
        if eps > 1:
            raise own.wrong(key, "a small number above 0", eps)
        if layered:
            own.get("attention.layer_norm_rms_epsilon")  # converters write both; there is no RMS norm
        config = Config(
            architecture=self.name,
            layers=own.whole("block_count", maximum=1024),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            ffn=own.whole("feed_forward_length"),
            vocabulary=shapes[EMBEDDING][0],
            context=own.whole("context_length"),
            eps=eps,
            rope=self._rope(own, shapes, width),
            formats=formats,
            shapes=shapes,
            experts=read_experts(self.mixture, own) if self.mixture else None,
            ffn_input=self.ffn_input,
        )
        config = self.complete(own, config)
        return with_dense_layers(own, config) if config.experts else config

    def _rope(self, own: Metadata, shapes: Shapes, width: int) -> Rope:
        if self.positions == "learned":
            return Rope(0, 1.0, False)
        return read_rope(own, shapes, width, interleaved=self.interleaved, long=self.positions == "long_rope")

    def _tensors(self, c: Config) -> dict[str, tuple[int, ...]]:
        """Every tensor that the graph reads, with its shape."""
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocabulary, c.hidden)}
        if self.positions == "learned":
            found[POSITIONS] = (c.context, c.hidden)
        if OUTPUT in c.shapes:  # else the embeddings serve as output matrix
            found[OUTPUT] = (c.vocabulary, c.hidden)
        if self.output_bias:
            found[OUTPUT_BIAS] = (c.vocabulary,)
        vectors, biased = {OUTPUT_NORM: c.hidden}, self._biased(c)
        for i in range(c.layers):
            vectors |= {f"blk.{i}.{name}": width for name, width in self._norms(c).items()}
            experts = c.experts_of(i)
            for name, shape in self._stored(c, experts).items():
                found[f"blk.{i}.{name}.weight"] = shape
                if name in biased:
                    found[f"blk.{i}.{name}.bias"] = shape[:1]
            if experts:
                found |= expert_tensors(c, experts, f"blk.{i}", biased)
            if self.sinks:
                found[f"blk.{i}.attn_sinks.weight"] = (c.heads,)
        for name, width in vectors.items():
            found[f"{name}.weight"] = (width,)
            if self.norm == "layer_norm" and name.rpartition(".")[2] in biased:
                found[f"{name}.bias"] = (width,)
        return found

    def _biased(self, c: Config) -> set[str]:
        """Matrices and norms that have a bias: what one layer has, no other may lack."""
        return {name.split(".")[-2] for name in c.shapes if name.endswith(".bias")}.union(self.biases)

    def _norms(self, c: Config) -> dict[str, int]:
        """The norms of a layer, with their widths."""
        before = ("attn_norm",) if c.ffn_input == "attn_norm" else ("attn_norm", self.ffn_norm)
        found = dict.fromkeys(before if self.norms_before else (), c.hidden)
        if self.head_norms:
            found |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), c.head_width)
        if self.row_norms:
            found |= {"attn_q_norm": c.heads * c.head_width, "attn_k_norm": c.kv_heads * c.head_width}
        if self.norms_after:
            found |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), c.hidden)
        return found

    def _network(self, c: Config, experts: Experts | None) -> dict[str, tuple[int, int]]:
        """The matrices of a feed-forward network, those of single experts left out."""
        if experts:
            return expert_matrices(c, experts)
        gate = {"ffn_gate": (c.ffn, c.hidden)} if self.activation.endswith("_mul") else {}
        return {**gate, "ffn_up": (c.ffn, c.hidden), "ffn_down": (c.hidden, c.ffn)}

    def matrices(self, c: Config) -> dict[str, tuple[int, int]]:
        """The matrices that layers may have, as the graph reads them."""
        q, kv = c.heads * c.head_width, c.kv_heads * c.head_width
        return {
            "attn_q": (q, c.hidden),
            "attn_k": (kv, c.hidden),
            "attn_v": (kv, c.hidden),
            "attn_output": (c.hidden, q),
            **self._network(c, None),
            **self._network(c, c.experts),
        }

    def _joined(self, c: Config) -> dict[str, tuple[str, ...]]:
        """Which matrices hold several; a checkpoint may have each by itself."""
        apart = {name.split(".")[2] for name in c.shapes if name.startswith("blk.0.")}
        return {name: parts for name, parts in self.joined.items() if not apart.issuperset(parts)}

    def _stored(self, c: Config, experts: Experts | None) -> dict[str, tuple[int, int]]:
        """The matrices of a layer as the checkpoint has them."""
        unread = {*self._network(c, None), *self._network(c, c.experts)} - set(self._network(c, experts))
        found = {name: shape for name, shape in self.matrices(c).items() if name not in unread}
        for name, parts in self._joined(c).items():
            shapes = [found.pop(part) for part in parts]
            found[name] = (sum(rows for rows, _ in shapes), shapes[0][1])
        return found

    def place(self, c: Config, name: str) -> tuple[str, int]:
        """The matrix of the checkpoint that has the rows of one of the graph, and the first of these rows."""
        for joint, parts in self._joined(c).items():
            if name in parts:
                before = parts[: parts.index(name)]
                return joint, sum(self.matrices(c)[part][0] for part in before)
        return name, 0


def _norm(
    b: Builder, kind: Dense, c: Config, layer: str, out: str, x: str, name: str, shape: tuple[int, ...], batch: Batch
) -> str:
    """x [tokens, width] or [tokens, heads, width], normalised over its last axis. `name` is that of weight and bias."""
    heads = shape[1] if len(shape) == 3 else 1
    dims = {"tokens": shape[0], "heads": heads, "width": shape[-1], "eps": c.eps, "batched": bool(batch)}
    weight, bias = f"{name}.weight", f"{name}.bias"
    b.tensor(weight, shape[-1], role="weight", format=c.formats[weight])
    made = b.tensor(out, *shape)
    if kind.norm == "layer_norm":
        has_bias = bias in c.shapes
        if has_bias:
            b.tensor(bias, shape[-1], role="weight", format=c.formats[bias])
        inputs = {"x": x, "weight": weight, "bias": bias if has_bias else None, **batch}
        b.add("layer_norm", {**dims, "bias": has_bias}, inputs, layer, out=made)
        return made
    plain = b.tensor(f"{out}.plain", *shape)
    b.add("rms_norm", dims, {"x": x, **batch}, layer, out=plain)
    dims = {"tokens": shape[0], "count": math.prod(shape), "period": shape[-1], "batched": bool(batch)}
    b.add("mul", dims, {"a": plain, "b": weight, **batch}, layer, out=made)
    return made


def _of_values(
    b: Builder, op: str, layer: str, out: str, x: str, shape: tuple[int, int], batch: Batch, **dims: float
) -> str:
    """An op that takes every value of x by itself."""
    made = b.tensor(out, *shape)
    sizes = {"tokens": shape[0], "count": math.prod(shape), "batched": bool(batch)}
    b.add(op, {**sizes, **dims}, {"x": x, **batch}, layer, out=made)
    return made


def _head(kind: Dense, c: Config, rows: int, tokens: int, wants_logits: bool) -> Graph:
    b = Builder()
    x = b.tensor("hidden", tokens, c.hidden, role="input")
    if tokens > 1:
        b.tensor("batch", 1 + tokens, 4, role="input", format="u32")
        b.tensor("outputs", rows, 8, role="input", format="u32")
        taken = b.tensor("output.rows", rows, c.hidden)
        dims = {"tokens": tokens, "rows": rows, "width": c.hidden}
        b.add("take_rows", dims, {"x": x, "outputs": "outputs", "batch": "batch"}, "output", out=taken)
        x = taken
    out = "output.output_norm" if wants_logits else "states"
    x = _norm(b, kind, c, "output", out, x, OUTPUT_NORM, (rows, c.hidden), {})
    if not wants_logits:
        return b.graph(x)
    weight = OUTPUT if OUTPUT in c.shapes else EMBEDDING
    b.tensor(weight, c.vocabulary, c.hidden, role="weight", format=c.formats[weight])
    # The last of what is done with the logits is called so.
    todo: list[tuple[str, dict[str, float]]] = []
    if c.factors.logits != 1:
        todo.append(("scale", {"factor": c.factors.logits}))
    if c.factors.logit_cap:
        todo.append(("softcap", {"cap": c.factors.logit_cap}))
    logits = b.tensor("output.product" if todo else "logits", rows, c.vocabulary)
    product = {"tokens": rows, "K": c.hidden, "N": c.vocabulary, "format": c.formats[weight]}
    inputs: dict[str, str | None] = {"x": x, "weight": weight}
    if kind.output_bias:
        inputs["bias"] = b.tensor(OUTPUT_BIAS, c.vocabulary, role="weight", format=c.formats[OUTPUT_BIAS])
    b.add("linear", {**product, "bias": kind.output_bias}, inputs, "output", out=logits)
    for i, (op, constant) in enumerate(todo):
        out = "logits" if i == len(todo) - 1 else f"output.{op}"
        logits = _of_values(b, op, "output", out, logits, (rows, c.vocabulary), {}, **constant)
    return b.graph(logits)


_GELUS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}


def with_gelu(own: Metadata, c: Config, key: str) -> Config:
    """The GELU that config.json of a folder names, if it is not the architecture's usual one. GGUF has no such key."""
    name = own.get(key)
    if name is None:
        return c
    if not isinstance(name, str) or name not in _GELUS:
        raise own.wrong(key, f"one of {', '.join(_GELUS)}", name)
    return replace(c, activation=_GELUS[name])


class _Build:
    """The graph of the layers, in the making."""

    def __init__(self, kind: Dense, c: Config, step: StepSpec) -> None:
        self.kind, self.c, self.step, self.b = kind, c, step, Builder()
        self.b.tensor("batch", 1 + step.tokens, 4, role="input", format="u32")
        self.b.tensor("tokens", 1, role="input", format="u32")
        self.b.tensor("page_table", 1, role="input", format="u32")
        for name, rope in c.ropes.items():
            self.b.tensor(name, 1, rope.rotary // 2, 2, role="table")
        # One row is always there; of more, some may be padding.
        self.batch = {"batch": "batch"} if step.tokens > 1 else {}

    def graph(self) -> Graph:
        c, kind = self.c, self.kind
        x = self._embedded()
        for i in range(c.layers):
            layer = f"blk.{i}"
            read = self._norm(layer, "attn_norm", x) if kind.norms_before else x
            y = self._attention(layer, i, read)
            summed = self._sum(layer, f"{layer}.attn_sum", x, self._added(layer, "post_attention_norm", y))
            if c.ffn_input != "attn_norm":
                read = summed if c.ffn_input == "sum" else x
                read = self._norm(layer, kind.ffn_norm, read) if kind.norms_before else read
            y = self._ffn(layer, read, c.experts_of(i))
            out = "hidden" if i == c.layers - 1 else f"{layer}.ffn_sum"
            x = self._sum(layer, out, summed, self._added(layer, "post_ffw_norm", y))
        return self.b.graph(x)

    def _embedded(self) -> str:
        c, tokens = self.c, self.step.tokens
        self.b.tensor(EMBEDDING, c.vocabulary, c.hidden, role="weight", format=c.formats[EMBEDDING])
        x = self.b.tensor("embedding", tokens, c.hidden)
        dims = {"tokens": tokens, "N": c.vocabulary, "K": c.hidden, "format": c.formats[EMBEDDING]}
        inputs = {"batch": "batch", "tokens": "tokens", "weight": EMBEDDING}
        self.b.add("embedding", dims, inputs, "embedding", out=x)
        if c.factors.embedding != 1:
            x = self._scaled("embedding", "embedding.scaled", x, c.factors.embedding)
        if self.kind.positions == "learned":
            rows = c.shapes[POSITIONS][0]
            table = self.b.tensor(POSITIONS, rows, c.hidden, role="weight", format=c.formats[POSITIONS])
            dims = {"tokens": tokens, "N": rows, "K": c.hidden, "format": c.formats[POSITIONS]}
            placed = self.b.tensor("embedding.placed", tokens, c.hidden)
            self.b.add("add_positions", dims, {"x": x, "batch": "batch", "weight": table}, "embedding", out=placed)
            x = placed
        return x

    def _added(self, layer: str, norm: str, y: str) -> str:
        """What is added of a result: it may be normalised and scaled before."""
        if self.kind.norms_after:
            y = self._norm(layer, norm, y)
        factor = self.c.factors.residual
        return y if factor == 1 else self._scaled(layer, f"{y}.scaled", y, factor)

    def _scaled(self, layer: str, out: str, x: str, factor: float) -> str:
        shape = (self.step.tokens, self.c.hidden)
        return _of_values(self.b, "scale", layer, out, x, shape, self.batch, factor=factor)

    def _norm(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None) -> str:
        """Over the last axis of x [tokens, hidden], or of another shape."""
        shape = shape or (self.step.tokens, self.c.hidden)
        named = f"{layer}.{name}"
        return _norm(self.b, self.kind, self.c, layer, named, x, named, shape, self.batch)

    def _weight(self, layer: str, name: str, kind: str, *shape: int, rotary: int = 0) -> str:
        """A matrix or a bias of a layer, which may be some rows of a tensor of the checkpoint."""
        there, first = self.kind.place(self.c, name)
        named, stored = f"{layer}.{name}.{kind}", f"{layer}.{there}.{kind}"
        part = TensorSlice(stored, shape[0], first, self.c.head_width if rotary else 0, rotary)
        return self.b.view(named, *shape, of=part, format=self.c.formats[stored])

    def _linear(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None, rotary: int = 0) -> str:
        """[tokens, n], or the same values in another shape; `rotary` values of each head in pairs, if given."""
        n, k = self.kind.matrices(self.c)[name]
        weight = self._weight(layer, name, "weight", n, k, rotary=rotary)
        has_bias = f"{layer}.{self.kind.place(self.c, name)[0]}.bias" in self.c.shapes
        bias = self._weight(layer, name, "bias", n, rotary=rotary) if has_bias else None
        out = self.b.tensor(f"{layer}.{name}", *(shape or (self.step.tokens, n)))
        dims = {"tokens": self.step.tokens, "K": k, "N": n, "format": self.b.tensors[weight].format, "bias": has_bias}
        inputs = {"x": x, "weight": weight, "bias": bias, **self.batch}
        self.b.add("linear", {**dims, "batched": bool(self.batch)}, inputs, layer, out=out)
        return out

    def _rotated(self, layer: str, name: str, x: str, heads: int, table: str) -> str:
        c, tokens, rope = self.c, self.step.tokens, self.c.ropes[table]
        out = self.b.tensor(f"{layer}.{name}.rotated", tokens, heads, c.head_width)
        dims = {"tokens": tokens, "H": heads, "D": c.head_width, "rotary": rope.rotary}
        inputs = {"x": x, "batch": "batch", "table": table}
        dims["interleaved"] = rope.interleaved or self._makes_pairs(table)
        self.b.add("rope", dims, inputs, layer, out=out)
        return out

    def _makes_pairs(self, table: str | None) -> bool:
        """Are the rows of q and k in another order than in the checkpoint?

        A kernel that makes q and k can turn what lies together. Scores do not change if q and k have another order.
        Norms of q and k come in between: there the order stays.
        """
        rope = self.c.ropes.get(table or "")
        return rope is not None and not (rope.interleaved or self.kind.head_norms or self.kind.row_norms)

    def _projected(self, layer: str, x: str, table: str | None) -> tuple[str, str, str]:
        """q [tokens, heads, width], k and v [tokens, kv heads, width]; q and k are normalised where rows are."""
        tokens, width, by_heads = self.step.tokens, self.c.head_width, self.kind.head_norms
        queries, keys = (tokens, self.c.heads, width), (tokens, self.c.kv_heads, width)
        rotary = self.c.ropes[table].rotary if table and self._makes_pairs(table) else 0
        q = self._linear(layer, "attn_q", x, queries if by_heads else None, rotary)
        k = self._linear(layer, "attn_k", x, keys if by_heads else None, rotary)
        v = self._linear(layer, "attn_v", x)
        if self.kind.row_norms:
            q = self._norm(layer, "attn_q_norm", q, (tokens, self.c.heads * width))
            k = self._norm(layer, "attn_k_norm", k, (tokens, self.c.kv_heads * width))
        return q, k, v

    def _turned(self, layer: str, q: str, k: str, table: str | None) -> tuple[str, str]:
        """q and k after norms of heads and rope, where there are such."""
        c, kind = self.c, self.kind

        def norms(q: str, k: str) -> tuple[str, str]:
            shapes = ((self.step.tokens, heads, c.head_width) for heads in (c.heads, c.kv_heads))
            q, k = (
                self._norm(layer, name, y, shape)
                for name, y, shape in zip(("attn_q_norm", "attn_k_norm"), (q, k), shapes, strict=True)
            )
            return q, k

        if kind.head_norms and not kind.rope_first:
            q, k = norms(q, k)
        if table in c.ropes:
            q = self._rotated(layer, "attn_q", q, c.heads, table)
            k = self._rotated(layer, "attn_k", k, c.kv_heads, table)
        return norms(q, k) if kind.head_norms and kind.rope_first else (q, k)

    def _attention(self, layer: str, index: int, x: str) -> str:
        c, step, own = self.c, self.step, self.c.layer(index)
        q, k, v = self._projected(layer, x, own.rope)
        q, k = self._turned(layer, q, k, own.rope)
        caches = {
            key: self.b.tensor(f"{layer}.{key}", 1, c.kv_heads, c.head_width, role="state", format=step.cache)
            for key in ("k_cache", "v_cache")
        }
        kept = {"tokens": step.tokens, "Hkv": c.kv_heads, "D": c.head_width, "cache": step.cache}
        self.b.add("kv_write", kept, {"k": k, "v": v, "batch": "batch", **caches}, layer, **caches)
        out = self.b.tensor(f"{layer}.attended", step.tokens, c.heads * c.head_width)
        dims = {**kept, "Hq": c.heads, "context": step.context, "paged": step.paged}
        dims |= {"scale": c.factors.scores, "window": own.window, "softcap": c.factors.score_cap}
        dims["runs"] = step.tokens >= RUN_ROWS and not step.decode
        given = {"page_table": "page_table"} if step.paged else {}
        if self.kind.sinks:
            name, dims["sinks"] = f"{layer}.attn_sinks.weight", True
            given["sinks"] = self.b.tensor(name, c.heads, role="weight", format=c.formats[name])
        self.b.add("attention", dims, {"q": q, **caches, "batch": "batch", **given}, layer, out=out)
        return self._linear(layer, "attn_output", out)

    def _ffn(self, layer: str, x: str, experts: Experts | None) -> str:
        op, shape = self.c.activation or self.kind.activation, (self.step.tokens, self.c.ffn)
        if not op.endswith("_mul"):
            up = self._linear(layer, "ffn_up", x)
            up = _of_values(self.b, op, layer, f"{layer}.{op}", up, shape, self.batch)
            return self._linear(layer, "ffn_down", up)
        if experts:
            return self._mixture(layer, x, experts)
        return self._gated(layer, x, self.c.ffn)

    def _gated(self, layer: str, x: str, width: int, suffix: str = "") -> str:
        """A network with a gate: down(activation(gate(x)) · up(x))."""
        gate, up = (self._linear(layer, f"{name}{suffix}", x) for name in ("ffn_gate", "ffn_up"))
        out = self.b.tensor(f"{layer}.gated{suffix}", self.step.tokens, width)
        self._pointwise(self.kind.activation, layer, gate, up, out, width)
        return self._linear(layer, f"ffn_down{suffix}", out)

    def _mixture(self, layer: str, x: str, experts: Experts) -> str:
        """The chosen experts of each row, and the network for all rows, where there is one."""
        c, tokens = self.c, self.step.tokens
        logits = self._linear(layer, "ffn_gate_inp", x)
        out = add_experts(self.b, c, experts, layer, x, logits, tokens, self.batch)
        if not experts.shared:
            return out
        shared = self._gated(layer, x, experts.shared, "_shexp")
        if not experts.shared_gate:
            return self._sum(layer, f"{layer}.ffn_shared", out, shared)
        named = f"{layer}.ffn_gate_inp_shexp.weight"
        gate = self.b.tensor(named, c.hidden, role="weight", format=c.formats[named])
        summed = self.b.tensor(f"{layer}.ffn_shared", tokens, c.hidden)
        dims = {"tokens": tokens, "width": c.hidden, "K": c.hidden, "batched": bool(self.batch)}
        self.b.add("add_gated", dims, {"a": out, "b": shared, "x": x, "gate": gate, **self.batch}, layer, out=summed)
        return summed

    def _sum(self, layer: str, name: str, x: str, y: str) -> str:
        out = self.b.tensor(name, self.step.tokens, self.c.hidden)
        self._pointwise("add", layer, x, y, out, self.c.hidden)
        return out

    def _pointwise(self, op: str, layer: str, a: str, b: str, out: str, width: int) -> None:
        tokens = self.step.tokens
        dims = {"tokens": tokens, "count": tokens * width, "batched": bool(self.batch)}
        self.b.add(op, dims, {"a": a, "b": b, **self.batch}, layer, out=out)
