"""What the weights of a model take on the CPU, and which of them NumPy reads. From graphs: nothing is loaded."""

from __future__ import annotations

from typing import NamedTuple

from ...graph.graph import Tensor
from .products import dense_bytes
from .segments import Translations


class WeightBytes(NamedTuple):
    """Bytes in memory. Embeddings are read from the file, and are not among them."""

    packed: int
    dense: int  # matrices in f32: of formats that are not packed, and those that NumPy reads, such as experts
    vectors: int  # norms and biases

    @property
    def total(self) -> int:
        """All of it."""
        return self.packed + self.dense + self.vectors


def weight_bytes(parts: Translations) -> WeightBytes:
    """Of stretches of graphs of one row."""
    packed = dense = vectors = 0
    for _, translation in parts:
        if translation is None:
            continue
        vectors += sum(map(dense_bytes, translation.vectors.values()))
        for product in translation.products:
            n, k = sum(each.shape[0] for each in product.weights), product.weights[0].shape[1]
            if product.shape is None:
                dense += sum(map(dense_bytes, product.weights))
            else:
                packed += product.shape.weight_bytes(n, k)
    for weight in numpy_weights(parts):
        if len(weight.shape) == 1:
            vectors += dense_bytes(weight)
        else:
            dense += dense_bytes(weight)
    return WeightBytes(packed, dense, vectors)


def numpy_weights(parts: Translations) -> list[Tensor]:
    """Weights of nodes that NumPy runs, without embeddings."""
    read: dict[str, Tensor] = {}
    for stretch, translation in parts:
        if translation is None:
            nodes = [node for node in stretch.nodes if node.op != "embedding"]
            read |= {name: stretch.graph.tensors[name] for node in nodes for name in node.inputs.values()}
    return [tensor for tensor in read.values() if tensor.role == "weight"]
