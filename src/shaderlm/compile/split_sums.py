"""A product whose k is split leaves parts. The next product adds them up where it rounds them: one dispatch less.

Alone, the first ends with a dispatch that adds up its parts and stores x, and the second begins with one that reads x.
Together these are one, which adds up a row, stores it for those who read it later, and rounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..gpu import DeviceCaps
from ..graph.graph import Graph, Node, Tensor
from ..kernels import LaunchList
from ..kernels.linear.matrix import MERGE, ROUND, X_GIVEN, X_OF_PARTS
from ..kernels.route import over_limits
from .routed import Routed, shares


def add_while_rounding(graph: Graph, routes: Sequence[Routed], caps: DeviceCaps) -> tuple[Graph, Sequence[Routed]]:
    """The graph with such pairs of products, which have parts and their scales between them, and its routes."""
    nodes, routed, tensors = list(graph.nodes), list(routes), dict(graph.tensors)
    for i in range(len(nodes) - 1):
        pair = _pair(graph, (nodes[i], nodes[i + 1]), (routed[i], routed[i + 1]), caps)
        if pair is not None:
            nodes[i : i + 2], routed[i : i + 2], between = pair
            tensors |= {tensor.name: tensor for tensor in between}
    if len(tensors) == len(graph.tensors):
        return graph, routes
    return Graph(tensors, tuple(nodes), graph.outputs), routed


def _pair(
    graph: Graph, nodes: tuple[Node, Node], routed: tuple[Routed, Routed], caps: DeviceCaps
) -> tuple[list[Node], list[Routed], list[Tensor]] | None:
    """Two products and their routes, if the second can add up what the first leaves; and what is between them."""
    (first, second), (before, after) = nodes, (each.launch_list for each in routed)
    if not (_leaves_parts(first, before) and _rounds(second, after)) or first.outputs["out"] != second.inputs["x"]:
        return None
    x, tokens = first.outputs["out"], first.dims["tokens"]
    adds = first.dims["epilogue"] == "add"
    merge, rounding = before.dispatches[-1], after.dispatches[0]
    if x in graph.outputs or [*second.inputs.values()].count(x) > 1 or second.dims["K"] != first.dims["N"]:
        return None
    split = int(merge.params["split"])
    parts, scale = Tensor(f"{x}.parts", (split, tokens, first.dims["N"])), Tensor(f"{x}.scale", (tokens,))
    between = {"x_parts": parts, "x_scale": scale}
    include = tuple(X_OF_PARTS if file == X_GIVEN else file for file in rounding.kernel.include)
    adding = replace(
        rounding,
        kernel=replace(rounding.kernel, include=include),
        params={**rounding.params, "split": split, "adds": int(adds)},
    )
    buffers = {**after.buffers, **{key: tensor.nbytes for key, tensor in between.items()}}
    buffers |= {"added": after.buffers["x"] if adds else 0}
    lists = (
        LaunchList(before.dispatches[:-1], {key: size for key, size in before.buffers.items() if key != "out"}),
        LaunchList((adding, *after.dispatches[1:]), buffers),
    )
    if over_limits(lists[1], caps) is not None:
        return None
    inputs = {key: name for key, name in second.inputs.items() if key != "x"}
    inputs |= {key: tensor.name for key, tensor in between.items()}
    inputs |= {"added": first.inputs["residual"]} if adds else {}
    changed = [
        replace(first, outputs={"parts": parts.name, "row_scale": scale.name}),
        replace(second, inputs=inputs, outputs={**second.outputs, "x": x}),
    ]
    others = [each._replace(launch_list=own, shares=shares(own)) for each, own in zip(routed, lists, strict=True)]
    return changed, others, [parts, scale]


def _leaves_parts(node: Node, launch_list: LaunchList) -> bool:
    """Does a product end with the sums of its parts alone, of all columns at once?"""
    merges = [each for each in launch_list.dispatches if each.kernel.path == MERGE]
    plain = node.op == "linear" and node.dims["epilogue"] in ("none", "add") and not node.dims["bias"]
    return plain and merges == [launch_list.dispatches[-1]]


def _rounds(node: Node, launch_list: LaunchList) -> bool:
    """Does a product begin with rounding rows that lie somewhere?"""
    kernel = launch_list.dispatches[0].kernel if launch_list.dispatches else None
    whole = node.op == "linear" and node.dims["K"] % 32 == 0
    return whole and kernel is not None and kernel.path == ROUND and X_GIVEN in kernel.include
