"""A model on the CPU with weights as they are stored, by kernels that LLVM compiles for this processor.

A graph is programs of ops, and between them nodes that have no kernel, which the NumPy interpreter runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...formats.unpack import unpack
from ...graph import interpret
from ...graph.batch import ids_of
from ...graph.graph import Graph, Node, Tensor
from ...models.architecture import Architecture
from ...models.config import Config
from ..numpy_runner import NumpyRunner
from ..runner import F32
from ..weights import Progress, Source, dense
from .attention import pool_shape
from .code import host
from .lowering import Lowered, NumpyNode, lower
from .packing import pack, release_freed_memory
from .program import Arrays, Memory, Program, stages_of
from .sizes import numpy_weights, weight_bytes
from .threads import cores

_FORKED = "this process is a fork of the one that loaded this model, without its threads: start processes by spawn"


class PackedRunner(NumpyRunner):
    """The pages, graphs and sampling of the NumPy runner, with other code for layers and heads."""

    def __init__(
        self, architecture: Architecture, config: Config, source: Source, *, precision: str = "fast", **options: Any
    ) -> None:
        self.precision, self._process = precision, os.getpid()
        super().__init__(architecture, config, source, **options)

    def _load_weights(self, body: Graph, head: Graph, source: Source, progress: Progress | None) -> dict[str, F32]:
        lowered = [lower(body, self.precision), lower(head, self.precision)]
        self.bytes = weight_bytes(lowered)
        done = _Done(progress, self.bytes.total)
        self.arrays: dict[str, NDArray[Any]] = {}
        products = {name: each for part in lowered for name, each in part.products.items()}
        host()  # where nothing can be compiled, that is said before weights are packed
        with ThreadPoolExecutor(cores(), "weights") as pool:
            loading = [pool.submit(pack, each, source, done.add) for each in products.values()]
            try:
                self._body = CompiledGraph(lowered[0], self.arrays, source)  # compiles meanwhile
                self._head_graph = CompiledGraph(lowered[1], self.arrays, source)
                for future in loading:
                    self.arrays |= future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        norm = {each.name: each for each in self.head_of(1, 1, logits=False).weights()}  # of final states
        others = {each.name: each for each in numpy_weights(lowered)} | norm
        for part in lowered:
            others |= part.vectors
        loaded = dense([replace(each, format="f32") for each in others.values()], source)
        self.arrays |= loaded
        done.end()
        release_freed_memory()
        return loaded

    def _pool_shape(self, tensor: Tensor, pages: int) -> tuple[int, ...]:
        return pool_shape(tensor.name, pages, *tensor.shape[1:])

    def _copy_page(self, pool: NDArray[Any], source: int, target: int) -> None:
        pool[target] = pool[source]

    def _run_layers(self, values: dict[str, Any], rows: int) -> F32:
        self.check_device()
        images = self.config.images
        rows_of_images = ("image_rows",) if images and images.sees_itself else ()
        arrays = {name: values[name] for name in (*self._pools, *self.config.ropes, *rows_of_images)}
        return self._body.run(rows, values, arrays, lambda: self.graph_of(rows))["hidden"].copy()

    def _run_head(self, values: dict[str, Any], outputs: NDArray[Any], name: str) -> F32:
        if name != "logits":
            return super()._run_head(values, outputs, name)
        hidden = values["hidden"]
        known = {**self.weights, "hidden": hidden if len(hidden) == 1 else hidden[outputs["row"]]}
        graph = self._head_graph.run(len(outputs), known, {}, lambda: self.head_of(len(outputs), 1))
        return graph["logits"].copy()

    @property
    def forked(self) -> bool:
        """Is this another process than the one that loaded the model? It has none of its threads."""
        return self._process != os.getpid()

    def check_device(self) -> None:
        """A model of another process is a DeviceError."""
        if self.forked:
            raise DeviceError(_FORKED)

    def close(self) -> None:
        """Let go of weights and cache. May be called again."""
        if not self.closed:
            del self._body, self._head_graph
        super().close()
        self.arrays = {}  # a step that runs in another thread has its own hold on them

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        return {
            "device": "cpu (LLVM)",
            "weight_bytes": self.bytes.total,
            "dense_bytes": self.bytes.dense,
            "cache": self.cache,
            "precision": self.precision,
        }


class CompiledGraph:
    """Programs, and the nodes between them."""

    def __init__(self, lowered: Lowered, weights: Arrays, source: Source) -> None:
        self._graph, self._weights = lowered.graph, weights
        stages = stages_of(lowered)
        for name in [n for node in lowered.graph.nodes for n in node.inputs.values()]:
            tensor = lowered.graph.tensors[name]
            if tensor.role == "input" and tensor.format == "f32":
                lowered.hidden(name)
        self._memory = Memory(lowered, stages)
        self._parts: list[Program | NumpyNode | _Embedding] = []
        numbered = zip(lowered.items, stages, strict=True)
        for is_node, some in groupby(numbered, lambda each: isinstance(each[0], NumpyNode)):
            items = list(some)
            if is_node:
                self._parts += [self._part(item, source) for item, _ in items if isinstance(item, NumpyNode)]
            else:
                ops = [item for item, _ in items if not isinstance(item, NumpyNode)]
                self._parts.append(Program(ops, [stage for _, stage in items], self._memory, weights))
        self._bound: tuple[NDArray[Any], ...] | None = None

    def _part(self, item: NumpyNode, source: Source) -> NumpyNode | _Embedding:
        if item.node.op != "embedding":
            return item
        return _Embedding(item.node, source, self._graph.tensors[item.node.inputs["weight"]])

    def run(self, rows: int, values: Mapping[str, Any], arrays: Arrays, graph: Callable[[], Graph]) -> dict[str, F32]:
        """The outputs, which the next run overwrites. `graph` gives the graph of so many rows, for NumPy."""
        given, bound = tuple(arrays.values()), self._bound
        self._bound = None  # until all programs know where everything lies: Ctrl-C may come at any time
        moved = self._memory.reserve(rows)
        if moved or bound is None or not all(a is b for a, b in zip(bound, given, strict=True)):
            for part in self._parts:
                if isinstance(part, Program):
                    part.bind(arrays)
        self._bound = given
        for name, tensor in self._graph.tensors.items():
            if tensor.role == "input" and name in self._memory:
                self._memory.view(name, rows)[:] = values[name]
        batch, page_table = values.get("batch"), values.get("page_table")
        for part in self._parts:
            if isinstance(part, Program):
                part.run(rows, batch, page_table)
            elif isinstance(part, _Embedding):
                self._write(part.out, part.rows(values), rows)
            else:
                for name, array in self._interpret(part, values, rows, graph()).items():
                    self._write(name, array, rows)
        return {name: self._memory.view(name, rows) for name in self._graph.outputs}

    def _write(self, name: str, array: NDArray[Any], rows: int) -> None:
        self._tensor(name, rows)[:] = array.reshape(rows, -1)

    def _tensor(self, name: str, rows: int) -> NDArray[Any]:
        """A tensor that is hidden, as its format has it."""
        return self._memory.view(name, rows).view(_DTYPES[self._graph.tensors[name].format])

    def _interpret(self, part: NumpyNode, values: Mapping[str, Any], rows: int, graph: Graph) -> dict[str, Any]:
        node = graph.nodes[part.index]
        operands = {
            name: self._tensor(name, rows).reshape(graph.tensors[name].shape) if name in self._memory else values[name]
            for name in node.inputs.values()
        }
        made = tuple(name for name in node.outputs.values() if not graph.tensors[name].is_kept)
        return interpret.run(Graph(graph.tensors, (node,), made), operands)


_DTYPES = {"f32": np.float32, "u32": np.uint32}


class _Embedding:
    """Rows of a matrix that stays as the file has it, mapped where the file is."""

    def __init__(self, node: Node, source: Source, tensor: Tensor) -> None:
        (part,) = tensor.parts
        self._kind, self.out = tensor.format, node.out
        self._rows = source.rows(part.name, tensor.format, part.first, part.first + part.rows)

    def rows(self, values: Mapping[str, Any]) -> NDArray[Any]:
        """[rows, K]."""
        ids = ids_of(values["batch"], values["tokens"])
        return unpack(np.ascontiguousarray(self._rows[ids]).view(np.uint8), self._kind)


class _Done:
    """Adds up what several threads have loaded."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done, self._lock = progress, total, 0, Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress:
                self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """Everything is loaded."""
        self.add(max(0, self._total - self._done))
