"""The numbers of a checkpoint's model, and the metadata that they are read from, checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ..errors import ModelError
from ..formats.checkpoint import without_ones
from ..graph.reference import Yarn

# What GGUF calls them in every architecture. Without an output matrix, the embeddings serve as one.
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"

Shapes = Mapping[str, tuple[int, ...]]
# What the feed-forward network of a layer reads: the norm of the layer's input and attention's result, of the input
# alone, or what attention reads. Its result is added to the sum of both in any case.
FfnInput = Literal["sum", "input", "attn_norm"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions: pairs are (2i, 2i + 1) if interleaved, else (i, i + rotary / 2)."""

    rotary: int  # 0: none
    theta: float
    interleaved: bool
    linear_scale: float = 1.0  # positions are divided by this
    factors: str | None = None  # a tensor of the checkpoint that divides the frequencies
    long_factors: str | None = None  # the one that does if the context is longer than `original_context`
    original_context: int = 0
    yarn: Yarn | None = None
    magnitude: float = 1.0  # what rotated values are multiplied with

    def factors_for(self, context: int) -> str | None:
        """The tensor that divides the frequencies of a model with so much context."""
        return self.long_factors if self.long_factors and context > self.original_context else self.factors


# The tables of rope in graphs: that of most layers, and that of layers with a window where it is another.
ROPE, LOCAL_ROPE = "rope_table", "rope_table_local"


# What mixes the tokens of a layer: attention, or an op whose state stands for all tokens before (`recurrent`).
Mixer = Literal["attention", "short_conv", "delta_rule", "mamba2"]


@dataclass(frozen=True)
class Layer:
    """What a layer does that others of its model may not."""

    window: int = 0  # how many tokens a token sees, itself included; 0: all
    rope: str | None = ROPE  # its table; None: positions are not rotated
    experts: bool = True  # its feed-forward network is a mixture, where the model has one
    mixers: tuple[Mixer, ...] = ("attention",)  # all of them read the same; what they give is added up
    network: bool = True  # a feed-forward network follows
    head_width: int = 0  # these three: 0 where they are the model's
    kv_heads: int = 0
    ffn: int = 0
    kv_layer: int | None = None  # the earlier layer whose keys and values it reads: it has none of its own
    keys_are_values: bool = False  # before both are normalised

    @property
    def attends(self) -> bool:
        """Does it read keys and values?"""
        return "attention" in self.mixers


@dataclass(frozen=True)
class DeltaRule:
    """Sizes of layers with the gated delta rule. Each key head serves equally many value heads.

    `grouped`: they follow each other, and serve value heads h with h // (value heads / key heads) = key head; else
    h % key heads = key head.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    grouped: bool

    @property
    def channels(self) -> int:
        """Values of all queries, keys and values of a row."""
        return 2 * self.key_heads * self.key_width + self.values

    @property
    def values(self) -> int:
        """Of all value heads of a row."""
        return self.value_heads * self.value_width


@dataclass(frozen=True)
class Scan:
    """Sizes of layers with the selective scan of Mamba-2. Neighbouring heads share the B and C of a group."""

    heads: int
    width: int  # of a head
    state: int  # rows of a head's state
    groups: int
    normalised: bool  # what it gives, after a gate: the values of each group by themselves
    least: float = 0.0  # limits of the steps; 0: none above
    most: float = 0.0

    @property
    def values(self) -> int:
        """Of all heads of a row."""
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Values of a row, and B and C of all groups."""
        return self.values + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """What the input of a layer becomes: gates, channels and steps."""
        return self.values + self.channels + self.heads


@dataclass(frozen=True)
class Factors:
    """Constants of a model that most do not have."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and feed-forward network add
    logits: float = 1.0
    scores: float | None = None  # of attention; None: 1 / sqrt(head width)
    score_cap: float = 0.0  # 0: none
    logit_cap: float = 0.0


@dataclass(frozen=True)
class Mixture:
    """What an architecture says about its experts that no key of its files does.

    `always`: its files have experts. `normalise`: the factors of the chosen experts add up to 1. `own_width`: experts
    have a width of their own, expert_feed_forward_length. `shared`: a network that all rows pass through: gated by the
    sigmoid of a dot product, or optional, without a gate, in files that say how wide it is, or as wide as how many
    experts; or as wide as files say, however many experts they call it. `gating` is that of the op route_experts,
    `activation` the op of gate and up, or of up alone. `selection_bias`: layers have a bias, exp_probs_b, that counts
    when experts are chosen, and not in their factors. Optional: all or none. `beside_network`: the network that other
    layers have is there, too; it and the experts have norms of their own.
    """

    always: bool = True
    normalise: bool = True
    own_width: bool = True
    shared: Literal["none", "gated", "optional", "width"] = "none"
    gating: str = "softmax"
    activation: str = "silu_mul"
    selection_bias: Literal["none", "always", "optional"] = "none"
    beside_network: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture in place of a feed-forward network: `used` of `count` networks of width `ffn`, chosen for each row.

    `shared` is the width of a network that all rows pass through; 0 where there is none. `scale`: the factors of the
    chosen experts are multiplied by it.
    """

    count: int
    used: int
    ffn: int
    shared: int
    scale: float
    mixture: Mixture


class Sections(NamedTuple):
    """How many pairs of a head are rotated by each axis of a position: the axes one after the other, or in turns."""

    temporal: int
    vertical: int
    horizontal: int
    grouped: bool


@dataclass(frozen=True)
class ImageRows:
    """What a model that reads images does with their rows.

    levels: features of a row; those after the first are added after the first layers. sees_itself: rows of an image see
    all of it. axes: positions in an image are rotated by their row and column. in_windows: they see it in layers with a
    window alone. input_token: where layers have inputs of their own, rows of images have those of this token.
    """

    levels: int
    sees_itself: bool
    axes: bool
    in_windows: bool = False
    input_token: int | None = None


@dataclass(frozen=True)
class Config:
    """The numbers of one checkpoint, and the formats of its tensors as they will lie on the device."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # these three: the largest, where layers differ
    head_width: int
    ffn: int
    vocabulary: int
    context: int
    eps: float
    rope: Rope
    formats: Mapping[str, str] = field(repr=False)
    shapes: Shapes = field(repr=False)
    local_rope: Rope | None = None  # of layers whose table is LOCAL_ROPE
    per_layer: tuple[Layer, ...] = ()  # one for each layer, unless all are as `Layer()` is
    factors: Factors = Factors()
    experts: Experts | None = None
    ffn_input: FfnInput = "sum"
    activation: str = ""  # an op, where it is not that of the architecture
    layer_input: int = 0  # width of the embeddings that each layer has of its own
    predictors: int = 0  # layers of the file that predict further tokens, and are left aside
    conv_kernel: int = 0  # tokens that a short convolution sees, where layers have one
    delta: DeltaRule | None = None
    scan: Scan | None = None
    sections: Sections | None = None  # of rope, where positions of images have several axes
    images: ImageRows | None = None  # where the part that reads images is there, too

    @property
    def recurrent(self) -> bool:
        """Has a layer a state beside keys and values? Then a sequence cannot be cut back without running it again."""
        return any(mixer != "attention" for layer in self.per_layer for mixer in layer.mixers)

    @property
    def ropes(self) -> dict[str, Rope]:
        """By the name of the table."""
        tables = {ROPE: self.rope, LOCAL_ROPE: self.local_rope}
        return {name: rope for name, rope in tables.items() if rope is not None and rope.rotary}

    def layer(self, index: int) -> Layer:
        """What a layer does differently. A window that no sequence fills is none."""
        layer = self.per_layer[index] if self.per_layer else Layer()
        return layer if layer.window < self.context else replace(layer, window=0)

    def of_layer(self, index: int) -> Config:
        """The config with the sizes of a layer."""
        layer = self.layer(index)
        if not (layer.head_width or layer.kv_heads or layer.ffn):
            return self
        return replace(
            self,
            head_width=layer.head_width or self.head_width,
            kv_heads=layer.kv_heads or self.kv_heads,
            ffn=layer.ffn or self.ffn,
        )

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Values of the keys of a position, in every layer that has some of its own."""
        owners = (i for i in range(self.layers) if self.layer(i).attends and self.layer(i).kv_layer is None)
        return tuple(each.kv_heads * each.head_width for each in map(self.of_layer, owners))

    @property
    def kv_width(self) -> int:
        """The largest of these."""
        return max(self.kv_widths, default=self.kv_heads * self.head_width)

    def experts_of(self, index: int) -> Experts | None:
        """The mixture of a layer; None where it has a network without experts."""
        layer = self.layer(index)
        return self.experts if layer.experts and layer.network else None


class StepSpec(NamedTuple):
    """What the graph of a step is built for: rows at once, how attention reads its keys, and the format of the cache.

    `context` is the class of the longest sequence (`graph.batch.CONTEXTS`). `paged`: a table says where the pages of a
    sequence lie; without it the pool holds one sequence, from its first row on. `decode`: every row is of a sequence of
    its own, so that none belongs to a run. `images`: there are rows of images, or positions that follow some.
    """

    tokens: int
    context: str = "single_pass"
    cache: str = "f32"
    paged: bool = False
    decode: bool = False
    images: bool = False


_LISTED = ("attention.head_count_kv", "feed_forward_length")  # files may have the number of all layers for each


class Metadata:
    """The keys of one architecture, without its name before them: checked as they are read, and kept track of.

    A key that is read is honoured; what becomes of the others is in `metadata_keys`.
    """

    def __init__(self, metadata: Mapping[str, Any], architecture: str, per_layer: Collection[str] = ()) -> None:
        """`per_layer`: keys that may list a number for each layer."""
        prefix = f"{architecture}."
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._architecture, self._per_layer = architecture, per_layer
        self._read: set[str] = set()

    def full(self, key: str) -> str:
        """The key as the file has it."""
        return f"{self._architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        """A value, of any type."""
        self._read.add(key)
        return self._values.get(key, default)

    def whole(self, key: str, default: int | None = None, maximum: int = 1 << 24) -> int:
        """A whole number from 1 to `maximum`; the largest, where there may be one for each layer."""
        value = self.get(key, default)
        if key in self._per_layer and isinstance(value, list) and value:
            return max(self.each(key, len(value), maximum))
        if key in _LISTED and isinstance(value, list):
            numbers = self.each(key, self.whole("block_count", maximum=1024), maximum)
            if len(set(numbers)) > 1:
                raise self.wrong(key, "the same for all layers", value)
            return numbers[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise self.wrong(key, f"a whole number from 1 to {maximum:,}", value)
        return value

    def each(self, key: str, layers: int, maximum: int = 1 << 24) -> tuple[int, ...]:
        """A whole number for each layer, from a list or from one for all."""
        value = self.get(key)
        listed = value if isinstance(value, list) else [value] * layers
        if len(listed) != layers or not all(type(number) is int and 1 <= number <= maximum for number in listed):
            raise self.wrong(key, f"a whole number from 1 to {maximum:,}, or {layers} of them", value)
        return tuple(listed)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a number above 0", value)
        return float(value)

    def fraction(self, key: str, default: float) -> float:
        """A number from 0 to 1. Files write −1 for "not set"."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 <= value <= 1 or value == -1):
            raise self.wrong(key, "a number from 0 to 1", value)
        return default if value == -1 else float(value)

    def wrong(self, key: str, expected: str, value: Any) -> ModelError:
        """A value that cannot be."""
        shown = "nothing" if value is None else repr(value)[:60]
        return ModelError(f"{self.full(key)} must be {expected}, the file has {shown}")

    def unread(self) -> dict[str, Any]:
        """What nobody asked for, by key."""
        return {key: value for key, value in self._values.items() if key not in self._read}


def expect(shapes: Shapes, name: str, shape: tuple[int, ...]) -> None:
    """A tensor that must be there, in this shape."""
    if name not in shapes:
        raise ModelError(f"the checkpoint has no tensor {name!r}: it is incomplete, or not a language model")
    if without_ones(shapes[name]) != without_ones(shape):
        raise ModelError(f"tensor {name!r} must be {list(shape)} by the metadata, it is {list(shapes[name])}")
