"""Decoders: norm, attention with grouped heads, norm, feed-forward network, layer by layer.

What all architectures share: metadata → config → graph. The rows of `supported` say where each of them differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ModelError
from ..graph.batch import IMAGE_WORDS, RUN_ROWS
from ..graph.graph import Builder, Graph, TensorSlice
from .config import (
    EMBEDDING,
    OUTPUT,
    Config,
    Experts,
    FfnInput,
    ImageRows,
    Layer,
    Metadata,
    Mixer,
    Mixture,
    Rope,
    Shapes,
    StepSpec,
    expect,
)
from .experts import (
    ROUTER_SCALE,
    add_experts,
    dense_width,
    expert_matrices,
    expert_tensors,
    read_experts,
    with_dense_layers,
)
from .layer_inputs import LayerInputs, layer_input_tensors
from .metadata_keys import check_keys, check_tensors
from .predictors import without_predictors
from .recurrent import LayerBuilder, Layout, mixer_matrices, read_layers, read_mixer, vectors
from .rope import read_rope

OUTPUT_NORM, OUTPUT_BIAS, POSITIONS = "output_norm", "output.bias", "position_embd.weight"
LAYER_SCALE = "layer_output_scale.weight"
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
    # Every head of q and k is normalised before it is rotated: attn_q_norm, attn_k_norm. Optional: where files say so.
    head_norms: bool | Literal["optional"] = False
    rope_first: bool = False  # it is rotated before it is normalised
    row_norms: bool = False  # so are all heads of q, and of k, as one vector
    value_norms: bool = False  # every head of v is normalised, without weights
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norms_before: bool = True  # attention and feed-forward network read what attn_norm and ffn_norm give
    ffn_norm: str = "ffn_norm"  # what files call the norm before the feed-forward network
    ffn_input: FfnInput = "sum"  # unless the file says otherwise
    norms_after: bool = False  # what they give is normalised before it is added: post_attention_norm, post_ffw_norm
    activation: Literal["silu_mul", "gelu_mul", "gelu", "gelu_erf", "relu_squared"] = "silu_mul"  # _mul: with a gate
    positions: Literal["rope", "long_rope", "learned", "none"] = "rope"
    packed_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sinks: bool = False  # every head has a score without a key: attn_sinks
    gated: bool = False  # attn_q has a query and a gate for each head: what attention gives is times its sigmoid
    mixer: Mixer = "attention"  # of the layers that keep a state, where there are some
    layout: Layout = "instead"  # in place of keys and values, or how else layers have it
    output_norm: str = OUTPUT_NORM  # what files call the norm after the layers
    # Matrices and norms that always have one, by the names in a checkpoint; "output" is that of the logits.
    biases: tuple[str, ...] = ()
    mixture: Mixture | None = None  # how the experts of a feed-forward network are chosen, where there are some
    layer_scales: bool = False  # what layers give may have a factor
    per_layer_keys: tuple[str, ...] = ()  # of which files may have a number for each layer
    # Reads further keys: layers that differ, factors.
    finalize_config: Callable[[Metadata, Config], Config] = lambda meta, config: config

    def read(self, metadata: Mapping[str, Any], shapes: Shapes, formats: Mapping[str, str]) -> Config:
        """The config of a checkpoint. Every number, every key and every tensor is checked."""
        meta = Metadata(metadata, self.name, self.per_layer_keys)
        config = self._config(meta, shapes, formats)
        check_keys(meta, config)
        shapes = config.shapes
        tensors = self._tensors(config)
        factors = {name for rope in config.ropes.values() for name in (rope.factors, rope.long_factors) if name}
        check_tensors(self.name, shapes, {*tensors, *factors})
        for name, shape in tensors.items():
            expect(shapes, name, shape)
        return config

    def tensors(self, metadata: Mapping[str, Any], shapes: Shapes) -> Shapes:
        """Every tensor that such a checkpoint has; `shapes` needs the embeddings, and what is optional."""
        return self._tensors(self._config(Metadata(metadata, self.name, self.per_layer_keys), shapes, {}))

    def build(self, config: Config, step: StepSpec) -> Graph:
        """A batch of tokens → hidden [tokens, hidden]; keys and values go to the cache."""
        # One row is always there; of more, some may be padding.
        return _Build(self, config, step.tokens, batch=step.tokens > 1).layers(step)

    def head(self, config: Config, rows: int, tokens: int, /, *, logits: bool = True) -> Graph:
        """hidden [tokens, hidden] → logits [rows, vocabulary] of the rows in `outputs` (one token: its row).

        Without `logits`: the states [rows, hidden] after the output norm.
        """
        return _Build(self, config, rows, batch=False).head(tokens, logits)

    def normalises_heads(self, config: Config) -> bool:
        """Does this checkpoint normalise heads of q and k?"""
        return self.head_norms is True or (
            self.head_norms == "optional" and "blk.0.attn_q_norm.weight" in config.shapes
        )

    def _config(self, meta: Metadata, shapes: Shapes, formats: Mapping[str, str]) -> Config:
        layers, shapes, predictors = without_predictors(meta, shapes)
        hidden = meta.whole("embedding_length")
        heads = 0 if self.layout == "alone" else meta.whole("attention.head_count", maximum=4096)
        kv_heads, per_layer = read_layers(self.mixer, meta, heads, layers, self.layout)
        if heads and heads % kv_heads:
            key = meta.full("attention.head_count")
            raise ModelError(f"{key} must be a multiple of head_count_kv, got {heads} and {kv_heads}")
        width = meta.whole("attention.key_length", hidden // heads) if heads else 0
        if heads and meta.whole("attention.value_length", width) != width:
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
        if self.positions not in ("learned", "none"):
            rope = read_rope(meta, shapes, width, interleaved=self.interleaved, long=self.positions == "long_rope")
        ffn = max((layer.ffn for layer in per_layer), default=0) or self._width(meta)
        config = Config(
            architecture=self.name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            ffn=ffn,
            vocabulary=shapes[EMBEDDING][0],
            context=meta.whole("context_length"),
            eps=eps,
            rope=rope,
            formats=formats,
            shapes=shapes,
            experts=read_experts(self.mixture, meta, ffn) if self.mixture else None,
            ffn_input=self.ffn_input,
            per_layer=per_layer,
            predictors=predictors,
        )
        if self.mixer != "attention":
            config = read_mixer(self.mixer, meta, config)
        config = self.finalize_config(meta, config)
        return with_dense_layers(meta, config) if config.experts else config

    def _width(self, meta: Metadata) -> int:
        """Of networks that all layers have, if layers have some."""
        return dense_width(self.mixture, meta) if self.layout in ("instead", "beside") else 0

    def _tensors(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Every tensor that the graph reads, with its shape."""
        tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocabulary, config.hidden)}
        if self.positions == "learned":
            tensors[POSITIONS] = (config.context, config.hidden)
        if OUTPUT in config.shapes:  # else the embeddings serve as output matrix
            tensors[OUTPUT] = (config.vocabulary, config.hidden)
        if "output" in self.biases:
            tensors[OUTPUT_BIAS] = (config.vocabulary,)
        norms, biased = {self.output_norm: config.hidden}, self._biased(config)
        for i in range(config.layers):
            layer, experts, sized = config.layer(i), config.experts_of(i), config.of_layer(i)
            norms |= {f"blk.{i}.{name}": width for name, width in self._norms(sized, layer).items()}
            for mixer in layer.mixers:
                tensors |= {f"blk.{i}.{name}": shape for name, shape in vectors(config, mixer).items()}
            for name, shape in self._stored(sized, layer, experts).items():
                tensors[f"blk.{i}.{name}.weight"] = shape
                if name in biased:
                    tensors[f"blk.{i}.{name}.bias"] = shape[:1]
            if experts:
                tensors |= expert_tensors(config, experts, f"blk.{i}", biased)
            if self.sinks:
                tensors[f"blk.{i}.attn_sinks.weight"] = (config.heads,)
            if self._has_layer_scales(config):
                tensors[f"blk.{i}.{LAYER_SCALE}"] = (1,)
        tensors |= layer_input_tensors(config)
        for name, width in norms.items():
            tensors[f"{name}.weight"] = (width,)
            if self.norm == "layer_norm" and name.rpartition(".")[2] in biased:
                tensors[f"{name}.bias"] = (width,)
        return tensors

    def _has_layer_scales(self, config: Config) -> bool:
        """Is what a layer gives multiplied by a number of its own? Of all layers, or of none."""
        return self.layer_scales and any(name.endswith(f".{LAYER_SCALE}") for name in config.shapes)

    def _biased(self, config: Config) -> set[str]:
        """Matrices and norms that have a bias: what one layer has, no other may lack."""
        return {name.split(".")[-2] for name in config.shapes if name.endswith(".bias")}.union(self.biases)

    def _norms(self, config: Config, layer: Layer) -> dict[str, int]:
        """The norms of a layer, with their widths."""
        before = (
            ("attn_norm",) if config.ffn_input == "attn_norm" or not layer.network else ("attn_norm", self.ffn_norm)
        )
        norms = dict.fromkeys(before if self.norms_before else (), config.hidden)
        if self.normalises_heads(config) and layer.attends:
            norms |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), config.head_width)
        if self.row_norms:
            norms |= {
                "attn_q_norm": config.heads * config.head_width,
                "attn_k_norm": config.kv_heads * config.head_width,
            }
        if self.norms_after:
            norms |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), config.hidden)
        if layer.kv_layer is not None:
            norms.pop("attn_k_norm", None)
        if config.experts and config.experts.mixture.beside_network and layer.experts:
            norms |= dict.fromkeys(("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"), config.hidden)
        return norms

    def _network(self, config: Config, experts: Experts | None) -> dict[str, tuple[int, int]]:
        """The matrices of a feed-forward network, those of single experts left out."""
        if experts and experts.mixture.beside_network:
            return {**self._network(config, None), **expert_matrices(config, experts)}
        if experts:
            return expert_matrices(config, experts)
        gate = {"ffn_gate": (config.ffn, config.hidden)} if self.activation.endswith("_mul") else {}
        return {**gate, "ffn_up": (config.ffn, config.hidden), "ffn_down": (config.hidden, config.ffn)}

    def _mixer(self, config: Config, mixer: Mixer) -> dict[str, tuple[int, int]]:
        """The matrices of what mixes the tokens of a layer."""
        if mixer != "attention":
            return mixer_matrices(config, mixer)
        q, kv = config.heads * config.head_width, config.kv_heads * config.head_width
        return {
            "attn_q": (2 * q if self.gated else q, config.hidden),
            "attn_k": (kv, config.hidden),
            "attn_v": (kv, config.hidden),
            "attn_output": (config.hidden, q),
        }

    def matrices(self, config: Config) -> dict[str, tuple[int, int]]:
        """The matrices that layers may have, as the graph reads them."""
        mixers: tuple[Mixer, ...] = (self.mixer,) if self.layout == "alone" else ("attention", self.mixer)
        return {
            **{name: shape for mixer in mixers for name, shape in self._mixer(config, mixer).items()},
            **self._network(config, None),
            **self._network(config, config.experts),
        }

    def _packed_tensors(self, config: Config) -> dict[str, tuple[str, ...]]:
        """Which matrices hold several; a checkpoint may have each by itself."""

        def apart(parts: tuple[str, ...]) -> bool:
            return all(f"blk.0.{part}.weight" in config.shapes for part in parts)

        return {name: parts for name, parts in self.packed_tensors.items() if not apart(parts)}

    def _stored(self, config: Config, layer: Layer, experts: Experts | None) -> dict[str, tuple[int, int]]:
        """The matrices of a layer as the checkpoint has them."""
        matrices = {name: shape for mixer in layer.mixers for name, shape in self._mixer(config, mixer).items()}
        if layer.network:
            matrices |= self._network(config, experts)
        if layer.kv_layer is not None:
            del matrices["attn_k"], matrices["attn_v"]
        elif layer.keys_are_values:
            del matrices["attn_v"]
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


class _Build:
    """Makes the graph of a step, or of a head, of `tokens` rows at once. In a `batch`, some may be padding."""

    def __init__(self, architecture: Architecture, config: Config, tokens: int, *, batch: bool) -> None:
        self.architecture, self.config, self.tokens, self.b = architecture, config, tokens, Builder()
        self.model = config  # `config` has the sizes of the layer that is being made
        self.batch = {"batch": "batch"} if batch else {}
        self.head_norms = architecture.normalises_heads(config)
        self.images: ImageRows | None = None  # of a step that has such rows

    def _stored(self, name: str, *shape: int) -> str:
        """A tensor of the checkpoint, all of it."""
        return self.b.tensor(name, *shape, role="weight", format=self.config.formats[name])

    def _add(self, op: str, layer: str, out: str, dims: Mapping[str, Any], inputs: Mapping[str, str | None]) -> str:
        """A node that does not compute rows of padding."""
        sizes = {"tokens": self.tokens, **dims, "batched": bool(self.batch)}
        self.b.add(op, sizes, {**inputs, **self.batch}, layer, out=out)
        return out

    def _norm(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None, out: str = "") -> str:
        """x [tokens, hidden], or of another shape, over its last axis. `name` is that of weight and bias."""
        config, shape = self.config, shape or (self.tokens, self.config.hidden)
        dims = {"heads": shape[1] if len(shape) == 3 else 1, "width": shape[-1], "eps": config.eps}
        weight, bias = self._stored(f"{name}.weight", shape[-1]), f"{name}.bias"
        out = self.b.tensor(out or name, *shape)
        if self.architecture.norm == "layer_norm":
            has_bias = bias in config.shapes
            operands = {"x": x, "weight": weight, "bias": self._stored(bias, shape[-1]) if has_bias else None}
            return self._add("layer_norm", layer, out, {**dims, "bias": has_bias}, operands)
        plain = self._plain_norm(layer, f"{out}.plain", x, shape)
        dims = {"count": math.prod(shape), "period": shape[-1]}
        return self._add("mul", layer, out, dims, {"a": plain, "b": weight})

    def _plain_norm(self, layer: str, out: str, x: str, shape: tuple[int, ...]) -> str:
        """Without a weight."""
        dims = {"heads": shape[1] if len(shape) == 3 else 1, "width": shape[-1], "eps": self.config.eps}
        return self._add("rms_norm", layer, self.b.tensor(out, *shape), dims, {"x": x})

    def _pointwise(
        self, op: str, layer: str, out: str, inputs: Mapping[str, str], width: int = 0, **dims: float
    ) -> str:
        """An op that takes every value of [tokens, width] by itself; hidden if there is no width."""
        width = width or self.config.hidden
        sizes = {"count": self.tokens * width, **dims}
        return self._add(op, layer, self.b.tensor(out, self.tokens, width), sizes, inputs)

    def head(self, step_tokens: int, wants_logits: bool) -> Graph:
        """hidden [step_tokens, hidden] → logits, or the states before them, of `tokens` rows."""
        config, rows = self.config, self.tokens
        x = self.b.tensor("hidden", step_tokens, config.hidden, role="input")
        if step_tokens > 1:
            self.b.tensor("batch", 1 + step_tokens, 4, role="input", format="u32")
            self.b.tensor("outputs", rows, 8, role="input", format="u32")
            inputs = {"x": x, "outputs": "outputs", "batch": "batch"}
            dims = {"tokens": step_tokens, "rows": rows, "width": config.hidden}
            x = self.b.tensor("output.rows", rows, config.hidden)
            self.b.add("take_rows", dims, inputs, "output", out=x)
        norm = self.architecture.output_norm
        x = self._norm("output", norm, x, out="output.output_norm" if wants_logits else "states")
        if not wants_logits:
            return self.b.graph(x)
        weight = self._stored(OUTPUT if OUTPUT in config.shapes else EMBEDDING, config.vocabulary, config.hidden)
        # The last of what is done with the logits is called so.
        todo: list[tuple[str, dict[str, float]]] = []
        if config.factors.logits != 1:
            todo.append(("scale", {"factor": config.factors.logits}))
        if config.factors.logit_cap:
            todo.append(("softcap", {"cap": config.factors.logit_cap}))
        logits = self.b.tensor("output.product" if todo else "logits", rows, config.vocabulary)
        bias = self._stored(OUTPUT_BIAS, config.vocabulary) if "output" in self.architecture.biases else None
        product = {"K": config.hidden, "N": config.vocabulary, "format": config.formats[weight], "bias": bool(bias)}
        self._add("linear", "output", logits, product, {"x": x, "weight": weight, "bias": bias})
        for i, (op, constant) in enumerate(todo):
            out = "logits" if i == len(todo) - 1 else f"output.{op}"
            logits = self._pointwise(op, "output", out, {"x": logits}, config.vocabulary, **constant)
        return self.b.graph(logits)

    def layers(self, step: StepSpec) -> Graph:
        """Tokens → hidden [tokens, hidden]."""
        config, architecture = self.model, self.architecture
        self.b.tensor("batch", 1 + step.tokens, 4, role="input", format="u32")
        self.b.tensor("tokens", 1, role="input", format="u32")
        self.b.tensor("page_table", 1, role="input", format="u32")
        for name, rope in config.ropes.items():
            self.b.tensor(name, 1, rope.rotary // 2, 2, role="table")
        x = self._embedded()
        images = self.images = config.images if step.images else None
        levels = images.levels if images and not step.decode else 0  # rows that decode have no features
        if images and (levels or images.axes):
            self.b.tensor("image_rows", step.tokens, IMAGE_WORDS, role="input", format="u32")
        if images and levels:
            self.b.tensor("features", 1, images.levels * config.hidden, role="table")
            x = self._with_features("embedding", "embedding.features", x, 0)
        layer_inputs = LayerInputs(self.b, config, self.tokens, self.batch)
        inputs = layer_inputs.all_layers(x) if config.layer_input else None
        scaled = architecture._has_layer_scales(config)
        for i in range(config.layers):
            layer, self.config = f"blk.{i}", config.of_layer(i)
            variant, last = config.layer(i), i == config.layers - 1
            summed = x
            if variant.mixers:
                read = self._norm(layer, f"{layer}.attn_norm", x) if architecture.norms_before else x
                out = "hidden" if last and not variant.network else f"{layer}.attn_sum"
                summed = self._mixed(layer, variant, step, read, x, out)
            if not variant.network:
                x = summed
                continue
            if config.ffn_input != "attn_norm":
                read = summed if config.ffn_input == "sum" else x
                if architecture.norms_before:
                    read = self._norm(layer, f"{layer}.{architecture.ffn_norm}", read)
            y = self._ffn(layer, read, summed, config.experts_of(i))
            # The last of what a layer does gives "hidden", if it is the last layer.
            names = ["ffn_sum", *(["input_sum"] if inputs else []), *(["scaled"] if scaled else [])]
            names += ["deep"] if i + 1 < levels else []
            outs = iter([f"{layer}.{name}" for name in names[: -1 if last else None]])
            x = self._sum(layer, next(outs, "hidden"), summed, self._added(layer, "post_ffw_norm", y))
            if inputs:
                x = layer_inputs.add_to(i, x, inputs, next(outs, "hidden"))
            if scaled:
                pair = {"a": x, "b": self._stored(f"{layer}.{LAYER_SCALE}", 1)}
                x = self._pointwise("mul", layer, next(outs, "hidden"), pair, period=1)
            if i + 1 < levels:
                x = self._with_features(layer, next(outs, "hidden"), x, i + 1)
        return self.b.graph(x)

    def _with_features(self, layer: str, out: str, x: str, level: int) -> str:
        """With the features of images: in place of their rows, or at further levels added to them."""
        images, width = self.images, self.config.hidden
        assert images is not None
        dims = {"tokens": self.tokens, "K": width, "levels": images.levels, "level": level, "add": level > 0}
        inputs = {"x": x, "features": "features", "image_rows": "image_rows"}
        self.b.tensor(out, self.tokens, width)
        self.b.add("put_features", dims, inputs, layer, out=out)
        return out

    def _row_table(self, table: str) -> str:
        """The angles of every row of the step, where positions have several axes."""
        out, rope, sections = f"{table}.rows", self.model.ropes[table], self.model.sections
        assert sections is not None
        if out not in self.b.tensors:
            self.b.tensor(out, self.tokens, rope.rotary // 2, 2)
            dims = {"tokens": self.tokens, "rotary": rope.rotary, **sections._asdict()}
            inputs = {"table": table, "batch": "batch", "image_rows": "image_rows"}
            self.b.add("rope_rows", dims, inputs, "positions", out=out)
        return out

    def _embedded(self) -> str:
        config = self.config
        dims: dict[str, Any] = {"tokens": self.tokens, "N": config.vocabulary, "K": config.hidden}
        weight = self._stored(EMBEDDING, config.vocabulary, config.hidden)
        x = self.b.tensor("embedding", self.tokens, config.hidden)
        inputs = {"batch": "batch", "tokens": "tokens", "weight": weight}
        self.b.add("embedding", {**dims, "format": config.formats[EMBEDDING]}, inputs, "embedding", out=x)
        if config.factors.embedding != 1:
            factor = config.factors.embedding
            x = self._pointwise("scale", "embedding", "embedding.scaled", {"x": x}, factor=factor)
        if self.architecture.positions == "learned":
            rows = config.shapes[POSITIONS][0]
            table = self._stored(POSITIONS, rows, config.hidden)
            dims |= {"N": rows, "format": config.formats[POSITIONS]}
            out = self.b.tensor("embedding.placed", self.tokens, config.hidden)
            self.b.add("add_positions", dims, {"x": x, "batch": "batch", "weight": table}, "embedding", out=out)
            x = out
        return x

    def _added(self, layer: str, norm: str, y: str) -> str:
        """What is added of a result: it may be normalised and scaled before."""
        if self.architecture.norms_after:
            y = self._norm(layer, f"{layer}.{norm}", y)
        factor = self.config.factors.residual
        return y if factor == 1 else self._pointwise("scale", layer, f"{y}.scaled", {"x": y}, factor=factor)

    def _sum(self, layer: str, out: str, a: str, b: str) -> str:
        return self._pointwise("add", layer, out, {"a": a, "b": b})

    def _slice(self, layer: str, name: str, part: str, *shape: int, rotary: int = 0) -> str:
        """A matrix or a bias of a layer, which may be some rows of a tensor of the checkpoint."""
        there, first = self.architecture.place(self.config, name)
        named, stored = f"{layer}.{name}.{part}", f"{layer}.{there}.{part}"
        rows = TensorSlice(stored, shape[0], first, self.config.head_width if rotary else 0, rotary)
        return self.b.view(named, *shape, of=[rows], format=self.config.formats[stored])

    def _linear(self, layer: str, name: str, x: str, shape: tuple[int, ...] | None = None, rotary: int = 0) -> str:
        """[tokens, n], or the same values in another shape; `rotary` values of each head in pairs, if given."""
        n, k = self.architecture.matrices(self.config)[name]
        weight = self._slice(layer, name, "weight", n, k, rotary=rotary)
        has_bias = f"{layer}.{self.architecture.place(self.config, name)[0]}.bias" in self.config.shapes
        bias = self._slice(layer, name, "bias", n, rotary=rotary) if has_bias else None
        out = self.b.tensor(f"{layer}.{name}", *(shape or (self.tokens, n)))
        dims = {"K": k, "N": n, "format": self.b.tensors[weight].format, "bias": has_bias}
        return self._add("linear", layer, out, dims, {"x": x, "weight": weight, "bias": bias})

    def _rotated(self, layer: str, name: str, x: str, heads: int, table: str) -> str:
        config, tokens, rope = self.config, self.tokens, self.config.ropes[table]
        out = self.b.tensor(f"{layer}.{name}.rotated", tokens, heads, config.head_width)
        dims = {"tokens": tokens, "H": heads, "D": config.head_width, "rotary": rope.rotary}
        inputs = {"x": x, "batch": "batch", "table": table}
        dims["interleaved"] = rope.interleaved or self._makes_pairs(table)
        if self.images and self.images.axes:
            self.b.add("rope_by_row", dims, {"x": x, "table": self._row_table(table)}, layer, out=out)
            return out
        self.b.add("rope", dims, inputs, layer, out=out)
        return out

    def _makes_pairs(self, table: str | None) -> bool:
        """Are the rows of q and k in another order than in the checkpoint?

        A kernel that makes q and k can turn what lies together. Scores do not change if q and k have another order.
        Norms of q and k come in between: there the order stays.
        """
        rope = self.config.ropes.get(table or "")
        has_norms = self.head_norms or self.architecture.row_norms
        return rope is not None and not (rope.interleaved or has_norms)

    def _projected(self, layer: str, variant: Layer, x: str) -> tuple[str, str | None, str | None]:
        """q [tokens, heads, width], k and v [tokens, kv heads, width]; q and k are normalised where rows are.

        A layer that reads the keys and values of another has none.
        """
        table = variant.rope
        tokens, width, by_heads = self.tokens, self.config.head_width, self.head_norms
        queries, keys = (tokens, self.config.heads, width), (tokens, self.config.kv_heads, width)
        rotary = self.config.ropes[table].rotary if table and self._makes_pairs(table) else 0
        if self.architecture.gated:
            q = self._half_of_queries(layer, "attn_q", x, 0)
        else:
            q = self._linear(layer, "attn_q", x, queries if by_heads else None, rotary)
        if variant.kv_layer is not None:
            return q, None, None
        k = self._linear(layer, "attn_k", x, keys if by_heads else None, rotary)
        v = k if variant.keys_are_values else self._linear(layer, "attn_v", x)
        if self.architecture.value_norms:
            v = self._plain_norm(layer, f"{layer}.attn_v.plain", v, keys)
        if self.architecture.row_norms:
            q = self._norm(layer, f"{layer}.attn_q_norm", q, (tokens, self.config.heads * width))
            k = self._norm(layer, f"{layer}.attn_k_norm", k, (tokens, self.config.kv_heads * width))
        return q, k, v

    def _half_of_queries(self, layer: str, name: str, x: str, half: int) -> str:
        """The query of each head, or the gate that follows it in the checkpoint: [tokens, heads, width]."""
        config, width = self.config, self.config.head_width
        stored, rows = f"{layer}.attn_q.weight", config.heads * width
        kind, has_bias = config.formats[stored], f"{layer}.attn_q.bias" in config.shapes
        parts = {
            suffix: [
                TensorSlice(f"{layer}.attn_q.{suffix}", width, (2 * i + half) * width) for i in range(config.heads)
            ]
            for suffix in ("weight", "bias")
        }
        weight = self.b.view(f"{layer}.{name}.heads.weight", rows, config.hidden, of=parts["weight"], format=kind)
        bias = self.b.view(f"{layer}.{name}.heads.bias", rows, of=parts["bias"], format="f32") if has_bias else None
        out = self.b.tensor(f"{layer}.{name}", self.tokens, config.heads, width)
        dims = {"K": config.hidden, "N": rows, "format": kind, "bias": has_bias}
        return self._add("linear", layer, out, dims, {"x": x, "weight": weight, "bias": bias})

    def _normed_and_rotated(self, layer: str, name: str, x: str, heads: int, table: str | None) -> str:
        """q or k after norms of heads and rope, where there are such."""
        config, first = self.config, self.architecture.rope_first

        def norm(x: str) -> str:
            return self._norm(layer, f"{layer}.{name}_norm", x, (self.tokens, heads, config.head_width))

        if self.head_norms and not first:
            x = norm(x)
        if table in config.ropes:
            x = self._rotated(layer, name, x, heads, table)
        return norm(x) if self.head_norms and first else x

    def _mixed(self, layer: str, variant: Layer, step: StepSpec, x: str, residual: str, out: str) -> str:
        """What the mixers of a layer make of x, added to the residual, one after the other."""
        for mixer in variant.mixers:
            if mixer == "attention":
                y = self._attention(layer, variant, step, x)
            else:
                y = LayerBuilder(self.b, self.config, layer, step, self.batch).mixed(mixer, x)
            name = out if mixer == variant.mixers[-1] else f"{layer}.{mixer}_sum"
            residual = self._sum(layer, name, residual, self._added(layer, "post_attention_norm", y))
        return residual

    def _attention(self, layer: str, variant: Layer, step: StepSpec, x: str) -> str:
        config = self.config
        q, k, v = self._projected(layer, variant, x)
        # Here, so that it can be one product with them.
        gate = self._half_of_queries(layer, "attn_gate", x, 1) if self.architecture.gated else None
        q = self._normed_and_rotated(layer, "attn_q", q, config.heads, variant.rope)
        owner = layer if variant.kv_layer is None else f"blk.{variant.kv_layer}"
        caches = {
            key: self.b.tensor(f"{owner}.{key}", 1, config.kv_heads, config.head_width, role="state", format=step.cache)
            for key in ("k_cache", "v_cache")
        }
        sizes = {"tokens": step.tokens, "Hkv": config.kv_heads, "D": config.head_width, "cache": step.cache}
        if k is not None:
            k = self._normed_and_rotated(layer, "attn_k", k, config.kv_heads, variant.rope)
            self.b.add("kv_write", sizes, {"k": k, "v": v, "batch": "batch", **caches}, layer, **caches)
        out = self.b.tensor(f"{layer}.attended", step.tokens, config.heads * config.head_width)
        dims = {**sizes, "Hq": config.heads, "context": step.context, "paged": step.paged}
        dims |= {"scale": config.factors.scores, "window": variant.window, "softcap": config.factors.score_cap}
        dims["runs"] = step.tokens >= RUN_ROWS and not step.decode
        inputs = {"q": q, **caches, "batch": "batch"} | ({"page_table": "page_table"} if step.paged else {})
        images = self.images if self.images and (variant.window or not self.images.in_windows) else None
        if images and images.sees_itself and not step.decode:
            self.b.add("attention_reach", dims, {**inputs, "image_rows": "image_rows"}, layer, out=out)
            return self._linear(layer, "attn_output", out)
        if self.architecture.sinks:
            name, dims["sinks"] = f"{layer}.attn_sinks.weight", True
            inputs["sinks"] = self._stored(name, config.heads)
        self.b.add("attention", dims, inputs, layer, out=out)
        if gate is not None:
            pair = {"a": gate, "b": out}
            out = self._pointwise("sigmoid_mul", layer, f"{layer}.attn_gated", pair, config.heads * config.head_width)
        return self._linear(layer, "attn_output", out)

    def _ffn(self, layer: str, x: str, summed: str, experts: Experts | None) -> str:
        """Of x, which may be a norm of what attention has given, `summed`."""
        if experts and experts.mixture.beside_network:
            return self._network_and_experts(layer, x, summed, experts)
        if experts:
            return self._mixture(layer, x, experts)
        return self._one_network(layer, x, self.config.ffn)

    def _one_network(self, layer: str, x: str, width: int, suffix: str = "") -> str:
        """down(activation(gate(x)) · up(x)), or without a gate down(activation(up(x)))."""
        op = self.config.activation or self.architecture.activation
        gated = op.endswith("_mul")
        names = {"a": "ffn_gate", "b": "ffn_up"} if gated else {"x": "ffn_up"}
        inputs = {key: self._linear(layer, f"{name}{suffix}", x) for key, name in names.items()}
        y = self._pointwise(op, layer, f"{layer}.{'gated' if gated else op}{suffix}", inputs, width)
        return self._linear(layer, f"ffn_down{suffix}", y)

    def _network_and_experts(self, layer: str, x: str, summed: str, experts: Experts) -> str:
        """Each with norms of its own. The router reads a norm of what attention has given, divided by √hidden."""
        hidden = self.config.hidden
        y = self._norm(layer, f"{layer}.post_ffw_norm_1", self._one_network(layer, x, self.config.ffn))
        plain = self._plain_norm(layer, f"{layer}.router_norm.plain", summed, (self.tokens, hidden))
        pair = {"a": plain, "b": self._stored(f"{layer}.{ROUTER_SCALE}", hidden)}
        logits = self._linear(
            layer, "ffn_gate_inp", self._pointwise("mul", layer, f"{layer}.router_norm", pair, period=hidden)
        )
        factor = 1 / math.sqrt(hidden)
        logits = self._pointwise("scale", layer, f"{layer}.router_logits", {"x": logits}, experts.count, factor=factor)
        read = self._norm(layer, f"{layer}.pre_ffw_norm_2", summed)
        chosen = add_experts(self.b, self.config, experts, layer, read, logits, self.tokens, self.batch)
        return self._sum(layer, f"{layer}.ffn_both", y, self._norm(layer, f"{layer}.post_ffw_norm_2", chosen))

    def _mixture(self, layer: str, x: str, experts: Experts) -> str:
        """The chosen experts of each row, and the network for all rows, where there is one."""
        hidden = self.config.hidden
        logits = self._linear(layer, "ffn_gate_inp", x)
        y = add_experts(self.b, self.config, experts, layer, x, logits, self.tokens, self.batch)
        if not experts.shared:
            return y
        shared, out = self._one_network(layer, x, experts.shared, "_shexp"), f"{layer}.ffn_shared"
        if experts.mixture.shared != "gated":
            return self._sum(layer, out, y, shared)
        gate = self._stored(f"{layer}.ffn_gate_inp_shexp.weight", hidden)
        self.b.tensor(out, self.tokens, hidden)
        inputs = {"a": y, "b": shared, "x": x, "gate": gate}
        return self._add("add_gated", layer, out, {"width": hidden, "K": hidden}, inputs)
