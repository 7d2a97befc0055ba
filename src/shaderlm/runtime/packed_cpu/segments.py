"""A graph in parts: stretches of nodes that keep nothing between steps, each one session, and nodes between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...graph.graph import Graph, Node
from .ops import TRANSLATIONS, Translation, rms_norm_mul, translatable


@dataclass(frozen=True)
class Stretch:
    """Consecutive nodes of a graph, from the index `first` on. `inputs` are hidden tensors of before, `outputs` are
    read after it."""

    graph: Graph
    first: int
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_session: bool  # otherwise NumPy runs the nodes, one by one


def stretches_of(graph: Graph) -> list[Stretch]:
    """All nodes, in order. A stretch without a product is not worth a session."""
    last_read = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs.values()}
    parts = []
    for has_translation, indices in groupby(range(len(graph.nodes)), lambda i: translatable(graph.nodes[i], graph)):
        listed = list(indices)
        nodes = tuple(graph.nodes[i] for i in listed)
        written = [name for node in nodes for name in node.outputs.values()]
        read = dict.fromkeys(name for node in nodes for name in node.inputs.values())
        inputs = tuple(n for n in read if n not in written and graph.tensors[n].role in ("hidden", "input"))
        end = listed[-1]
        outputs = tuple(n for n in written if last_read.get(n, -1) > end or n in graph.outputs)
        in_session = has_translation and any(node.op == "linear" for node in nodes)
        parts.append(Stretch(graph, listed[0], nodes, tuple(n for n in inputs if n != "batch"), outputs, in_session))
    return parts


Translations = list[tuple[Stretch, Translation | None]]  # None: NumPy runs the stretch


def translations(graph: Graph, precision: str) -> Translations:
    """All stretches of a graph of one row."""
    return [(each, translate(each, precision) if each.in_session else None) for each in stretches_of(graph)]


def translate(stretch: Stretch, precision: str) -> Translation:
    """The nodes of a stretch in ONNX."""
    translation = Translation(stretch.graph, precision)
    for group in _groups(stretch.nodes, stretch.outputs):
        if group[0].op == "linear":
            translation.linear(group)
        elif len(group) == 2:
            rms_norm_mul(translation, *group)
        else:
            TRANSLATIONS[group[0].op](translation, group[0])
    return translation


def _groups(nodes: Sequence[Node], outputs: Sequence[str]) -> Iterator[list[Node]]:
    """Nodes that become one: products of the same x with weights of the same kind; a norm and its weight."""
    done: set[int] = set()
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.inputs.values():
            readers.setdefault(name, []).append(node)
    for node in nodes:
        if id(node) in done:
            continue
        group = [node]
        if node.op == "linear" and not node.dims["bias"]:
            group = [other for other in readers[node.inputs["x"]] if _same_kind(node, other)]
        elif node.op == "rms_norm" and node.out not in outputs:
            (*others, reader) = readers[node.out]
            weighted = reader.op == "mul" and reader.inputs["a"] == node.out
            if not others and weighted and reader.dims["period"] == node.dims["width"]:
                group = [node, reader]
        done.update(map(id, group))
        yield group


def _same_kind(node: Node, other: Node) -> bool:
    return other.op == "linear" and not other.dims["bias"] and other.dims["format"] == node.dims["format"]
