"""A model on the CPU with weights as they are stored: products, norms and activations in sessions of onnxruntime.

Between two sessions lie the nodes that keep or read state: keys and values go to the same pages as in NumPy, and
attention reads them there. What neither can be a node of ONNX nor has code here runs as the NumPy interpreter does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats.unpack import unpack
from ...graph import interpret
from ...graph.batch import ids_of
from ...graph.graph import Graph, Node, Tensor
from ...models.architecture import Architecture
from ...models.config import Config
from ..numpy_runner import NumpyRunner
from ..runner import F32
from ..weights import Progress, Source, dense
from .attention import BatchAttention
from .ops import POSITIONS, Translation
from .products import pack_product
from .segments import Stretch, stretches_of, translate
from .sessions import Session, cores, release_freed_memory
from .sizes import embedding_tables, numpy_weights, weight_bytes


@dataclass(frozen=True)
class _Compiled:
    """A stretch of a graph, and its session if it has one."""

    stretch: Stretch
    session: Session | None


class PackedRunner(NumpyRunner):
    """The pages, graphs and sampling of the NumPy runner, with other code for layers and heads."""

    def __init__(
        self, architecture: Architecture, config: Config, source: Source, *, precision: str = "fast", **options: Any
    ) -> None:
        self.precision = precision
        super().__init__(architecture, config, source, **options)

    def _load_weights(self, body: Graph, head: Graph, source: Source, progress: Progress | None) -> dict[str, F32]:
        self.bytes = weight_bytes(body, head, self.precision)
        graphs = {"layers": (body, stretches_of(body)), "head": (head, stretches_of(head))}
        report = _Report(progress, self.bytes.total)
        jobs = [(graph, stretch) for graph, stretches in graphs.values() for stretch in stretches]
        with ThreadPoolExecutor(cores(), "weights") as pool:
            compiled = list(pool.map(lambda job: self._compiled(*job, source, report), jobs))
        layers = len(graphs["layers"][1])
        self._layers, self._head_parts = compiled[:layers], compiled[layers:]
        self._embeddings = {name: _Rows(body.tensors[name], source) for name in embedding_tables(body)}
        weights = {each.name: each for graph in graphs.values() for each in numpy_weights(*graph)}
        norm = {each.name: each for each in self.head_of(1, 1, logits=False).weights()}  # of final states
        loaded = dense([replace(each, format="f32") for each in {**weights, **norm}.values()], source)
        release_freed_memory()
        return loaded

    def _compiled(self, graph: Graph, stretch: Stretch, source: Source, report: _Report) -> _Compiled:
        if not stretch.in_session:
            return _Compiled(stretch, None)
        translation = translate(stretch, graph, self.precision)
        arrays = _arrays(translation, source)
        inputs: dict[str, tuple[Any, ...]] = {name: ("rows", translation.width(name)) for name in stretch.inputs}
        for name, half in translation.tables.items():
            inputs |= {f"{name}.cos": ("rows", half), f"{name}.sin": ("rows", half), POSITIONS: (1, "rows")}
        outputs = {name: ("rows", translation.width(name)) for name in stretch.outputs}
        session = Session(translation.nodes, translation.constants, arrays, inputs, outputs)
        report.add(sum(array.nbytes for array in arrays.values()))
        return _Compiled(stretch, session)

    def _run_layers(self, values: dict[str, Any], rows: int) -> F32:
        batch = values["batch"]
        attention = BatchAttention(batch, values["page_table"])
        feeds = self._feeds(values)
        special: dict[str, Callable[[Node, Mapping[str, Any]], Mapping[str, Any]]] = {
            "embedding": lambda node, _: {"out": self._embedded(node, values)},
            "kv_write": lambda node, x: attention.write(x, node.dims["Hkv"], node.dims["D"]) or {},
            "attention": lambda node, x: {"out": attention.attend(node.dims, x)},
        }
        return self._run_parts(self._layers, feeds, values, special, lambda: self.graph_of(rows))["hidden"]

    def _run_head(self, values: dict[str, Any], outputs: NDArray[Any], name: str) -> F32:
        if name != "logits":
            return super()._run_head(values, outputs, name)
        hidden = values["hidden"] if len(values["hidden"]) == 1 else values["hidden"][outputs["row"]]
        graph = lambda: self.head_of(len(outputs), 1)  # noqa: E731
        return self._run_parts(self._head_parts, {"hidden": hidden}, values, {}, graph)["logits"]

    def _run_parts(
        self,
        parts: list[_Compiled],
        feeds: dict[str, Any],
        values: Mapping[str, Any],
        special: Mapping[str, Callable[[Node, Mapping[str, Any]], Mapping[str, Any]]],
        graph: Callable[[], Graph],
    ) -> dict[str, Any]:
        known = dict(feeds)
        for part in parts:
            stretch = part.stretch
            if part.session is not None:
                names = part.session.inputs
                results = part.session.run({name: known[name] for name in names})
                known.update(zip(stretch.outputs, results, strict=True))
                continue
            for i, node in enumerate(stretch.nodes, stretch.first):
                run = special.get(node.op)
                if run is None:
                    _interpret(graph(), i, known, values)
                    continue
                operands = {key: known[n] if n in known else values[n] for key, n in node.inputs.items() if n in known or n in values}
                made = run(node, operands)
                known.update({node.outputs[key]: array for key, array in made.items()})
        return known

    def _feeds(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What sessions read beside hidden tensors: of every rope table the rows of this step."""
        positions = values["batch"][1:, 1]
        feeds: dict[str, Any] = {POSITIONS: np.arange(len(positions), dtype=np.int64)[None]}
        for name in self.config.ropes:
            rows = values[name][positions]
            feeds[f"{name}.cos"] = np.ascontiguousarray(rows[..., 0])
            feeds[f"{name}.sin"] = np.ascontiguousarray(rows[..., 1])
        return feeds

    def _embedded(self, node: Node, values: Mapping[str, Any]) -> F32:
        ids = ids_of(values["batch"], values["tokens"])
        return self._embeddings[node.inputs["weight"]].take(ids)

    def close(self) -> None:
        """Let go of weights and cache."""
        super().close()
        self._layers, self._head_parts, self._embeddings = [], [], {}

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        return {
            "device": "cpu (onnxruntime)",
            "weight_bytes": self.bytes.total,
            "dense_bytes": self.bytes.dense,
            "cache": self.cache,
            "precision": self.precision,
        }


class _Rows:
    """Rows of a matrix that stay as the file has them, mapped where the file is."""

    def __init__(self, tensor: Tensor, source: Source) -> None:
        (part,) = tensor.parts
        self._kind = tensor.format
        self._rows = source.rows(part.name, tensor.format, part.first, part.first + part.rows)

    def take(self, ids: NDArray[Any]) -> F32:
        """[ids, K]."""
        return unpack(np.ascontiguousarray(self._rows[ids]).view(np.uint8), self._kind)


class _Report:
    """Adds up what several threads have loaded."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done, self._lock = progress, total, 0, Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress:
                self._progress(min(self._done, self._total), self._total)


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


def _interpret(graph: Graph, i: int, known: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Run one node in NumPy, and keep what it gives."""
    node = graph.nodes[i]
    operands = {}
    for name in node.inputs.values():
        operands[name] = known[name].reshape(graph.tensors[name].shape) if name in known else values[name]
    only = Graph(graph.tensors, (node,), tuple(node.outputs.values()))
    known.update(interpret.run(only, operands))
