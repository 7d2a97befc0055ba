"""What every architecture has in common: numbers from the metadata, checked, and the way to its file."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import ModelError
from ..graph.graph import Graph

# What GGUF calls them in every architecture. Without an output matrix, the embeddings serve as one.
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# Modules here that are no architectures.
_OTHERS = ("architecture", "dense", "shapes")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rope:
    """Rotary positions: pairs are (2i, 2i + 1) if interleaved, else (i, i + rotary / 2)."""

    rotary: int
    theta: float
    interleaved: bool
    linear_scale: float = 1.0  # positions are divided by this
    factors: str | None = None  # a tensor of the checkpoint that divides the frequencies


@dataclass(frozen=True)
class Config:
    """The numbers of one checkpoint, and the formats of its tensors as they will lie on the device."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocabulary: int
    context: int
    eps: float
    rope: Rope
    formats: Mapping[str, str] = field(repr=False)
    shapes: Shapes = field(repr=False)


class Step(NamedTuple):
    """What a graph is built for: rows at once, room in the cache and its format, logits of which rows (or none)."""

    rows: int
    capacity: int
    cache: str = "f32"
    logits: Literal["last", "all", "none"] = "last"


class Architecture(NamedTuple):
    """`read` makes a config of metadata, tensors' shapes and formats; `build` makes the graph of one step.

    `tensors` tells the shapes that a checkpoint with this metadata has, from those of its embeddings and of what it
    need not have.
    """

    read: Callable[[Mapping[str, Any], Shapes, Mapping[str, str]], Config]
    build: Callable[[Config, Step], Graph]
    tensors: Callable[[Mapping[str, Any], Shapes], Shapes]


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture that a checkpoint names."""
    name = metadata.get("general.architecture")
    here = str(Path(__file__).parent)
    known = sorted(module.name for module in pkgutil.iter_modules([here]) if module.name not in _OTHERS)
    if not isinstance(name, str) or name not in known:
        raise ModelError(f"this checkpoint's architecture is {name!r}; supported: {', '.join(known)}")
    module = importlib.import_module(f"{__package__}.{name}")
    return Architecture(module.read, module.build, module.tensors)


def whole(metadata: Mapping[str, Any], key: str, default: int | None = None, most: int = 1 << 24) -> int:
    """A whole number of the metadata, from 1 to `most`."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        given = "nothing" if value is None else repr(value)[:60]
        raise ModelError(f"{key} must be a whole number from 1 to {most:,}, the file has {given}")
    return value


def number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number of the metadata, above 0."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        given = "nothing" if value is None else repr(value)[:60]
        raise ModelError(f"{key} must be a number above 0, the file has {given}")
    return float(value)


def expect(shapes: Shapes, name: str, shape: tuple[int, ...]) -> None:
    """A tensor that must be there, in this shape."""
    if name not in shapes:
        raise ModelError(f"the checkpoint has no tensor {name!r}: it is incomplete, or no model for text")
    if shapes[name] != shape:
        raise ModelError(f"tensor {name!r} must be {list(shape)} by the metadata, it is {list(shapes[name])}")
