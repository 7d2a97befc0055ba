"""Towers: what makes features of patches of pictures. Metadata of an mmproj file → sizes → graph, and its processor.

One tower serves all pictures: patches of several tiles and pictures are its rows, in any number. `spans` says which of
them attend to each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..graph import vision
from ..graph.graph import Builder, Graph, TensorSlice
from ..vision.processors import Layout, Processor
from .config import Shapes, expect

PREFIX = "clip.vision."
_BLOCK = 32
_MAX_TOKENS = 16384  # of a picture, where a file has no bound


@dataclass(frozen=True)
class Family:
    """What is true of all towers with this `clip.projector_type`.

    activation: an op, of the feed-forward networks. positions: rows of a table by the place of a patch, or rows between
    which one interpolates. merger: what follows the last layer.
    """

    sizing: Any
    filter: Any
    placeholder: str
    token: str
    merger: str
    interpolated: bool = False
    rope: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    several_axes: bool = False  # the text rotates positions on three axes
    sees_itself: bool = False  # rows of an image in the text see all of it
    merge: int = 0  # patches on a side of a token, where files may not say


FAMILIES: Mapping[str, Family] = {
    "qwen3vl_merger": Family(
        "area",
        "bicubic",
        "<|image_pad|>",
        "<|image_pad|>",
        "norm_mlp",
        interpolated=True,
        rope=True,
        several_axes=True,
        merge=2,
    ),
    "gemma3": Family(
        "square",
        "bilinear",
        "<start_of_image>",
        "<image_soft_token>",
        "mean_norm_linear",
        texts={"begin": "\n\n<start_of_image>", "end": "<end_of_image>\n\n"},
        sees_itself=True,
        merge=4,
    ),
    "idefics3": Family(
        "tiles",
        "lanczos",
        "<image>",
        "<image>",
        "linear",
        texts={"around": "<fake_token_around_image>", "whole": "<global-img>"},
    ),
}


@dataclass(frozen=True)
class Tower:
    """The numbers of one tower, and the formats of its tensors as they will lie on the device."""

    family: Family
    hidden: int
    heads: int
    ffn: int
    layers: int
    patch: int
    merge: int
    side: int  # of the table of positions, in patches
    eps: float
    out: int  # width of the text model
    deepstack: tuple[int, ...]  # layers after which features are taken, too
    processor: Processor
    formats: Mapping[str, str] = field(repr=False)
    shapes: Shapes = field(repr=False)

    @property
    def levels(self) -> int:
        """Features of a token: those after the last layer, and those of earlier ones."""
        return 1 + len(self.deepstack)

    @property
    def head(self) -> int:
        """Values of a head."""
        return self.hidden // self.heads

    def build(self, patches: int) -> Graph:
        """patches [n, 3 · patch²] → features [n / merge², out], and features.1 … after earlier layers."""
        return _Build(self, patches).graph()

    @property
    def patch_width(self) -> int:
        """Values of a patch, with zeros up to whole blocks."""
        return _whole_blocks(3 * self.patch**2)

    @property
    def weight_bytes(self) -> int:
        """Of all tensors, as they lie on a device."""
        sizes = {name: math.prod(shape) for name, shape in self.padded().items()}
        halves = {name for name, shape in self.padded().items() if len(shape) > 1 and self.formats.get(name) == "f16"}
        return sum((2 if name in halves else 4) * size for name, size in sizes.items())

    def padded(self) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors as the graph reads them: matrices of whole blocks, zeros where the file has none."""
        build = _Build(self, self.merge**2)
        build.graph()
        return build.padded


def _whole_blocks(columns: int) -> int:
    """Kernels read matrices in blocks of so many columns."""
    return -(-columns // _BLOCK) * _BLOCK


class _Keys:
    """The keys of an mmproj file, checked as they are read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._values = metadata

    def whole(self, key: str, default: int | None = None, maximum: int = 1 << 20) -> int:
        value = self._values.get(f"{PREFIX}{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise self.wrong(key, f"a whole number from 1 to {maximum:,}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(f"{PREFIX}{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise self.wrong(key, "a number above 0", value)
        return float(value)

    def three(self, key: str) -> tuple[float, float, float]:
        value = self._values.get(f"{PREFIX}{key}")
        if (
            not isinstance(value, (list, tuple))
            or len(value) != 3
            or not all(isinstance(v, (int, float)) for v in value)
        ):
            raise self.wrong(key, "three numbers", value)
        if key.endswith("std") and not all(v > 0 for v in value):
            raise self.wrong(key, "three numbers above 0", value)
        return float(value[0]), float(value[1]), float(value[2])

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(f"{PREFIX}{key}", default)

    def wrong(self, key: str, expected: str, value: Any) -> ModelError:
        shown = "nothing" if value is None else repr(value)[:60]
        return ModelError(f"{PREFIX}{key} must be {expected}, the file has {shown}")


def projector(metadata: Mapping[str, Any]) -> str:
    """The name of a tower's family."""
    name = metadata.get("clip.projector_type") or metadata.get(f"{PREFIX}projector_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"clip.projector_type is {name!r:.60}; towers of {', '.join(FAMILIES)} are supported")
    return name


def read_tower(
    metadata: Mapping[str, Any],
    shapes: Shapes,
    formats: Mapping[str, str],
    image_tokens: tuple[int, int] | None = None,
) -> Tower:
    """The tower of a file. image_tokens: the least and the most of a picture, where its size decides."""
    family = FAMILIES[projector(metadata)]
    keys = _Keys(metadata)
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    patch, image = keys.whole("patch_size", maximum=256), keys.whole("image_size", maximum=1 << 14)
    if hidden % heads or (hidden // heads) % 4 or image % patch:
        raise ModelError(f"{PREFIX}: {hidden} values for {heads} heads, or images of {image} for patches of {patch}")
    layers = keys.whole("block_count", maximum=1024)
    merge = keys.whole("projector.scale_factor", family.merge or None, maximum=16)
    if family.sizing == "area":
        merge = keys.whole("spatial_merge_size", family.merge or None, maximum=16)
    flags = keys.get("is_deepstack_layers") or [False] * layers
    if not isinstance(flags, list) or len(flags) != layers:
        raise keys.wrong("is_deepstack_layers", f"{layers} times true or false", flags)
    processor = _processor(family, keys, patch, merge, image, image_tokens)
    tower = Tower(
        family=family,
        hidden=hidden,
        heads=heads,
        ffn=keys.whole("feed_forward_length"),
        layers=layers,
        patch=patch,
        merge=merge,
        side=image // patch,
        eps=keys.number("attention.layer_norm_epsilon"),
        out=keys.whole("projection_dim"),
        deepstack=tuple(i for i, flag in enumerate(flags) if flag),
        processor=processor,
        formats=formats,
        shapes=shapes,
    )
    if family.sizing != "area" and (image // patch) % merge:
        raise ModelError(f"{PREFIX}image_size is {image}: not a multiple of {merge} patches of {patch}")
    wanted = _Build(tower, merge * merge).wanted()
    for name, shape in wanted.items():
        expect(shapes, name, shape)
    if unread := [name for name in shapes if name not in wanted]:
        raise ModelError(f"the tower has {len(unread)} tensors that are not read, such as {unread[0]}")
    return tower


def _processor(
    family: Family, keys: _Keys, patch: int, merge: int, image: int, image_tokens: tuple[int, int] | None
) -> Processor:
    unit = (patch * merge) ** 2
    least, most = (
        keys.whole("image_min_pixels", 64 * unit, 1 << 30),
        keys.whole("image_max_pixels", 16384 * unit, 1 << 30),
    )
    if image_tokens is not None and family.sizing == "area":
        least, most = (number * unit for number in image_tokens)
    kind = keys.get("resample", family.filter)
    return Processor(
        sizing=family.sizing,
        patch=patch,
        merge=merge,
        filter=kind,
        mean=keys.three("image_mean"),
        std=keys.three("image_std"),
        side=image,
        longest=keys.whole("preproc_image_size", image, 1 << 14),
        least_pixels=least,
        most_pixels=min(most, _MAX_TOKENS * unit),
        placeholder=family.placeholder,
        token=family.token,
        texts=family.texts,
    )


class _Build:
    """Makes the graph of a tower for so many patches."""

    def __init__(self, tower: Tower, patches: int) -> None:
        self.tower, self.patches, self.b = tower, patches, Builder()
        self._wanted: dict[str, tuple[int, ...]] = {}
        self.padded: dict[str, tuple[int, ...]] = {}

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """The tensors that there must be."""
        self.graph()
        return self._wanted

    def graph(self) -> Graph:
        """From patches to features."""
        tower, b, n = self.tower, self.b, self.patches
        x = b.tensor("patches", n, tower.patch_width, role="input")
        b.tensor("spans", n, 2, role="input", format="u32")
        if tower.family.rope:
            b.tensor("turns", n, tower.head // 2, 2, role="input")
        x = self._linear("v.patch_embd", x, 3 * tower.patch**2, tower.hidden)
        x = self._sum("v.placed", x, self._positions())
        outputs: list[str] = []
        for i in range(tower.layers):
            x = self._layer(f"v.blk.{i}", x)
            if i in tower.deepstack:
                outputs.append(self._norm_mlp(f"v.deepstack.{i}", ("fc1", "fc2"), "norm", x, len(outputs) + 1))
        return b.graph(getattr(self, f"_merged_{tower.family.merger}")(x), *outputs)

    def _stored(self, name: str, shape: tuple[int, ...], padded: tuple[int, ...] | None = None) -> str:
        """A tensor of the file, and its shape here where that is another."""
        self._wanted[name], self.padded[name] = shape, padded or shape
        return self.b.tensor(name, *self.padded[name], role="weight", format=self._format(name, shape))

    def _format(self, name: str, shape: tuple[int, ...]) -> str:
        return self.tower.formats.get(name, "f32") if len(shape) > 1 else "f32"

    def _wide(self, x: str, rows: int, k: int) -> str:
        """Rows of whole blocks."""
        wide, out = _whole_blocks(k), f"{x}.wide"
        if wide == k or self.b.tensors[x].shape[-1] == wide:
            return x
        if out not in self.b.tensors:
            self.b.tensor(out, rows, wide)
            self.b.add("pad_columns", {"tokens": rows, "width": k, "to": wide}, {"x": x}, _layer(x), out=out)
        return out

    def _linear(
        self, name: str, x: str, k: int, n: int, out: str = "", *, bias: bool = True, wide: bool = False
    ) -> str:
        """[rows, n], as many rows as x has values for; `wide`: with zeros up to whole blocks."""
        rows = self.b.tensors[x].size // (self.b.tensors[x].shape[-1] if self._is_wide(x, k) else k)
        padded = _whole_blocks(n) if wide else n
        weight = self._stored(f"{name}.weight", (n, k), (padded, _whole_blocks(k)))
        offset = self._stored(f"{name}.bias", (n,), (padded,)) if bias else None
        x, out = self._wide(x, rows, k), self.b.tensor(out or name, rows, padded)
        dims: dict[str, Any] = {"tokens": rows, "K": _whole_blocks(k), "N": padded, "bias": bias}
        dims["format"] = self.b.tensors[weight].format
        self.b.add("linear", dims, {"x": x, "weight": weight, "bias": offset}, _layer(name), out=out)
        return out

    def _is_wide(self, x: str, k: int) -> bool:
        return self.b.tensors[x].shape[-1] == _whole_blocks(k)

    def _part(self, name: str, index: int, x: str) -> str:
        """Queries, keys or values: a third of the rows of a matrix, or one of its own."""
        tower, n = self.tower, self.patches
        packed, own = f"{name}.attn_qkv", f"{name}.attn_{'qkv'[index]}"
        width, wide = tower.hidden, _whole_blocks(tower.hidden)
        if f"{packed}.weight" not in tower.shapes:
            return self._linear(own, x, width, width)
        shapes = {f"{packed}.weight": (3 * width, width), f"{packed}.bias": (3 * width,)}
        self._wanted |= shapes
        self.padded |= {**shapes, f"{packed}.weight": (3 * width, wide)}
        kind = self._format(f"{packed}.weight", (3 * width, width))
        weight, bias = (TensorSlice(f"{packed}.{suffix}", width, index * width) for suffix in ("weight", "bias"))
        self.b.view(f"{own}.weight", width, wide, of=[weight], format=kind)
        self.b.view(f"{own}.bias", width, of=[bias], format="f32")
        x, out = self._wide(x, n, width), self.b.tensor(own, n, width)
        dims = {"tokens": n, "K": wide, "N": width, "format": kind, "bias": True}
        self.b.add("linear", dims, {"x": x, "weight": f"{own}.weight", "bias": f"{own}.bias"}, name, out=out)
        return out

    def _norm(self, name: str, x: str, rows: int, width: int) -> str:
        out = self.b.tensor(name, rows, width)
        weight, bias = self._stored(f"{name}.weight", (width,)), self._stored(f"{name}.bias", (width,))
        dims = {"tokens": rows, "width": width, "eps": self.tower.eps, "bias": True}
        self.b.add("layer_norm", dims, {"x": x, "weight": weight, "bias": bias}, _layer(name), out=out)
        return out

    def _sum(self, out: str, a: str, b: str) -> str:
        self.b.tensor(out, self.patches, self.tower.hidden)
        self.b.add("add", {"count": self.patches * self.tower.hidden}, {"a": a, "b": b}, _layer(out), out=out)
        return out

    def _positions(self) -> str:
        """Of every patch, a sum of rows of a table."""
        tower, n = self.tower, self.patches
        taps = 4 if tower.family.interpolated else 1
        name = "v.position_embd.weight"
        shape = tower.side**2, tower.hidden
        table = self._stored(name, shape, (shape[0] * shape[1],))  # not a matrix that is multiplied: numbers in f32
        inputs = {
            "weight": table,
            "rows": self.b.tensor("places", n, taps, role="input", format="u32"),
            "factors": self.b.tensor("place_factors", n, taps, role="input"),
        }
        dims = {"tokens": n, "N": tower.side**2, "K": tower.hidden, "taps": taps}
        out = self.b.tensor("v.positions", n, tower.hidden)
        self.b.add("weighted_rows", dims, inputs, "v", out=out)
        return out

    def _layer(self, name: str, x: str) -> str:
        tower, n = self.tower, self.patches
        read = self._norm(f"{name}.ln1", x, n, tower.hidden)
        q, k, v = (self._part(name, i, read) for i in range(3))
        if tower.family.rope:
            q, k = self._rotated(name, q), self._rotated(name, k)
        out = self.b.tensor(f"{name}.attended", n, tower.hidden)
        dims = {"tokens": n, "H": tower.heads, "D": tower.head, "scale": 1 / math.sqrt(tower.head)}
        self.b.add("attend_spans", dims, {"q": q, "k": k, "v": v, "spans": "spans"}, name, out=out)
        x = self._sum(f"{name}.attn_sum", x, self._linear(f"{name}.attn_out", out, tower.hidden, tower.hidden))
        read = self._norm(f"{name}.ln2", x, n, tower.hidden)
        y = self._activated("gelu", self._linear(f"{name}.ffn_up", read, tower.hidden, tower.ffn, wide=True))
        return self._sum(f"{name}.ffn_sum", x, self._linear(f"{name}.ffn_down", y, tower.ffn, tower.hidden))

    def _rotated(self, layer: str, x: str) -> str:
        tower, n = self.tower, self.patches
        out = self.b.tensor(f"{x}.rotated", n, tower.hidden)
        dims = {"tokens": n, "H": tower.heads, "D": tower.head}
        self.b.add("rope_by_row", dims, {"x": x, "table": "turns"}, layer, out=out)
        return out

    def _activated(self, op: str, x: str) -> str:
        tensor = self.b.tensors[x]
        out = self.b.tensor(f"{x}.{op}", *tensor.shape)
        self.b.add(op, {"count": tensor.size}, {"x": x}, _layer(x), out=out)
        return out

    # What follows the last layer -------------------------------------------------------------------------

    def _merged_norm_mlp(self, x: str) -> str:
        return self._norm_mlp("v", ("mm.0", "mm.2"), "post_ln", x, 0)

    def _norm_mlp(self, name: str, layers: tuple[str, str], norm: str, x: str, level: int) -> str:
        """Neighbouring patches side by side through two matrices, normalised before that: each patch, or all."""
        tower, merged = self.tower, self.tower.merge**2
        rows, width = self.patches // merged, tower.hidden * merged
        first, second = (f"{name}.{each}" if level else each for each in layers)
        read = (
            self._norm(f"{name}.{norm}", x, rows, width)
            if level
            else self._norm("v.post_ln", x, self.patches, tower.hidden)
        )
        y = self._activated("gelu_erf", self._linear(first, read, width, width))
        return self._linear(second, y, width, tower.out, f"features.{level}" if level else "features")

    def _merged_linear(self, x: str) -> str:
        """Neighbouring patches side by side through one matrix."""
        tower, merged = self.tower, self.tower.merge**2
        read = self._norm("v.post_ln", x, self.patches, tower.hidden)
        width = tower.hidden * merged
        return self._linear("mm.model.fc", read, width, tower.out, "features", bias=False)

    def _merged_mean_norm_linear(self, x: str) -> str:
        """The mean of neighbouring patches, normalised, through one matrix."""
        tower, rows = self.tower, self.patches // self.tower.merge**2
        read = self._norm("v.post_ln", x, self.patches, tower.hidden)
        pooled = self.b.tensor("v.pooled", rows, tower.hidden)
        dims = {"tokens": rows, "group": tower.merge**2, "width": tower.hidden}
        self.b.add("mean_rows", dims, {"x": read}, "v", out=pooled)
        plain = self.b.tensor("v.plain", rows, tower.hidden)
        sizes = {"tokens": rows, "width": tower.hidden, "eps": tower.eps}
        self.b.add("rms_norm", sizes, {"x": pooled}, "v", out=plain)
        normed = self.b.tensor("v.normed", rows, tower.hidden)
        weight = self._stored("mm.soft_emb_norm.weight", (tower.hidden,))
        counts = {"count": rows * tower.hidden, "period": tower.hidden}
        self.b.add("mul", counts, {"a": plain, "b": weight}, "v", out=normed)
        return self._linear("mm.input_projection", normed, tower.hidden, tower.out, "features", bias=False)


def _layer(name: str) -> str:
    """For people: a layer, or the tower."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["v", "blk"] else parts[0]


# Pixels to patches ---------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """One resizing along one axis: [outer, size, inner] → [outer, to, inner]."""

    name: str
    outer: int
    size: int
    inner: int
    to: int
    first: NDArray[np.uint32]
    weights: NDArray[np.float32]


def _axes(layout: Layout, stage: int, processor: Processor) -> Iterator[_Axis]:
    """Columns first, then rows, as far as the size changes."""
    rows, columns = layout.sizes[stage - 1] if stage else layout.source
    height, width = layout.sizes[stage]
    if columns != width:
        weights = vision.resize_weights(columns, width, processor.filter)
        yield _Axis(f"resized.{stage}.columns", rows, columns, 3, width, *weights)
    if rows != height:
        weights = vision.resize_weights(rows, height, processor.filter)
        yield _Axis(f"resized.{stage}.rows", 1, rows, 3 * width, height, *weights)


def patches_graph(layout: Layout, processor: Processor) -> Graph:
    """pixels [rows, columns, 3], 0 … 255 → patches [n, 3 · patch²] of a layout, shifted and scaled."""
    b = Builder()
    x = b.tensor("pixels", *layout.source, 3, role="input")
    b.tensor("corners", layout.patches, 2, role="input", format="u32")
    b.tensor("factors", 6, role="input")
    stages = []
    for i, size in enumerate(layout.sizes):
        for axis in _axes(layout, i, processor):
            out = b.tensor(f"{axis.name}.out", axis.outer, axis.to, axis.inner)
            first = b.tensor(f"{axis.name}.first", axis.to, role="input", format="u32")
            weights = b.tensor(f"{axis.name}.weights", axis.to, axis.weights.shape[1], role="input")
            dims = {"outer": axis.outer, "size": axis.size, "inner": axis.inner, "to": axis.to}
            dims["taps"] = axis.weights.shape[1]
            b.add("resize", dims, {"x": x, "first": first, "weights": weights}, "pixels", out=out)
            x = out
        stages.append((x, 3 * size[0] * size[1]))
    used = sorted({tile.stage for tile in layout.tiles})
    x, count = stages[used[0]]
    for stage in used[1:]:
        other, more = stages[stage]
        both = b.tensor(f"stages.{stage}", count + more)
        b.add("concat", {"a": count, "b": more}, {"a": x, "b": other}, "pixels", out=both)
        x, count = both, count + more
    width = _whole_blocks(3 * layout.patch**2)
    out = b.tensor("patches", layout.patches, width)
    dims = {"tokens": layout.patches, "patch": layout.patch, "count": count, "width": width}
    b.add("patches", dims, {"x": x, "corners": "corners", "factors": "factors"}, "pixels", out=out)
    return b.graph(out)


def patches_inputs(layout: Layout, processor: Processor) -> dict[str, NDArray[Any]]:
    """What the graph of a layout reads beside pixels: where patches begin, and what becomes of their values."""
    first, offsets = 0, {}
    for stage in sorted({tile.stage for tile in layout.tiles}):
        height, width = layout.sizes[stage]
        offsets[stage] = first, width
        first += 3 * height * width
    places, corners, at = layout.places(), [], 0
    for tile, count in zip(layout.tiles, layout.tile_patches, strict=True):
        begin, width = offsets[tile.stage]
        rows, columns = (places[at : at + count] * layout.patch + (tile.top, tile.left)).T
        corners.append(np.stack([begin + 3 * (rows * width + columns), np.full(count, 3 * width)], axis=1))
        at += count
    scale = [1 / (255 * std) for std in processor.std]
    shift = [-mean / std for mean, std in zip(processor.mean, processor.std, strict=True)]
    tables = [axis for i in range(len(layout.sizes)) for axis in _axes(layout, i, processor)]
    return {
        **{f"{axis.name}.first": axis.first for axis in tables},
        **{f"{axis.name}.weights": axis.weights for axis in tables},
        "corners": np.concatenate(corners).astype(np.uint32),
        "factors": np.array([*scale, *shift], np.float32),
    }


def tower_inputs(tower: Tower, layout: Layout) -> dict[str, NDArray[Any]]:
    """What the graph of a tower reads beside patches, for one picture: positions, and which patches see each other."""
    places = layout.places()
    inputs: dict[str, NDArray[Any]] = {}
    if tower.family.interpolated:
        rows, columns = (size * layout.merge for size in layout.grid)
        inputs["places"], inputs["place_factors"] = vision.interpolation(tower.side, rows, columns, places)
    else:
        inputs["places"] = (places[:, :1] * tower.side + places[:, 1:]).astype(np.uint32)
        inputs["place_factors"] = np.ones((len(places), 1), np.float32)
    if tower.family.rope:
        inputs["turns"] = vision.turns(places, tower.head, 10000.0)
    ends = np.cumsum(layout.tile_patches)
    spans = [np.tile((end - count, end), (count, 1)) for end, count in zip(ends, layout.tile_patches, strict=True)]
    inputs["spans"] = np.concatenate(spans).astype(np.uint32)
    return inputs
