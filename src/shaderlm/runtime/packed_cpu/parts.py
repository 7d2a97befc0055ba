"""What a step consists of here: sessions, and between them the nodes that keep or read state. Each changes `known`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...formats.unpack import unpack
from ...graph import interpret
from ...graph.batch import ids_of
from ...graph.graph import Graph, Node, Tensor
from ..weights import Source
from .attention import AttentionNode, BatchAttention
from .ops import POSITIONS
from .sessions import Session

Known = dict[str, Any]  # tensors by name: inputs, states, and what was computed so far


class Step(NamedTuple):
    """What parts of a step share: its graph, for those that NumPy runs, and attention, which a head has none of."""

    graph: Callable[[], Graph]
    attention: BatchAttention | None = None


class Part(Protocol):
    """Reads some of the tensors that are known, and adds others."""

    def run(self, known: Known, step: Step) -> None:
        """For all rows of a step."""
        ...


def run_parts(parts: Sequence[Part], known: Known, step: Step) -> Known:
    """All of them, in order."""
    for part in parts:
        part.run(known, step)
    return known


class SessionPart:
    """A stretch of nodes. Up to `few` rows run one by one, where products of one row have a way of their own."""

    def __init__(self, session: Session, outputs: Sequence[str], few: int) -> None:
        self._session, self._outputs, self._few = session, outputs, few

    def run(self, known: Known, step: Step) -> None:
        """One call of the session, or one for each row."""
        inputs = {name: known[name] for name in self._session.inputs}
        rows = len(known[self._session.inputs[0]])
        if 1 < rows <= self._few:
            each = [self._session.run(_row(inputs, i)) for i in range(rows)]
            results = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        else:
            results = self._session.run(inputs)
        known.update(zip(self._outputs, results, strict=True))


def _row(inputs: Known, i: int) -> Known:
    """Of inputs [rows, …] one row; the numbers of rows are [1, rows], and begin with 0 in every call."""
    return {name: x[:, :1] if name == POSITIONS else x[i : i + 1] for name, x in inputs.items()}


class EmbeddingPart:
    """Rows of a matrix that stays as the file has it, mapped where the file is."""

    def __init__(self, node: Node, source: Source, tensor: Tensor) -> None:
        (part,) = tensor.parts
        self._kind, self._out = tensor.format, node.out
        self._rows = source.rows(part.name, tensor.format, part.first, part.first + part.rows)

    def run(self, known: Known, step: Step) -> None:
        """[rows, K]."""
        ids = ids_of(known["batch"], known["tokens"])
        known[self._out] = unpack(np.ascontiguousarray(self._rows[ids]).view(np.uint8), self._kind)


class WritePart:
    """Keys and values into the pages."""

    def __init__(self, node: Node) -> None:
        self._heads, self._width = node.dims["Hkv"], node.dims["D"]
        self._names = [node.inputs[key] for key in ("k", "v", "k_cache", "v_cache")]

    def run(self, known: Known, step: Step) -> None:
        """In place."""
        k, v, keys, values = (known[name] for name in self._names)
        shape = (-1, self._heads, self._width)
        assert step.attention is not None
        step.attention.write(k.reshape(shape), v.reshape(shape), keys, values)


class AttentionPart:
    """Over the keys that each row sees."""

    def __init__(self, node: Node) -> None:
        self._kind, self._out, self._sinks = AttentionNode.of(node.dims), node.out, node.inputs.get("sinks")
        self._names = [node.inputs[key] for key in ("q", "k_cache", "v_cache")]

    def run(self, known: Known, step: Step) -> None:
        """[rows, Hq · D]."""
        sinks = known[self._sinks] if self._sinks else None
        q, keys, values = (known[name] for name in self._names)
        assert step.attention is not None
        known[self._out] = step.attention.attend(self._kind, q, keys, values, sinks)


class NumpyPart:
    """The node of the graph with this index, by the interpreter."""

    def __init__(self, index: int) -> None:
        self._index = index

    def run(self, known: Known, step: Step) -> None:
        """As many rows as the graph has."""
        whole = step.graph()
        node = whole.nodes[self._index]
        shapes = {name: whole.tensors[name] for name in node.inputs.values()}
        hidden = {name for name, tensor in shapes.items() if tensor.role in ("hidden", "input") and name != "batch"}
        operands = {n: known[n].reshape(shapes[n].shape) if n in hidden else known[n] for n in shapes}
        known.update(interpret.run(Graph(whole.tensors, (node,), tuple(node.outputs.values())), operands))
