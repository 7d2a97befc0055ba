"""What the weights of a model take on the CPU, and which of them NumPy reads. From graphs: nothing is loaded."""

from __future__ import annotations

from typing import NamedTuple

from ...graph.graph import Graph, Tensor
from .products import dense_bytes
from .segments import Stretch, stretches_of, translate


class WeightBytes(NamedTuple):
    """Bytes in memory. Embeddings are read from the file, and are not among them."""

    packed: int
    dense: int  # matrices in f32: of formats that are not packed, and those that NumPy reads, such as experts
    vectors: int  # norms and biases

    @property
    def total(self) -> int:
        """All of it."""
        return self.packed + self.dense + self.vectors


def weight_bytes(body: Graph, head: Graph, precision: str) -> WeightBytes:
    """Of the graphs of one row."""
    packed = dense = vectors = 0
    for graph in (body, head):
        parts = stretches_of(graph)
        for stretch in parts:
            if not stretch.in_session:
                continue
            translation = translate(stretch, graph, precision)
            vectors += sum(map(dense_bytes, translation.vectors.values()))
            for product in translation.products:
                n, k = sum(each.shape[0] for each in product.weights), product.weights[0].shape[1]
                if product.shape is None:
                    dense += sum(map(dense_bytes, product.weights))
                else:
                    packed += product.shape.weight_bytes(n, k)
        for weight in numpy_weights(graph, parts):
            if len(weight.shape) == 1:
                vectors += dense_bytes(weight)
            else:
                dense += dense_bytes(weight)
    return WeightBytes(packed, dense, vectors)


def numpy_weights(graph: Graph, parts: list[Stretch]) -> list[Tensor]:
    """Weights of nodes that NumPy runs, without embeddings."""
    nodes = [node for part in parts if not part.in_session for node in part.nodes if node.op != "embedding"]
    names = dict.fromkeys(name for node in nodes for name in node.inputs.values())
    return [graph.tensors[name] for name in names if graph.tensors[name].role == "weight"]
