"""What the weights of a model take on the CPU, and which of them NumPy reads. From graphs: nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ...graph.graph import Tensor
from .lowering import Lowered, NumpyNode, Product


class WeightBytes(NamedTuple):
    """Bytes in memory. Embeddings are read from the file, and are not among them."""

    packed: int
    dense: int  # matrices in f32: of formats that are not packed, and those that NumPy reads, such as experts
    vectors: int  # norms and biases

    @property
    def total(self) -> int:
        """All of it."""
        return self.packed + self.dense + self.vectors


def weight_bytes(parts: Iterable[Lowered]) -> WeightBytes:
    """Of graphs of one row."""
    parts = list(parts)
    products = {name: product for part in parts for name, product in part.products.items()}
    vectors = {name: tensor for part in parts for name, tensor in part.vectors.items()}
    by_numpy = {tensor.name: tensor for tensor in numpy_weights(parts)}
    packed = sum(packed_bytes(each) for each in products.values() if each.kind)
    dense = {name: each.weight for name, each in products.items() if each.kind is None}
    dense |= {name: tensor for name, tensor in by_numpy.items() if len(tensor.shape) > 1}
    vectors |= {name: tensor for name, tensor in by_numpy.items() if len(tensor.shape) == 1}
    return WeightBytes(packed, *(sum(4 * each.size for each in group.values()) for group in (dense, vectors)))


def packed_bytes(product: Product) -> int:
    """Of a matrix as it is kept."""
    kind = product.kind
    assert kind is not None
    factors = 1 + kind.offsets
    numbers = math.prod(product.weight.shape)
    return numbers * kind.bits // 8 + numbers // kind.group * factors * (2 if kind.half else 4)


def numpy_weights(parts: Iterable[Lowered]) -> list[Tensor]:
    """Weights of nodes that NumPy runs, without embeddings."""
    read: dict[str, Tensor] = {}
    for part in parts:
        nodes = [each.node for each in part.items if isinstance(each, NumpyNode) and each.node.op != "embedding"]
        read |= {name: part.graph.tensors[name] for node in nodes for name in node.inputs.values()}
    return [tensor for tensor in read.values() if tensor.role == "weight"]
