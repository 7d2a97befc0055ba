"""Decoders: norm, attention with grouped heads, norm, feed-forward network, layer by layer.

What all architectures share: metadata → config → graph. The rows of `supported` say where each of them differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ModelError
from ..graph.batch import RUN_ROWS
from ..graph.graph import Builder, Graph, TensorSlice
from .config import EMBEDDING, OUTPUT, Config, Experts, FfnInput, Metadata, Rope, Shapes, StepSpec, expect
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


@dataclass(frozen=True, eq=False)
class Architecture:
    """What is true of all checkpoints with this name in GGUF, which also begins the keys of their metadata.

    `read` makes a config of metadata, tensors' shapes and formats. `build` makes the graph of a step, and `head` that
    from there to logits. `tensors` tells the shapes that a checkpoint with this metadata has.
    """

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
    positions: Literal["rope", "long_rope", "learned"] = "rope"
    packed_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sinks: bool = False  # every head has a score without a key: attn_sinks
    # Matrices and norms that always have one, by the names in a checkpoint; "output" is that of the logits.
    biases: tuple[str, ...] = ()
    mixture: Mixture | None = None  # how the experts of a feed-forward network are chosen, where there are some
    # Reads further keys: layers that differ, factors.
    finalize_config: Callable[[Metadata, Config], Config] = lambda meta, config: config

    def read(self, metadata: Mapping[str, Any], shapes: Shapes, formats: Mapping[str, str]) -> Config:
        """The config of a checkpoint. Every number, every key and every tensor is checked."""
        meta = Metadata(metadata, self.name)
        config = self._config(meta, shapes, formats)
        check_keys(meta, config)
        tensors = self._tensors(config)
        factors = {name for rope in config.ropes.values() for name in (rope.factors, rope.long_factors) if name}
        check_tensors(self.name, shapes, {*tensors, *factors})
        for name, shape in tensors.items():
            expect(shapes, name, shape)
        return config

    def tensors(self, metadata: Mapping[str, Any], shapes: Shapes) -> Shapes:
        """Every tensor that such a checkpoint has; `shapes` needs the embeddings, and what is optional."""
        return self._tensors(self._config(Metadata(metadata, self.name), shapes, {}))

    def build(self, config: Config, step: StepSpec) -> Graph:
        """A batch of tokens → hidden [tokens, hidden]; keys and values go to the cache."""
        return _Build(self, config, step).graph()

    def head(self, config: Config, rows: int, tokens: int, /, *, logits: bool = True) -> Graph:
        """hidden [tokens, hidden] → logits [rows, vocabulary] of the rows in `outputs` (one token: its row).

        Without `logits`: the states [rows, hidden] after the output norm.
        """
        return _head(self, config, rows, tokens, logits)

    def _config(self, meta: Metadata, shapes: Shapes, formats: Mapping[str, str]) -> Config:
        hidden = meta.whole("embedding_length")
        heads = meta.whole("attention.head_count", maximum=4096)
        kv_heads = meta.whole("attention.head_count_kv", heads, maximum=4096)
        if heads % kv_heads:
            key = meta.full("attention.head_count")
            raise ModelError(f"{key} must be a multiple of head_count_kv, got {heads} and {kv_heads}")
        width = meta.whole("attention.key_length", hidden // heads)
        if meta.whole("attention.value_length", width) != width:
            raise ModelError(f"{meta.full('attention.value_length')} differs from key_length; that is not supported")
        if EMBEDDING not in shapes or len(shapes[EMBEDDING]) != 2:
            raise ModelError(f"the checkpoint has no matrix {EMBEDDING!r}: it is incomplete, or not a language model")
        layered = self.norm == "layer_norm"
        key = f"attention.layer_norm_{'' if layered else 'rms_'}epsilon"
        eps = meta.number(key)
        if eps > 1:
            raise meta.wrong(key, "a small number above 0", eps)
        if layered:
            meta.get("attention.layer_norm_rms_epsilon")  # converters write both; there is no RMS norm
        rope = Rope(0, 1.0, False)
        if self.positions != "learned":
            rope = read_rope(meta, shapes, width, interleaved=self.interleaved, long=self.positions == "long_rope")
        config = Config(
            architecture=self.name,
            layers=meta.whole("block_count", maximum=1024),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            ffn=meta.whole("feed_forward_length"),
            vocabulary=shapes[EMBEDDING][0],
            context=meta.whole("context_length"),
            eps=eps,
            rope=rope,
            formats=formats,
            shapes=shapes,
            experts=read_experts(self.mixture, meta) if self.mixture else None,
            ffn_input=self.ffn_input,
        )
        config = self.finalize_config(meta, config)
        return with_dense_layers(meta, config) if config.experts else config

    def _tensors(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Every tensor that the graph reads, with its shape."""
        tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocabulary, config.hidden)}
        if self.positions == "learned":
            tensors[POSITIONS] = (config.context, config.hidden)
        if OUTPUT in config.shapes:  # else the embeddings serve as output matrix
            tensors[OUTPUT] = (config.vocabulary, config.hidden)
        if "output" in self.biases:
            tensors[OUTPUT_BIAS] = (config.vocabulary,)
        vectors, biased = {OUTPUT_NORM: config.hidden}, self._biased(config)
        for i in range(config.layers):
            vectors |= {f"blk.{i}.{name}": width for name, width in self._norms(config).items()}
            experts = config.experts_of(i)
            for name, shape in self._stored(config, experts).items():
                tensors[f"blk.{i}.{name}.weight"] = shape
                if name in biased:
                    tensors[f"blk.{i}.{name}.bias"] = shape[:1]
            if experts:
                tensors |= expert_tensors(config, experts, f"blk.{i}", biased)
            if self.sinks:
                tensors[f"blk.{i}.attn_sinks.weight"] = (config.heads,)
        for name, width in vectors.items():
            tensors[f"{name}.weight"] = (width,)
            if self.norm == "layer_norm" and name.rpartition(".")[2] in biased:
                tensors[f"{name}.bias"] = (width,)
        return tensors

    def _biased(self, config: Config) -> set[str]:
        """Matrices and norms that have a bias: what one layer has, no other may lack."""
        return {name.split(".")[-2] for name in config.shapes if name.endswith(".bias")}.union(self.biases)

    def _norms(self, config: Config) -> dict[str, int]:
        """The norms of a layer, with their widths."""
        before = ("attn_norm",) if config.ffn_input == "attn_norm" else ("attn_norm", self.ffn_norm)
        norms = dict.fromkeys(before if self.norms_before else (), config.hidden)
        if self.head_norms:
            norms |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), config.head_width)
        if self.row_norms:
            norms |= {
                "attn_q_norm": config.heads * config.head_width,
                "attn_k_norm": config.kv_heads * config.head_width,
            }
        if self.norms_after:
            norms |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), config.hidden)
        return norms

    def _network(self, config: Config, experts: Experts | None) -> dict[str, tuple[int, int]]:
        """The matrices of a feed-forward network, those of single experts left out."""
        if experts:
            return expert_matrices(config, experts)
        gate = {"ffn_gate": (config.ffn, config.hidden)} if self.activation.endswith("_mul") else {}
        return {**gate, "ffn_up": (config.ffn, config.hidden), "ffn_down": (config.hidden, config.ffn)}

    def matrices(self, config: Config) -> dict[str, tuple[int, int]]:
        """The matrices that layers may have, as the graph reads them."""
        q, kv = config.heads * config.head_width, config.kv_heads * config.head_width
        return {
            "attn_q": (q, config.hidden),
            "attn_k": (kv, config.hidden),
            "attn_v": (kv, config.hidden),
            "attn_output": (config.hidden, q),
            **self._network(config, None),
            **self._network(config, config.experts),
        }

    def _packed_tensors(self, config: Config) -> dict[str, tuple[str, ...]]:
        """Which matrices hold several; a checkpoint may have each by itself."""
        apart = {name.split(".")[2] for name in config.shapes if name.startswith("blk.0.")}
        return {name: parts for name, parts in self.packed_tensors.items() if not apart.issuperset(parts)}

    def _stored(self, config: Config, experts: Experts | None) -> dict[str, tuple[int, int]]:
        """The matrices of a layer as the checkpoint has them."""
        unread = {*self._network(config, None), *self._network(config, config.experts)} - set(
            self._network(config, experts)
        )
        matrices = {name: shape for name, shape in self.matrices(config).items() if name not in unread}
        for name, parts in self._packed_tensors(config).items():
            shapes = [matrices.pop(part) for part in parts]
            matrices[name] = (sum(rows for rows, _ in shapes), shapes[0][1])
        return matrices

    def place(self, config: Config, name: str) -> tuple[str, int]:
        """The matrix of the checkpoint that has the rows of one of the graph, and the first of these rows."""
        for joint, parts in self._packed_tensors(config).items():
            if name in parts:
                before = parts[: parts.index(name)]
                return joint, sum(self.matrices(config)[part][0] for part in before)
        return name, 0


def _norm(
    b: Builder,
    architecture: Architecture,
    config: Config,
    layer: str,
    out: str,
    x: str,
    name: str,
    shape: tuple[int, ...],
    batch: Batch,
) -> str:
    """x [tokens, width] or [tokens, heads, width], normalised over its last axis. `name` is that of weight and bias."""
    heads = shape[1] if len(shape) == 3 else 1
    dims = {"tokens": shape[0], "heads": heads, "width": shape[-1], "eps": config.eps, "batched": bool(batch)}
    weight, bias = f"{name}.weight", f"{name}.bias"
    b.tensor(weight, shape[-1], role="weight", format=config.formats[weight])
    b.tensor(out, *shape)
    if architecture.norm == "layer_norm":
        has_bias = bias in config.shapes
        if has_bias:
            b.tensor(bias, shape[-1], role="weight", format=config.formats[bias])
        inputs = {"x": x, "weight": weight, "bias": bias if has_bias else None, **batch}
        b.add("layer_norm", {**dims, "bias": has_bias}, inputs, layer, out=out)
        return out
    plain = b.tensor(f"{out}.plain", *shape)
    b.add("rms_norm", dims, {"x": x, **batch}, layer, out=plain)
    dims = {"tokens": shape[0], "count": math.prod(shape), "period": shape[-1], "batched": bool(batch)}
    b.add("mul", dims, {"a": plain, "b": weight, **batch}, layer, out=out)
    return out


def _of_values(
    b: Builder, op: str, layer: str, out: str, x: str, shape: tuple[int, int], batch: Batch, **dims: float
) -> str:
    """An op that takes every value of x by itself."""
    sizes = {"tokens": shape[0], "count": math.prod(shape), "batched": bool(batch)}
    b.add(op, {**sizes, **dims}, {"x": x, **batch}, layer, out=b.tensor(out, *shape))
    return out


def _head(architecture: Architecture, config: Config, rows: int, tokens: int, wants_logits: bool) -> Graph:
    b = Builder()
    x = b.tensor("hidden", tokens, config.hidden, role="input")
    if tokens > 1:
        b.tensor("batch", 1 + tokens, 4, role="input", format="u32")
        b.tensor("outputs", rows, 8, role="input", format="u32")
        dims = {"tokens": tokens, "rows": rows, "width": config.hidden}
        row_inputs = {"x": x, "outputs": "outputs", "batch": "batch"}
        x = b.tensor("output.rows", rows, config.hidden)
        b.add("take_rows", dims, row_inputs, "output", out=x)
    out = "output.output_norm" if wants_logits else "states"
    x = _norm(b, architecture, config, "output", out, x, OUTPUT_NORM, (rows, config.hidden), {})
    if not wants_logits:
        return b.graph(x)
    weight = OUTPUT if OUTPUT in config.shapes else EMBEDDING
    b.tensor(weight, config.vocabulary, config.hidden, role="weight", format=config.formats[weight])
    # The last of what is done with the logits is called so.
    todo: list[tuple[str, dict[str, float]]] = []
    if config.factors.logits != 1:
        todo.append(("scale", {"factor": config.factors.logits}))
    if config.factors.logit_cap:
        todo.append(("softcap", {"cap": config.factors.logit_cap}))
    logits = b.tensor("output.product" if todo else "logits", rows, config.vocabulary)
    product = {"tokens": rows, "K": config.hidden, "N": config.vocabulary, "format": config.formats[weight]}
    inputs: dict[str, str | None] = {"x": x, "weight": weight}
    if "output" in architecture.biases:
        inputs["bias"] = b.tensor(OUTPUT_BIAS, config.vocabulary, role="weight", format=config.formats[OUTPUT_BIAS])
    b.add("linear", {**product, "bias": "output" in architecture.biases}, inputs, "output", out=logits)
    for i, (op, constant) in enumerate(todo):
        out = "logits" if i == len(todo) - 1 else f"output.{op}"
        logits = _of_values(b, op, "output", out, logits, (rows, config.vocabulary), {}, **constant)
    return b.graph(logits)


class _Build:
    """The graph of the layers, in the making."""

    def __init__(self, architecture: Architecture, config: Config, step: StepSpec) -> None:
        self.architecture, self.config, self.step, self.b = architecture, config, step, Builder()
        self.b.tensor("batch", 1 + step.tokens, 4, role="input", format="u32")
        self.b.tensor("tokens", 1, role="input", format="u32")
        self.b.tensor("page_table", 1, role="input", format="u32")
        for name, rope in config.ropes.items():
            self.b.tensor(name, 1, rope.rotary // 2, 2, role="table")
        # One row is always there; of more, some may be padding.
        self.batch = {"batch": "batch"} if step.tokens > 1 else {}

    def graph(self) -> Graph:
        config, architecture = self.config, self.architecture
        x = self._embedded()
        for i in range(config.layers):
            layer = f"blk.{i}"
            read = self._norm(layer, "attn_norm", x) if architecture.norms_before else x
            y = self._attention(layer, i, read)
            summed = self._sum(layer, f"{layer}.attn_sum", x, self._added(layer, "post_attention_norm", y))
            if config.ffn_input != "attn_norm":
                read = summed if config.ffn_input == "sum" else x
                read = self._norm(layer, architecture.ffn_norm, read) if architecture.norms_before else read
            y = self._ffn(layer, read, config.experts_of(i))
            out = "hidden" if i == config.layers - 1 else f"{layer}.ffn_sum"
            x = self._sum(layer, out, summed, self._added(layer, "post_ffw_norm", y))
        return self.b.graph(x)

    def _embedded(self) -> str:
        config, tokens = self.config, self.step.tokens
        self.b.tensor(EMBEDDING, config.vocabulary, config.hidden, role="weight", format=config.formats[EMBEDDING])
        x = self.b.tensor("embedding", tokens, config.hidden)
        dims = {"tokens": tokens, "N": config.vocabulary, "K": config.hidden, "format": config.formats[EMBEDDING]}
        inputs = {"batch": "batch", "tokens": "tokens", "weight": EMBEDDING}
        self.b.add("embedding", dims, inputs, "embedding", out=x)
        if config.factors.embedding != 1:
            x = self._scaled("embedding", "embedding.scaled", x, config.factors.embedding)
        if self.architecture.positions == "learned":
            rows = config.shapes[POSITIONS][0]
            table = self.b.tensor(POSITIONS, rows, config.hidden, role="weight", format=config.formats[POSITIONS])
            dims = {"tokens": tokens, "N": rows, "K": config.hidden, "format": config.formats[POSITIONS]}
            placed = self.b.tensor("embedding.placed", tokens, config.hidden)
            self.b.add("add_positions", dims, {"x": x, "batch": "batch", "weight": table}, "embedding", out=placed)
            x = placed
        return x

    def _added(self, layer: str, norm: str, y: str) -> str:
        """What is added of a result: it may be normalised and scaled before."""
        if self.architecture.norms_after:
            y = self._norm(layer, norm, y)
        factor = self.config.factors.residual
        return y if factor == 1 else self._scaled(layer, f"{y}.scaled", y, factor)

    def _scaled(self, layer: str, out: str, x: str, factor: float) -> str:
        shape = (self.step.tokens, self.config.hidden)
        return _of_values(self.b, "scale", layer, out, x, shape, self.batch, factor=factor)

    def _norm(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None) -> str:
        """Over the last axis of x [tokens, hidden], or of another shape."""
        shape = shape or (self.step.tokens, self.config.hidden)
        named = f"{layer}.{name}"
        return _norm(self.b, self.architecture, self.config, layer, named, x, named, shape, self.batch)

    def _weight(self, layer: str, name: str, part: str, *shape: int, rotary: int = 0) -> str:
        """A matrix or a bias of a layer, which may be some rows of a tensor of the checkpoint."""
        there, first = self.architecture.place(self.config, name)
        named, stored = f"{layer}.{name}.{part}", f"{layer}.{there}.{part}"
        rows = TensorSlice(stored, shape[0], first, self.config.head_width if rotary else 0, rotary)
        return self.b.view(named, *shape, of=rows, format=self.config.formats[stored])

    def _linear(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None, rotary: int = 0) -> str:
        """[tokens, n], or the same values in another shape; `rotary` values of each head in pairs, if given."""
        n, k = self.architecture.matrices(self.config)[name]
        weight = self._weight(layer, name, "weight", n, k, rotary=rotary)
        has_bias = f"{layer}.{self.architecture.place(self.config, name)[0]}.bias" in self.config.shapes
        bias = self._weight(layer, name, "bias", n, rotary=rotary) if has_bias else None
        out = self.b.tensor(f"{layer}.{name}", *(shape or (self.step.tokens, n)))
        dims = {"tokens": self.step.tokens, "K": k, "N": n, "format": self.b.tensors[weight].format, "bias": has_bias}
        inputs = {"x": x, "weight": weight, "bias": bias, **self.batch}
        self.b.add("linear", {**dims, "batched": bool(self.batch)}, inputs, layer, out=out)
        return out

    def _rotated(self, layer: str, name: str, x: str, heads: int, table: str) -> str:
        config, tokens, rope = self.config, self.step.tokens, self.config.ropes[table]
        out = self.b.tensor(f"{layer}.{name}.rotated", tokens, heads, config.head_width)
        dims = {"tokens": tokens, "H": heads, "D": config.head_width, "rotary": rope.rotary}
        inputs = {"x": x, "batch": "batch", "table": table}
        dims["interleaved"] = rope.interleaved or self._makes_pairs(table)
        self.b.add("rope", dims, inputs, layer, out=out)
        return out

    def _makes_pairs(self, table: str | None) -> bool:
        """Are the rows of q and k in another order than in the checkpoint?

        A kernel that makes q and k can turn what lies together. Scores do not change if q and k have another order.
        Norms of q and k come in between: there the order stays.
        """
        rope = self.config.ropes.get(table or "")
        has_norms = self.architecture.head_norms or self.architecture.row_norms
        return rope is not None and not (rope.interleaved or has_norms)

    def _projected(self, layer: str, x: str, table: str | None) -> tuple[str, str, str]:
        """q [tokens, heads, width], k and v [tokens, kv heads, width]; q and k are normalised where rows are."""
        tokens, width, by_heads = self.step.tokens, self.config.head_width, self.architecture.head_norms
        queries, keys = (tokens, self.config.heads, width), (tokens, self.config.kv_heads, width)
        rotary = self.config.ropes[table].rotary if table and self._makes_pairs(table) else 0
        q = self._linear(layer, "attn_q", x, queries if by_heads else None, rotary)
        k = self._linear(layer, "attn_k", x, keys if by_heads else None, rotary)
        v = self._linear(layer, "attn_v", x)
        if self.architecture.row_norms:
            q = self._norm(layer, "attn_q_norm", q, (tokens, self.config.heads * width))
            k = self._norm(layer, "attn_k_norm", k, (tokens, self.config.kv_heads * width))
        return q, k, v

    def _normed_and_rotated(self, layer: str, q: str, k: str, table: str | None) -> tuple[str, str]:
        """q and k after norms of heads and rope, where there are such."""
        config, architecture = self.config, self.architecture

        def norms(q: str, k: str) -> tuple[str, str]:
            shapes = ((self.step.tokens, heads, config.head_width) for heads in (config.heads, config.kv_heads))
            q, k = (
                self._norm(layer, name, y, shape)
                for name, y, shape in zip(("attn_q_norm", "attn_k_norm"), (q, k), shapes, strict=True)
            )
            return q, k

        if architecture.head_norms and not architecture.rope_first:
            q, k = norms(q, k)
        if table in config.ropes:
            q = self._rotated(layer, "attn_q", q, config.heads, table)
            k = self._rotated(layer, "attn_k", k, config.kv_heads, table)
        return norms(q, k) if architecture.head_norms and architecture.rope_first else (q, k)

    def _attention(self, layer: str, index: int, x: str) -> str:
        config, step, meta = self.config, self.step, self.config.layer(index)
        q, k, v = self._projected(layer, x, meta.rope)
        q, k = self._normed_and_rotated(layer, q, k, meta.rope)
        caches = {
            key: self.b.tensor(f"{layer}.{key}", 1, config.kv_heads, config.head_width, role="state", format=step.cache)
            for key in ("k_cache", "v_cache")
        }
        sizes = {"tokens": step.tokens, "Hkv": config.kv_heads, "D": config.head_width, "cache": step.cache}
        self.b.add("kv_write", sizes, {"k": k, "v": v, "batch": "batch", **caches}, layer, **caches)
        out = self.b.tensor(f"{layer}.attended", step.tokens, config.heads * config.head_width)
        dims = {**sizes, "Hq": config.heads, "context": step.context, "paged": step.paged}
        dims |= {"scale": config.factors.scores, "window": meta.window, "softcap": config.factors.score_cap}
        dims["runs"] = step.tokens >= RUN_ROWS and not step.decode
        inputs = {"q": q, **caches, "batch": "batch"} | ({"page_table": "page_table"} if step.paged else {})
        if self.architecture.sinks:
            name, dims["sinks"] = f"{layer}.attn_sinks.weight", True
            inputs["sinks"] = self.b.tensor(name, config.heads, role="weight", format=config.formats[name])
        self.b.add("attention", dims, inputs, layer, out=out)
        return self._linear(layer, "attn_output", out)

    def _ffn(self, layer: str, x: str, experts: Experts | None) -> str:
        op, shape = self.config.activation or self.architecture.activation, (self.step.tokens, self.config.ffn)
        if not op.endswith("_mul"):
            up = self._linear(layer, "ffn_up", x)
            up = _of_values(self.b, op, layer, f"{layer}.{op}", up, shape, self.batch)
            return self._linear(layer, "ffn_down", up)
        if experts:
            return self._mixture(layer, x, experts)
        return self._gated(layer, x, self.config.ffn)

    def _gated(self, layer: str, x: str, width: int, suffix: str = "") -> str:
        """A network with a gate: down(activation(gate(x)) · up(x))."""
        gate, up = (self._linear(layer, f"{name}{suffix}", x) for name in ("ffn_gate", "ffn_up"))
        out = self.b.tensor(f"{layer}.gated{suffix}", self.step.tokens, width)
        self._pointwise(self.architecture.activation, layer, gate, up, out, width)
        return self._linear(layer, f"ffn_down{suffix}", out)

    def _mixture(self, layer: str, x: str, experts: Experts) -> str:
        """The chosen experts of each row, and the network for all rows, where there is one."""
        config, tokens = self.config, self.step.tokens
        logits = self._linear(layer, "ffn_gate_inp", x)
        out = add_experts(self.b, config, experts, layer, x, logits, tokens, self.batch)
        if not experts.shared:
            return out
        shared = self._gated(layer, x, experts.shared, "_shexp")
        if not experts.shared_gate:
            return self._sum(layer, f"{layer}.ffn_shared", out, shared)
        named = f"{layer}.ffn_gate_inp_shexp.weight"
        gate = self.b.tensor(named, config.hidden, role="weight", format=config.formats[named])
        summed = self.b.tensor(f"{layer}.ffn_shared", tokens, config.hidden)
        dims = {"tokens": tokens, "width": config.hidden, "K": config.hidden, "batched": bool(self.batch)}
        self.b.add("add_gated", dims, {"a": out, "b": shared, "x": x, "gate": gate, **self.batch}, layer, out=summed)
        return summed

    def _sum(self, layer: str, name: str, x: str, y: str) -> str:
        out = self.b.tensor(name, self.step.tokens, self.config.hidden)
        self._pointwise("add", layer, x, y, out, self.config.hidden)
        return out

    def _pointwise(self, op: str, layer: str, a: str, b: str, out: str, width: int) -> None:
        tokens = self.step.tokens
        dims = {"tokens": tokens, "count": tokens * width, "batched": bool(self.batch)}
        self.b.add(op, dims, {"a": a, "b": b, **self.batch}, layer, out=out)
