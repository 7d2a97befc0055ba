"""A graph as ops of programs: which kernel runs each node, with which arguments. Nothing is loaded or compiled.

Graphs have one row; a tensor of so many values has as many in every row of a step. What has no kernel here stays a node
of the graph, which NumPy runs between two programs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...formats.block_numbers import NUMBER_SHAPES
from ...graph.graph import Graph, Node, Tensor
from . import attention, elementwise, products
from .products import ProductKind

TILE_BYTES = 16 << 10  # of weights in a chunk: enough for a thread to take one rarely, and for all to end together


class Kernel(NamedTuple):
    """A function, and what writes its module."""

    name: str
    write: Callable[..., str]
    how: tuple[Any, ...] = ()
    host: bool = False  # it is told the features of the processor too


Argument = int | str | None  # a number, the name of an array or a buffer, or nothing


def bits_of(number: float) -> int:
    """A float as the word that a kernel reads."""
    return int.from_bytes(struct.pack("<f", number), "little")


@dataclass(frozen=True)
class Op:
    """One op of a program. There are so many chunks for every `rows` rows of the step; 0: however many there are."""

    kernel: Kernel
    arguments: tuple[Argument, ...]
    reads: tuple[str, ...]
    writes: str
    chunks: int = 1
    rows: int = 1


@dataclass(frozen=True)
class NumpyNode:
    """The node of the graph with this index."""

    index: int
    node: Node


@dataclass(frozen=True)
class Product:
    """The arrays of a packed or dense matrix are called by its name and `.numbers`, `.scales`, `.offsets`."""

    weight: Tensor
    kind: ProductKind | None  # None: dense


@dataclass
class Lowered:
    """Ops and nodes in order, the buffers that they share, and the weights that they read."""

    graph: Graph
    precision: str
    items: list[Op | NumpyNode] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)  # bytes of a row
    products: dict[str, Product] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)  # in f32

    def buffer(self, name: str, nbytes: int) -> str:
        """Memory that an op writes."""
        self.buffers[name] = nbytes
        return name

    def hidden(self, name: str) -> str:
        """A tensor in f32."""
        return self.buffer(name, 4 * self.graph.tensors[name].size)

    def vector(self, name: str) -> str:
        """A weight in f32."""
        self.vectors[name] = self.graph.tensors[name]
        return name

    def add(self, kernel: Kernel, arguments: Sequence[Argument], reads: Sequence[str], writes: str, **how: Any) -> None:
        """Append an op."""
        self.items.append(Op(kernel, tuple(arguments), tuple(reads), writes, **how))


def lower(graph: Graph, precision: str) -> Lowered:
    """All nodes of a graph of one row."""
    lowered = Lowered(graph, precision)
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs.values():
            readers.setdefault(name, []).append(node)
    merged: set[int] = set()
    known = {name for name, tensor in graph.tensors.items() if tensor.role == "input"}
    for i, node in enumerate(graph.nodes):
        if id(node) in merged:
            continue
        follower = _follower(node, readers, graph, known)
        known.update(node.outputs.values())
        if follower is not None:
            merged.add(id(follower))
            known.add(follower.out)
        if node.op not in _LOWERINGS or not _has_kernel(node, graph):
            lowered.items.append(NumpyNode(i, node))
            for name in node.outputs.values():
                if graph.tensors[name].role == "hidden":
                    lowered.hidden(name)
        else:
            _LOWERINGS[node.op](lowered, node, follower)
    return lowered


def _has_kernel(node: Node, graph: Graph) -> bool:
    d = node.dims
    if node.op in ("add", "mul"):  # values that repeat are weights
        return bool(d["period"] == d["count"]) or graph.tensors[node.inputs["b"]].role == "weight"
    if node.op == "rope":
        return bool(math.prod(graph.tensors[node.inputs["x"]].shape) == d["H"] * d["D"])
    return True


def _follower(node: Node, readers: Mapping[str, Sequence[Node]], graph: Graph, known: set[str]) -> Node | None:
    """The only reader of a node, where one op does both: a norm and its weight, a product and what is added to it."""
    wanted = {"rms_norm": "mul", "linear": "add"}.get(node.op)
    if wanted is None or node.out in graph.outputs:
        return None
    after = readers.get(node.out, ())
    if len(after) != 1 or after[0].op != wanted:
        return None
    (follower,) = after
    a, b, period = follower.inputs["a"], follower.inputs["b"], follower.dims["period"]
    if wanted == "add":
        other = b if a == node.out else a
        return follower if other in known and a != b and period == follower.dims["count"] else None
    weight = a == node.out and graph.tensors[b].role == "weight"
    return follower if weight and period == node.dims["width"] else None


def product_kind(tensor_format: str, k: int) -> ProductKind | None:
    """How rows of k weights of a format are stored; None for formats that are not packed here."""
    shape = NUMBER_SHAPES.get(tensor_format)
    return None if shape is None or k % shape.group else ProductKind(*shape)


def _linear(t: Lowered, node: Node, follower: Node | None) -> None:
    x, weight, n, k = node.inputs["x"], node.inputs["weight"], int(node.dims["N"]), int(node.dims["K"])
    kind = product_kind(node.dims["format"], k)
    t.products[weight] = Product(t.graph.tensors[weight], kind)
    bias = t.vector(node.inputs["bias"]) if node.dims["bias"] else None
    out, rounded = t.hidden(follower.out if follower else node.out), x
    added = None
    if follower:
        added = next(name for name in follower.inputs.values() if name != node.out)
    scales: str | None = None
    sums: str | None = None
    if kind is None:
        kernel, row_bytes = Kernel("product", products.dense_kernel), 4 * k
        reads: tuple[str, ...] = (x,)
    elif t.precision == "exact":
        kernel, row_bytes = Kernel("product", products.exact_kernel, (kind,)), k * kind.bits // 8
        reads = (x,)
        if kind.offsets:
            sums = _group_sums(t, x, k, kind.group)
            reads = (x, sums)
    else:
        kernel, row_bytes = Kernel("product", products.product_kernel, (kind, k), host=True), k * kind.bits // 8
        rounded, scales, sums = reads = _rounded(t, x, k, kind)
    tile = max(4, TILE_BYTES // row_bytes // 4 * 4)
    arrays = [f"{weight}.{part}" for part in ("numbers", "scales", "offsets")]
    if kind is None:
        arrays[1:] = ["", ""]
    elif not kind.offsets:
        arrays[2] = ""
    named = [each or None for each in arrays]
    arguments = (*named, bias, added, rounded, scales, sums, out, n, k, tile)
    t.add(kernel, arguments, (*reads, added) if added else reads, out, chunks=-(-n // tile), rows=0)


def _rounded(t: Lowered, x: str, k: int, kind: ProductKind) -> tuple[str, str, str]:
    """x in whole numbers of 16 bits, for all products that read it in this order."""
    name = f"{x}.rounded.{kind.bits}.{kind.group}"
    parts = (name, f"{name}.scales", f"{name}.sums")
    if name not in t.buffers:
        for part, nbytes in zip(parts, (2 * k, 4 * k // kind.group, 4 * k // kind.group), strict=True):
            t.buffer(part, nbytes)
        t.add(Kernel("round_x", products.round_kernel, (kind.bits, kind.group)), (x, *parts, k), (x,), name)
    return parts


def _group_sums(t: Lowered, x: str, k: int, group: int) -> str:
    name = f"{x}.sums.{group}"
    if name not in t.buffers:
        t.buffer(name, 4 * k // group)
        t.add(Kernel("group_sums", products.sums_kernel, (group,)), (x, name, k), (x,), name)
    return name


def _norm(t: Lowered, node: Node, follower: Node | None) -> None:
    d, x, centred = node.dims, node.inputs["x"], node.op == "layer_norm"
    named = follower.inputs["b"] if follower else node.inputs.get("weight")
    weight, bias = (t.vector(each) if each else None for each in (named, node.inputs.get("bias")))
    out = t.hidden(follower.out if follower else node.out)
    arguments = (x, out, weight, bias, d["heads"], d["width"], bits_of(d["eps"]))
    t.add(Kernel("norm", elementwise.norm_kernel, (centred,)), arguments, (x,), out)


def _rope(t: Lowered, node: Node, _: Node | None) -> None:
    d, x, out = node.dims, node.inputs["x"], t.hidden(node.out)
    arguments = (x, out, node.inputs["table"], d["H"], d["D"], d["rotary"] // 2)
    t.add(Kernel("rope", elementwise.rope_kernel, (bool(d["interleaved"]),)), arguments, (x,), out)


def _pair(t: Lowered, node: Node, _: Node | None) -> None:
    a, b, count, period = node.inputs["a"], node.inputs["b"], node.dims["count"], node.dims["period"]
    weight, out = t.graph.tensors[b].role == "weight", t.hidden(node.out)
    arguments = (a, t.vector(b) if weight else b, out, count, period, 0 if weight else count)
    t.add(Kernel(node.op, elementwise.pair_kernel, (node.op,)), arguments, (a,) if weight else (a, b), out)


def _single(t: Lowered, node: Node, _: Node | None) -> None:
    x, out = node.inputs["x"], t.hidden(node.out)
    number = node.dims.get("factor", node.dims.get("cap", 0.0))
    arguments = (x, out, node.dims["count"], bits_of(number))
    t.add(Kernel(node.op, elementwise.single_kernel, (node.op,)), arguments, (x,), out)


def _slice(t: Lowered, node: Node, _: Node | None) -> None:
    d, x, out = node.dims, node.inputs["x"], t.hidden(node.out)
    arguments = (x, out, d["width"], d["first"], d["count"], d["step"])
    t.add(Kernel("slice", elementwise.slice_kernel), arguments, (x,), out)


def _add_gated(t: Lowered, node: Node, _: Node | None) -> None:
    a, b, x = (node.inputs[name] for name in ("a", "b", "x"))
    gate, out = t.vector(node.inputs["gate"]), t.hidden(node.out)
    arguments = (a, b, x, gate, out, node.dims["width"], node.dims["K"])
    t.add(Kernel("add_gated", elementwise.gated_kernel), arguments, (a, b, x), out)


def _kv_write(t: Lowered, node: Node, _: Node | None) -> None:
    d, k, v = node.dims, node.inputs["k"], node.inputs["v"]
    keys, values = node.inputs["k_cache"], node.inputs["v_cache"]
    kernel = Kernel("kv_write", attention.write_kernel, (d["cache"] == "f16",))
    t.add(kernel, (k, v, keys, values, d["Hkv"], d["D"]), (k, v), keys)


def _attention(t: Lowered, node: Node, _: Node | None) -> None:
    d, q, keys, out = node.dims, node.inputs["q"], node.inputs["k_cache"], t.hidden(node.out)
    sinks = t.vector(node.inputs["sinks"]) if d.get("sinks") else None
    reach = (True,) if node.op == "attention_reach" else ()
    scale = 1 / math.sqrt(d["D"]) if d["scale"] is None else d["scale"]
    kernel = Kernel("attention", attention.attention_kernel, (d["D"], d["cache"] == "f16", *reach))
    sizes = (d["Hq"], d["Hq"] // d["Hkv"], d["window"], bits_of(scale), bits_of(d["softcap"]))
    t.add(
        kernel,
        (q, keys, node.inputs["v_cache"], sinks, out, *sizes, node.inputs.get("image_rows")),
        (q, keys),
        out,
        chunks=d["Hq"],
        rows=attention.tile_rows(d["D"]),
    )


_LOWERINGS: Mapping[str, Callable[[Lowered, Node, Node | None], None]] = {
    "linear": _linear,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope": _rope,
    "slice": _slice,
    "add_gated": _add_gated,
    "kv_write": _kv_write,
    "attention": _attention,
    "attention_reach": _attention,
    **dict.fromkeys(elementwise.PAIRS, _pair),
    **dict.fromkeys(elementwise.SINGLES, _single),
}
