"""A model on the CPU with weights as they are stored: products, norms and activations in sessions of onnxruntime.

Between two sessions lie the nodes that keep or read state: keys and values go to the same pages as in NumPy, and
attention reads them there. What neither can be a node of ONNX nor has code here runs as the NumPy interpreter does it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...graph.graph import Graph, Node, Tensor
from ...models.architecture import Architecture
from ...models.config import Config
from ..numpy_runner import NumpyRunner
from ..runner import F32
from ..weights import Progress, Source, dense
from .attention import BatchAttention, pool_shape
from .ops import POSITIONS, Translation
from .parts import AttentionPart, EmbeddingPart, NumpyPart, Part, SessionPart, Step, WritePart, run_parts
from .products import F32_INPUTS, FEW_ROWS, pack_product
from .segments import Stretch, translations
from .sessions import Session, cores, release_freed_memory
from .sizes import numpy_weights, weight_bytes

_FORKED = "this process is a fork of the one that loaded this model, without its threads: start processes by spawn"


class PackedRunner(NumpyRunner):
    """The pages, graphs and sampling of the NumPy runner, with other code for layers and heads."""

    def __init__(
        self, architecture: Architecture, config: Config, source: Source, *, precision: str = "fast", **options: Any
    ) -> None:
        self.precision, self._process = precision, os.getpid()
        super().__init__(architecture, config, source, **options)

    def _load_weights(self, body: Graph, head: Graph, source: Source, progress: Progress | None) -> dict[str, F32]:
        layers, head_parts = translations(body, self.precision), translations(head, self.precision)
        stretches = [*layers, *head_parts]
        self.bytes = weight_bytes(stretches)
        done = _LoadProgress(progress, self.bytes.total)
        with ThreadPoolExecutor(cores(), "weights") as pool:
            loading = [pool.submit(self._parts_of, *each, source, done) for each in stretches]
            parts = [future.result() for future in loading]
        done.end()
        self._layers = [part for each in parts[: len(layers)] for part in each]
        self._head_parts = [part for each in parts[len(layers) :] for part in each]
        weights = {each.name: each for each in numpy_weights(stretches)}
        norm = {each.name: each for each in self.head_of(1, 1, logits=False).weights()}  # of final states
        loaded = dense([replace(each, format="f32") for each in {**weights, **norm}.values()], source)
        release_freed_memory()
        return loaded

    def _parts_of(
        self, stretch: Stretch, translation: Translation | None, source: Source, done: _LoadProgress
    ) -> list[Part]:
        """What runs the nodes of a stretch."""
        if translation is not None:
            return [session_part(stretch, translation, source, done.add)]
        return [self._part_of(node, i, source) for i, node in enumerate(stretch.nodes, stretch.first)]

    def _part_of(self, node: Node, i: int, source: Source) -> Part:
        match node.op:
            case "embedding":
                return EmbeddingPart(node, source, self.graph_of(1).tensors[node.inputs["weight"]])
            case "kv_write":
                return WritePart(node)
            case "attention":
                return AttentionPart(node)
        return NumpyPart(i)

    def _pool_shape(self, tensor: Tensor, pages: int) -> tuple[int, ...]:
        return pool_shape(tensor.name, pages, *tensor.shape[1:])

    def _copy_page(self, pool: NDArray[Any], source: int, target: int) -> None:
        pool[target] = pool[source]

    def _run_layers(self, values: dict[str, Any], rows: int) -> F32:
        self.check_device()
        attention = BatchAttention(values["batch"], values["page_table"])
        known = {**values, **self._rope_rows(values)}
        hidden: F32 = run_parts(self._layers, known, Step(lambda: self.graph_of(rows), attention))["hidden"]
        return hidden

    def _run_head(self, values: dict[str, Any], outputs: NDArray[Any], name: str) -> F32:
        if name != "logits":
            return super()._run_head(values, outputs, name)
        hidden = values["hidden"]
        known = {"hidden": hidden if len(hidden) == 1 else hidden[outputs["row"]]}
        logits: F32 = run_parts(self._head_parts, known, Step(lambda: self.head_of(len(outputs), 1)))["logits"]
        return logits

    def _rope_rows(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Of every rope table the rows of this step."""
        positions = values["batch"][1:, 1]
        rows: dict[str, Any] = {POSITIONS: np.arange(len(positions), dtype=np.int64)[None]}
        for name in self.config.ropes:
            cos_sin = values[name][positions]
            rows[f"{name}.cos"] = np.ascontiguousarray(cos_sin[..., 0])
            rows[f"{name}.sin"] = np.ascontiguousarray(cos_sin[..., 1])
        return rows

    @property
    def forked(self) -> bool:
        """Is this another process than the one that made the sessions? It has none of their threads."""
        return self._process != os.getpid()

    def check_device(self) -> None:
        """A model of another process is a DeviceError."""
        if self.forked:
            raise DeviceError(_FORKED)

    def close(self) -> None:
        """Let go of weights and cache."""
        super().close()
        self._layers, self._head_parts = [], []

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        return {
            "device": "cpu (onnxruntime)",
            "weight_bytes": self.bytes.total,
            "dense_bytes": self.bytes.dense,
            "cache": self.cache,
            "precision": self.precision,
        }


def session_part(
    stretch: Stretch, translation: Translation, source: Source, on_bytes: Callable[[int], None] = lambda count: None
) -> SessionPart:
    """A stretch as a session. `on_bytes` is told how many bytes its weights take."""
    arrays = _arrays(translation, source)
    inputs: dict[str, tuple[Any, ...]] = {name: ("rows", translation.width(name)) for name in stretch.inputs}
    for name, half in translation.tables.items():
        inputs |= {f"{name}.cos": ("rows", half), f"{name}.sin": ("rows", half), POSITIONS: (1, "rows")}
    outputs = {name: ("rows", translation.width(name)) for name in stretch.outputs}
    session = Session(translation.nodes, translation.constants, arrays, inputs, outputs)
    on_bytes(sum(array.nbytes for array in arrays.values()))
    single = any(product.shape is not None and product.shape.level == F32_INPUTS for product in translation.products)
    return SessionPart(session, stretch.outputs, FEW_ROWS if single else 1)


class _LoadProgress:
    """Adds up what several threads have loaded."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done, self._lock = progress, total, 0, Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress:
                self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """Everything is loaded. onnxruntime's own copies of factors are in the total, and not in what was added up."""
        self.add(max(0, self._total - self._done))


def _arrays(translation: Translation, source: Source) -> dict[str, NDArray[Any]]:
    """The weights of a session by their names in its model."""
    arrays: dict[str, NDArray[Any]] = dict(dense(translation.vectors.values(), source))
    for product in translation.products:
        if product.shape is None:
            single = [replace(each, format="f32") for each in product.weights]
            loaded = dense(single, source)
            arrays[f"{product.name}.dense"] = np.concatenate([loaded[each.name] for each in single])
            continue
        packed = pack_product(product.weights, product.shape, source)
        arrays[f"{product.name}.numbers"], arrays[f"{product.name}.scales"] = packed.numbers, packed.scales
        if packed.offsets is not None:
            arrays[f"{product.name}.offsets"] = packed.offsets
    return arrays
