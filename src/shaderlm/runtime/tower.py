"""Runs a tower: the pixels of a picture → the features of its tokens. In NumPy; `gpu_tower` does it on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..graph import interpret
from ..models.vision import Tower, patches_graph, patches_inputs, tower_inputs
from ..vision.processors import Layout
from .image_rows import Features
from .weights import Progress, Source, dense

F32 = NDArray[np.float32]


class TowerSource:
    """The tensors of a tower, as the runtime asks for them."""

    repeats = False

    def __init__(self, file: Any, tower: Tower) -> None:
        """file: has `dense(name)`, all of a tensor."""
        self._file, self._shapes = file, tower.padded()

    def _padded(self, name: str) -> F32:
        array, shape = self._file.dense(name), self._shapes[name]
        if len(shape) < array.ndim:
            return np.asarray(array.reshape(shape), np.float32)
        more = [(0, wanted - size) for size, wanted in zip(array.shape, shape, strict=True)]
        return np.asarray(np.pad(array, more) if any(map(any, more)) else array, np.float32)

    def rows(self, name: str, kind: str, first: int, end: int) -> NDArray[Any]:
        """Rows of one tensor, in f32 or f16."""
        rows = self._padded(name)[first:end]
        return np.ascontiguousarray(rows, np.float16 if kind == "f16" else np.float32)

    def vector(self, name: str) -> NDArray[Any]:
        """A one-dimensional tensor in f32."""
        return self._padded(name)


class TowerRunner(Protocol):
    """A tower with its weights, where it runs."""

    tower: Tower
    weight_bytes: int

    def warm_up(self) -> None:
        """Compile what pictures may want, for servers. Takes seconds."""
        ...

    def encode(self, pixels: NDArray[np.uint8], layout: Layout) -> Features:
        """Features of a picture, [tokens, levels · out]. Those on a device may still be on their way."""
        ...

    def wait(self) -> None:
        """Until the features of all pictures are there."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


class NumpyTower:
    """Weights in f32, and the interpreter."""

    def __init__(self, tower: Tower, source: Source, progress: Progress | None = None) -> None:
        self.tower = tower
        self._weights = dense(tower.build(tower.merge**2).weights(), source, progress)
        self.weight_bytes = sum(array.nbytes for array in self._weights.values())

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def encode(self, pixels: NDArray[np.uint8], layout: Layout) -> F32:
        """Features of a picture, [tokens, levels · out]."""
        return self.features(self.patches(pixels, layout), layout)

    def patches(self, pixels: NDArray[np.uint8], layout: Layout) -> F32:
        """What the tower reads of a picture, [patches, 3 · patch²]."""
        inputs = patches_inputs(layout, self.tower.processor)
        graph = patches_graph(layout, self.tower.processor)
        out = interpret.run(graph, {"pixels": pixels, **inputs})["patches"]
        return np.asarray(out, np.float32)

    def features(self, patches: F32, layout: Layout) -> F32:
        """Of patches; those of several levels side by side."""
        graph = self.tower.build(layout.patches)
        values: dict[str, Any] = {**self._weights, **tower_inputs(self.tower, layout), "patches": patches}
        return joined(interpret.run(graph, values), self.tower)

    def wait(self) -> None:
        """They are."""

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = {}


def joined(outputs: Mapping[str, NDArray[Any]], tower: Tower) -> F32:
    """The outputs of a tower's graph side by side."""
    return np.ascontiguousarray(np.concatenate([outputs[name] for name in output_names(tower)], axis=1), np.float32)


def output_names(tower: Tower) -> list[str]:
    """Of its graph, in the order of levels."""
    return ["features", *(f"features.{level}" for level in range(1, tower.levels))]
