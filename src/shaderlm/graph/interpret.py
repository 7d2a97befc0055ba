"""Runs any graph in NumPy, node by node, with the formulas that every kernel is compared with.

In float32. Slow and obvious; what it is given as weights are dense arrays.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from . import reference
from .formulas import Array
from .graph import Graph
from .ops import OPS


def run(graph: Graph, values: MutableMapping[str, Array]) -> dict[str, Array]:
    """The graph's outputs. `values` holds its inputs, weights and states; states are changed in place."""
    known: dict[str, Array] = {}
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs.values()}
    with reference.single():
        for i, node in enumerate(graph.nodes):
            operands = {k: known[n] if n in known else values[n] for k, n in node.inputs.items()}
            results = OPS[node.op].compute(node.dims, operands)
            for key, name in node.outputs.items():
                if key in results:
                    known[name] = results[key].reshape(graph.tensors[name].shape)
            for name in node.inputs.values():
                if last[name] == i and name not in graph.outputs:
                    known.pop(name, None)
    return {name: known[name] for name in graph.outputs}
