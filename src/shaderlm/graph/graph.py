"""What a model computes: tensors, and nodes that make some of them from others. Plain data, in execution order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..errors import KernelError
from .ops import OPS, resolve

_BYTES = {"f32": 4, "u32": 4, "f16": 2, "u8": 1}

Role = Literal["input", "weight", "table", "state", "recurrent", "hidden"]


class TensorSlice(NamedTuple):
    """Rows of a tensor of the checkpoint, from the row `first` on; of every `stride` rows the first `group`, if given.

    With a head `width`, the first `rotary` rows of each head are in another order than in the checkpoint: i and
    i + rotary / 2 are neighbours, 2i and 2i + 1.
    """

    name: str
    rows: int
    first: int = 0
    width: int = 0
    rotary: int = 0
    group: int = 0
    stride: int = 0


@dataclass(frozen=True)
class Tensor:
    """A value of the graph.

    A weight consists of `parts` of the checkpoint, stacked, or the first half of them and the second row by row in
    turns (`interleaved`); `format` says how they are stored. A state (the cache) lives from one run to the next; it and
    a table (of rope) have as many rows as whoever runs the graph gives them: their shape here has one. So has what is
    recurrent: a row for each sequence.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "hidden"
    format: str = "f32"
    parts: tuple[TensorSlice, ...] = ()
    interleaved: bool = False

    @property
    def size(self) -> int:
        """How many values."""
        return math.prod(self.shape)

    @property
    def is_kept(self) -> bool:
        """Does it live from one run to the next?"""
        return self.role in ("state", "recurrent")

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor that is not a weight: `format` is its dtype. Of a state or a table, bytes of one row."""
        return self.size * _BYTES[self.format]


@dataclass(frozen=True)
class Node:
    """One op: its resolved dims, and which tensors are its operands. `layer` is for people."""

    op: str
    dims: Mapping[str, Any]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    layer: str = ""

    @property
    def out(self) -> str:
        """The tensor called `out` in the op's declaration."""
        return self.outputs["out"]


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run; `outputs` are the tensors that a caller wants."""

    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def check(self) -> Graph:
        """Every tensor is made before it is used, and made once. A mistake here is one of ours."""
        available = {tensor.name for tensor in self.tensors.values() if tensor.role != "hidden"}
        for node in self.nodes:
            missing = [name for name in node.inputs.values() if name not in available]
            if missing:
                raise KernelError(f"{node.op} of {node.layer} reads {missing} before it is made")
            again = [n for n in node.outputs.values() if n in available and not self.tensors[n].is_kept]
            if again:
                raise KernelError(f"{node.op} of {node.layer} makes {again} a second time")
            available |= set(node.outputs.values())
        absent = [name for name in self.outputs if name not in available]
        if absent:
            raise KernelError(f"no node makes the output {absent}")
        return self

    def weights(self) -> list[Tensor]:
        """The weights that nodes read, in the order of their first use."""
        named = dict.fromkeys(name for node in self.nodes for name in node.inputs.values())
        return [self.tensors[name] for name in named if self.tensors[name].role == "weight"]

    def rewritten(self, rewrites: Iterable[Rewrite]) -> Graph:
        """The graph with each rewrite's new nodes where the last of its old ones was, or each in its own place."""
        changes = list(rewrites)
        owner = {id(node): change for change in changes for node in change.old}
        remaining = {id(change): len(change.old) for change in changes}
        nodes: list[Node] = []
        for node in self.nodes:
            change = owner.get(id(node))
            if change is None:
                nodes.append(node)
                continue
            if change.in_place:
                nodes.extend(new for new in change.new if new.outputs == node.outputs)
                continue
            remaining[id(change)] -= 1
            if not remaining[id(change)]:
                nodes.extend(change.new)
        known = {**self.tensors, **{tensor.name: tensor for change in changes for tensor in change.tensors}}
        used = {n for node in nodes for n in (*node.inputs.values(), *node.outputs.values())} | set(self.outputs)
        return Graph({name: tensor for name, tensor in known.items() if name in used}, tuple(nodes), self.outputs)


@dataclass(frozen=True)
class Rewrite:
    """Nodes to take out, nodes to put in, tensors that are new with them, and why others were left out, if any.

    `in_place`: each new node stands where the old one was that had its outputs, not where the last one was.
    """

    old: tuple[Node, ...]
    new: tuple[Node, ...]
    tensors: tuple[Tensor, ...] = ()
    left_out: str | None = None
    in_place: bool = False


class Builder:
    """Collects tensors and nodes. One method, `add`: names of outputs are given, dims are checked."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []

    def tensor(self, name: str, *shape: int, role: Role = "hidden", format: str = "f32") -> str:  # noqa: A002
        """Declare a tensor; a weight consists of the checkpoint's tensor of that name."""
        parts = (TensorSlice(name, shape[0]),) if role == "weight" else ()
        self.tensors[name] = Tensor(name, shape, role, format, parts)
        return name

    def view(self, name: str, *shape: int, of: Sequence[TensorSlice], format: str) -> str:  # noqa: A002
        """Declare a weight that consists of some rows of tensors of the checkpoint, one after the other."""
        self.tensors[name] = Tensor(name, shape, "weight", format, tuple(of))
        return name

    def add(
        self, op: str, dims: Mapping[str, Any], inputs: Mapping[str, str | None], layer: str, **outputs: str
    ) -> None:
        """Append a node. Inputs that are None (no bias) are left out."""
        operands = {key: name for key, name in inputs.items() if name is not None}
        unknown = [key for key in (*operands, *outputs) if key not in (*OPS[op].inputs, *OPS[op].outputs)]
        if unknown:
            raise KernelError(f"{op} has no operands {unknown}")
        self.nodes.append(Node(op, resolve(op, dims), operands, outputs, layer))

    def graph(self, *outputs: str) -> Graph:
        """The finished graph."""
        return Graph(dict(self.tensors), tuple(self.nodes), outputs).check()
