"""A tower as its file says it: sizes and processor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ModelError
from ...graph.graph import Graph
from ...graph.vision import FILTERS
from ...vision.processors import Processor
from ..config import Shapes, expect
from .families import FAMILIES, Family
from .graph import tower_graph
from .keys import PREFIX, Keys
from .parts import ACTIVATIONS
from .sizes import Sizes

_MAX_TOKENS = 16384  # of a picture, where a file has no bound


@dataclass(frozen=True)
class Tower(Sizes):
    """One tower, and what it does with the size of a picture."""

    processor: Processor

    def build(self, patches: int) -> Graph:
        """patches [n, 3 · patch²] → features [n / merge², out], and features.1 … after earlier layers."""
        return tower_graph(self, patches)[0]

    @property
    def weight_bytes(self) -> int:
        """Of all tensors, as they lie on a device."""
        sizes = {name: math.prod(shape) for name, shape in self.padded().items()}
        halves = {name for name, shape in self.padded().items() if len(shape) > 1 and self.formats.get(name) == "f16"}
        return sum((2 if name in halves else 4) * size for name, size in sizes.items())

    def wanted(self) -> Shapes:
        """The tensors that a file must have."""
        return tower_graph(self, self.merge**2)[1].wanted

    def padded(self) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors as the graph reads them: matrices of whole blocks, zeros where the file has none."""
        return tower_graph(self, self.merge**2)[1].padded


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
    tower = described_tower(metadata, shapes, formats, image_tokens)
    wanted = tower.wanted()
    for name, shape in wanted.items():
        expect(shapes, name, shape)
    if unread := [name for name in shapes if name not in wanted]:
        raise ModelError(f"the tower has {len(unread)} tensors that are not read, such as {unread[0]}")
    return tower


def described_tower(
    metadata: Mapping[str, Any],
    shapes: Shapes,
    formats: Mapping[str, str],
    image_tokens: tuple[int, int] | None = None,
) -> Tower:
    """The tower that metadata describe, whether its tensors are there or not."""
    name = projector(metadata)
    family = FAMILIES["mlp without class" if name == "mlp" and "v.class_embd" not in shapes else name]
    keys = Keys(metadata)
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    patch, image = keys.whole("patch_size", maximum=256), keys.whole("image_size", maximum=1 << 14)
    if hidden % heads or (hidden // heads) % 4 or (family.positions and family.sizing != "budget" and image % patch):
        raise ModelError(f"{PREFIX}: {hidden} values for {heads} heads, or images of {image} for patches of {patch}")
    layers = keys.whole("block_count", maximum=1024)
    side_key = "spatial_merge_size" if family.sizing in ("area", "longest") else "projector.scale_factor"
    merge = keys.whole(side_key, family.merge or None, maximum=16)
    if (taken := keys.get("feature_layer", [layers])) != [layers]:
        raise keys.wrong("feature_layer", f"the last of {layers} layers", taken)
    flags = keys.get("is_deepstack_layers") or [False] * layers
    if not isinstance(flags, list) or len(flags) != layers:
        raise keys.wrong("is_deepstack_layers", f"{layers} times true or false", flags)
    window = keys.whole("window_size", family.window) // patch // merge if family.window else 0
    if family.window and not window:
        raise keys.wrong("window_size", f"at least {patch * merge}", keys.get("window_size"))
    table = shapes.get("v.position_embd.weight", ())
    positions = table[1] if len(table) == 3 else 0
    processor = _processor(family, keys, patch, merge, image, window, image_tokens)
    if family.sizing == "budget":  # a side may have all tokens, and has no more patches than positions
        if positions < merge:
            raise ModelError(f"v.position_embd.weight has {positions} positions, for tokens of {merge} patches")
        processor = replace(
            processor, most_pixels=min(processor.most_pixels, positions // merge * (patch * merge) ** 2)
        )
    tower = Tower(
        family=family,
        hidden=hidden,
        heads=heads,
        ffn=keys.whole("feed_forward_length"),
        layers=layers,
        patch=patch,
        merge=merge,
        side=image // patch,
        positions=positions,
        eps=(eps := keys.number("attention.layer_norm_epsilon")),
        merger_eps=keys.number("projector.layer_norm_epsilon", eps),
        theta=keys.number("rope.freq_base", family.theta),
        activation=_activation(family, keys),
        out=shapes["mm.2.weight"][0]
        if family.merger == "mlp" and "mm.2.weight" in shapes
        else keys.whole("projection_dim"),
        deepstack=tuple(i for i, flag in enumerate(flags) if flag),
        window=window,
        full=_full_layers(keys, layers) if window else (),
        text_sees_images=keys.get("text_sees_images"),
        input_token=_input_token(keys),
        processor=processor,
        formats=formats,
        shapes=shapes,
    )
    if not family.rope and (image // patch) % merge:
        raise ModelError(f"{PREFIX}image_size is {image}: not a multiple of {merge} patches of {patch}")
    return tower


def _activation(family: Family, keys: Keys) -> str:
    """Files of GGUF have switches for two of them."""
    switches = [name for name in ("silu", "gelu") if keys.switch(f"use_{name}")]
    name = keys.get("hidden_act", switches[0] if len(switches) == 1 and family.switched else family.activation)
    if name not in ACTIVATIONS:
        raise keys.wrong("hidden_act", " or ".join(ACTIVATIONS), name)
    return str(name)


def _input_token(keys: Keys) -> int:
    token = keys.get("layer_input_token", 0)
    if type(token) is not int or token < 0:
        raise keys.wrong("layer_input_token", "a whole number of at least 0", token)
    return token


def _full_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """Those that a folder names, or every so many that a GGUF file says."""
    named = keys.get("fullatt_block_indexes")
    if named is None:
        period = keys.whole("n_wa_pattern")
        return tuple(range(period - 1, layers, period))
    if not isinstance(named, list) or not all(type(i) is int and 0 <= i < layers for i in named):
        raise keys.wrong("fullatt_block_indexes", f"numbers of layers, from 0 to {layers - 1}", named)
    return tuple(named)


def _processor(
    family: Family, keys: Keys, patch: int, merge: int, image: int, window: int, image_tokens: tuple[int, int] | None
) -> Processor:
    unit = (patch * merge) ** 2
    least, most = (
        keys.whole("image_min_pixels", family.least_tokens * unit, 1 << 30),
        keys.whole("image_max_pixels", family.most_tokens * unit, 1 << 30),
    )
    if image_tokens is not None and family.sizing in ("area", "budget"):
        least, most = (number * unit for number in image_tokens)
    kind = keys.get("resample", family.filter)
    if kind not in tuple(FILTERS):  # a list in a file has no hash
        raise keys.wrong("resample", " or ".join(FILTERS), kind)
    mean, std = keys.three("image_mean"), keys.three("image_std")
    if family.centred:
        mean = mean[0] + std[0] / 2, mean[1] + std[1] / 2, mean[2] + std[2] / 2
        std = std[0] / 2, std[1] / 2, std[2] / 2
    return Processor(
        sizing=family.sizing,
        patch=patch,
        merge=merge,
        filter=kind,
        mean=mean,
        std=std,
        side=image,
        # Angles are known as far as the largest picture goes that the tower has seen.
        longest=keys.whole("preproc_image_size", image, image if family.sizing == "longest" else 1 << 14),
        least_pixels=least,
        most_pixels=min(most, _MAX_TOKENS * unit),
        placeholder=family.placeholder,
        token=family.token,
        texts=family.texts,
        window=window,
    )
