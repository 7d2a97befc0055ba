"""Fusions: nodes that become one. What can become one is said by the parts of chains.

Three kinds of rules, and `linear_rounded`. Some *merge* products that read one tensor; only these change weights. Some
*compose* a chain of its parts. Some *extend* a chain by a part that it may have: one that reads its result (an
epilogue), or one whose result it reads (a prologue, `precede`). A rule answers with a rewrite, with the reason why
nodes are connected as it wants but cannot be fused, or with None where they are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from .chains import CHAINS, Chain, Is, Part
from .conditions import EXPERT_GATES
from .graph import Graph, Node, Rewrite, Tensor, TensorSlice
from .ops import OPS, resolve


class GraphIndex:
    """A graph with what rules ask about it, worked out once."""

    def __init__(self, graph: Graph) -> None:
        self.tensors = graph.tensors
        self.position = {id(node): i for i, node in enumerate(graph.nodes)}
        self.producers: dict[str, Node] = {}  # of hidden tensors
        self.readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            hidden = [name for name in node.outputs.values() if graph.tensors[name].role == "hidden"]
            self.producers |= dict.fromkeys(hidden, node)
            for name in set(node.inputs.values()):
                self.readers.setdefault(name, []).append(node)
        # How many nodes read a tensor; an output of the graph has one more use.
        self.uses = Counter(graph.outputs) + Counter({name: len(nodes) for name, nodes in self.readers.items()})

    def made_by(self, name: str, op: str) -> Node | None:
        """The node of this op that makes a tensor."""
        node = self.producers.get(name)
        return node if node is not None and node.op == op else None

    def product(self, name: str, op: str) -> Node | None:
        """The plain product of this op that makes a tensor."""
        node = self.made_by(name, op)
        return node if node is not None and _is_product(node) else None

    def used_by_others(self, name: str) -> str | None:
        """The reason not to fuse a tensor away."""
        return f"{name} is used by {self.uses[name]} nodes" if self.uses[name] > 1 else None


def _is_product(node: Node) -> bool:
    return all(node.dims.get(dim, "none") == "none" for dim in ("prologue", "epilogue", "combine"))


Answer = Rewrite | str | None
Find = Callable[[GraphIndex, Node], Answer]


@dataclass(frozen=True)
class Fusion:
    """A rule, and the op of the nodes that it is asked about."""

    name: str
    anchor: str
    find: Find


@dataclass(frozen=True)
class RejectedFusion:
    """A pattern that was found and left alone."""

    fusion: str
    layer: str
    reason: str


def fuse(
    graph: Graph, fusions: Iterable[str] | None = None, unsupported_reason: Callable[[Node], str | None] | None = None
) -> tuple[Graph, tuple[RejectedFusion, ...]]:
    """Apply the named fusions (default: all), in the order of FUSIONS; and what was refused.

    `unsupported_reason` answers for a node that a fusion would make why it cannot be run, or None if it can.
    """
    known = [fusion.name for fusion in FUSIONS]
    names = known if fusions is None else list(fusions)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"unknown fusion {unknown}; there are {', '.join(known)}")
    rejected: list[RejectedFusion] = []
    index = GraphIndex(graph)
    for fusion in FUSIONS:
        if fusion.name not in names:
            continue
        rewrites, rewritten = list[Rewrite](), set[int]()
        for node in graph.nodes:
            if node.op == fusion.anchor:
                answer = fusion.find(index, node)
                if isinstance(answer, Rewrite):
                    answer = _broken(index, answer, rewritten) or answer
                if isinstance(answer, Rewrite) and unsupported_reason is not None:
                    answer = next((reason for new in answer.new if (reason := unsupported_reason(new))), answer)
                if isinstance(answer, Rewrite):
                    rewrites.append(answer)
                    rewritten |= {id(each) for each in answer.old}
                reason = answer.left_out if isinstance(answer, Rewrite) else answer
                if reason is not None:
                    rejected.append(RejectedFusion(fusion.name, node.layer, reason))
        if rewrites:
            graph = graph.rewritten(rewrites)
            index = GraphIndex(graph)
    return graph.check(), tuple(rejected)


def _broken(index: GraphIndex, rewrite: Rewrite, rewritten: set[int]) -> str | None:
    """Why a rewrite would leave a graph that cannot run. `rewritten`: nodes of the rewrites before it."""
    old = {id(node) for node in rewrite.old}
    if len(old) < len(rewrite.old):
        return "one node is several parts"
    if old & rewritten:
        return "a part belongs to another chain"
    gone = {name for node in rewrite.old for name in node.outputs.values() if name in index.producers}
    last = max(map(index.position.__getitem__, old))
    outputs = {name for node in rewrite.new for name in node.outputs.values()}
    for name in sorted(gone):
        readers = [node for node in index.readers.get(name, ()) if id(node) not in old]
        if name not in outputs and (readers or index.uses[name] > len(index.readers.get(name, ()))):
            return f"{name} is used by others"
        if not rewrite.in_place and any(index.position[id(node)] < last for node in readers):
            return f"{name} is read before all parts have run"
    unmade = gone - outputs if rewrite.in_place else set(gone)
    for node in rewrite.new:
        if missing := unmade & set(node.inputs.values()):
            return f"{min(missing)} is read and not made"
        unmade -= set(node.outputs.values())
    return None


# Products that read one tensor -----------------------------------------------------------------------------------


def gate(op: str, dim: str) -> Find:
    """The rule for two products of an op, gate and up, asked about what combines them: rows of one matrix, in turns."""

    def find(index: GraphIndex, gated: Node) -> Answer:
        nodes = [index.product(gated.inputs[key], op) for key in "ab"]
        products = [node for node in nodes if node is not None]
        if len(products) < 2:
            return None
        reason = _different(products)
        reason = reason or next((each for node in products if (each := index.used_by_others(node.out))), None)
        if reason:
            return reason
        first, second = products
        if first.dims["N"] != second.dims["N"]:
            return f"{first.out} has {first.dims['N']} columns, {second.out} {second.dims['N']}"
        inputs, tensors = _stacked(index, products, interleaved=True)
        dims = resolve(op, {**first.dims, "N": 2 * first.dims["N"], dim: gated.op})
        node = Node(op, dims, {**first.inputs, **inputs}, gated.outputs, gated.layer)
        return Rewrite((*products, gated), (node,), tensors)

    return find


def _shared_expert(index: GraphIndex, gated: Node) -> Answer:
    """A gated network for all rows, of the size of an expert, as one more expert: asked about what adds it."""
    down, shared_down = index.made_by(gated.inputs["a"], "linear_experts"), index.product(gated.inputs["b"], "linear")
    if down is None or shared_down is None:
        return None
    ups = [_gated_products(index, down, "linear_experts"), _gated_products(index, shared_down, "linear")]
    routing = index.made_by(down.inputs["ids"], "route_experts")
    router = index.product(routing.inputs["logits"], "linear") if routing else None
    if ups[0] is None or ups[1] is None or routing is None or router is None or routing.dims["shared"]:
        return None
    (product, *wide), (shared_product, *shared_wide) = ups[0], ups[1]
    pairs = list(zip((*wide, down), (*shared_wide, shared_down), strict=True))
    gate = index.tensors[gated.inputs["gate"]]
    old = (router, routing, *wide, product, down, *shared_wide, shared_product, shared_down, gated)
    x = {node.inputs["x"] for node in (router, *wide, *shared_wide, gated)}
    if len(x) > 1:
        return f"they read different inputs: {', '.join(sorted(x))}"
    if (
        product.op != shared_product.op
        or down.dims["combine"] != "sum"
        or any(n.dims["bias"] for n in (*pairs[0], *pairs[1], *pairs[2]))
    ):
        return "the shared network is not like an expert"
    for one, other in pairs:
        if any(one.dims[name] != other.dims[name] for name in ("K", "N", "format")):
            sizes = (f"{node.dims['N']} × {node.dims['K']} of {node.dims['format']}" for node in (one, other))
            return f"{' and '.join(sizes)} are not alike"
    if router.dims["format"] != gate.format or router.dims["bias"]:
        return f"the router is {router.dims['format']}, the gate {gate.format}"
    return Rewrite(old, *_with_shared_expert(index, gated, routing, router, product, pairs))


def _gated_products(index: GraphIndex, down: Node, op: str) -> tuple[Node, Node, Node] | None:
    """What makes the input of a product: a gate's op, and its two products."""
    made = index.producers.get(down.inputs["x"])
    if made is None or made.op not in EXPERT_GATES or index.uses[made.out] > 1:
        return None
    gate, up = (index.product(made.inputs[key], op) for key in "ab")
    return None if gate is None or up is None else (made, gate, up)


def _with_shared_expert(
    index: GraphIndex, gated: Node, routing: Node, router: Node, product: Node, pairs: list[tuple[Node, Node]]
) -> tuple[tuple[Node, ...], tuple[Tensor, ...]]:
    """The nodes of a mixture with one expert more, and their weights."""
    tensors: list[Tensor] = []
    tokens, used = routing.dims["tokens"], routing.dims["used"] + 1

    def tensor(name: str, *shape: int, like: str) -> str:
        tensors.append(replace(index.tensors[like], name=f"{name}+shared", shape=shape))
        return tensors[-1].name

    def weight(name: str, parts: tuple[TensorSlice, ...], rows: int) -> str:
        first = index.tensors[name]
        tensors.append(
            replace(first, name=f"{name}+shared", shape=(rows, first.shape[1]), parts=(*first.parts, *parts))
        )
        return tensors[-1].name

    gate = TensorSlice(gated.inputs["gate"], 1)
    experts = routing.dims["experts"]
    logits = tensor(router.out, tokens, experts + 1, like=router.out)
    inputs = {**router.inputs, "weight": weight(router.inputs["weight"], (gate,), experts + 1)}
    nodes = [replace(router, dims={**router.dims, "N": experts + 1}, inputs=inputs, outputs={"out": logits})]
    chosen = {key: tensor(name, tokens, used, like=name) for key, name in routing.outputs.items()}
    inputs = {**routing.inputs, "logits": logits}
    nodes.append(replace(routing, dims={**routing.dims, "shared": True}, inputs=inputs, outputs=chosen))
    outs: list[str] = []
    for one, other in pairs:
        dims = {**one.dims, "experts": experts + 1, "used": used}
        stacked = weight(
            one.inputs["weight"], index.tensors[other.inputs["weight"]].parts, (experts + 1) * one.dims["N"]
        )
        inputs = {**one.inputs, "weight": stacked, "ids": chosen["ids"]}
        if one is pairs[-1][0]:
            each = tensor(product.out, tokens, used, one.dims["K"], like=product.out)
            count = tokens * used * one.dims["K"]
            operands = {**product.inputs, "a": outs[0], "b": outs[1]}
            dims_of_product = resolve(product.op, {**product.dims, "count": count, "period": count})
            nodes.append(replace(product, dims=dims_of_product, inputs=operands, outputs={"out": each}))
            inputs |= {"x": each, "factors": chosen["factors"]}
            outs.append(gated.out)
        else:
            outs.append(tensor(one.out, tokens, used, one.dims["N"], like=one.out))
        nodes.append(replace(one, dims=dims, inputs=inputs, outputs={"out": outs[-1]}))
    return tuple(nodes), tuple(tensors)


def _merge(index: GraphIndex, first: Node) -> Answer:
    """Anchored at the first of the linears that read one tensor; those of the most common format are merged."""
    group = [node for node in index.readers[first.inputs["x"]] if node.op == "linear" and _is_product(node)]
    if len(group) < 2 or group[0] is not first:
        return None
    alike = max(([n for n in group if n.dims["format"] == m.dims["format"]] for m in group), key=len)
    reason = _different(alike if len(alike) > 1 else group)
    if reason:
        return reason
    inputs, tensors = _stacked(index, alike, interleaved=False)
    tokens, width = first.dims["tokens"], sum(node.dims["N"] for node in alike)
    wide = Tensor(f"{first.layer}.{_names(alike)}", (tokens, width))
    dims = resolve("linear", {**first.dims, "N": width})
    nodes = [Node("linear", dims, {**first.inputs, **inputs}, {"out": wide.name}, first.layer)]
    at = 0
    for node in alike:
        dims = {"tokens": tokens, "width": width, "first": at, "count": node.dims["N"]}
        dims["batched"] = node.dims["batched"]
        columns = {"x": wide.name} | ({"batch": node.inputs["batch"]} if node.dims["batched"] else {})
        nodes.append(Node("slice", resolve("slice", dims), columns, node.outputs, node.layer))
        at += node.dims["N"]
    return Rewrite(tuple(alike), tuple(nodes), (*tensors, wide), _different(group))


def _different(nodes: list[Node]) -> str | None:
    """Why products cannot be one."""
    first = nodes[0]
    if any(node.inputs.get(key) != first.inputs.get(key) for node in nodes for key in ("x", "ids")):
        return "they read different inputs"
    formats = {node.inputs["weight"]: node.dims["format"] for node in nodes}
    if len(set(formats.values())) > 1:
        return "formats differ: " + ", ".join(f"{name} is {kind}" for name, kind in formats.items())
    if len({node.dims["bias"] for node in nodes}) > 1:
        return "some have a bias and some have none"
    return None


def _names(nodes: list[Node]) -> str:
    return "+".join(node.out.split(".")[-1] for node in nodes)


def _stacked(index: GraphIndex, nodes: list[Node], *, interleaved: bool) -> tuple[dict[str, str], tuple[Tensor, ...]]:
    """Weight and bias with the rows of all, by operand, and as tensors."""
    first, inputs, tensors = nodes[0], dict[str, str](), list[Tensor]()
    for key in ("weight", "bias"):
        if key in first.inputs:
            all_of = [index.tensors[node.inputs[key]] for node in nodes]
            parts = tuple(part for tensor in all_of for part in tensor.parts)
            shape = (sum(tensor.shape[0] for tensor in all_of), *all_of[0].shape[1:])
            inputs[key] = f"{first.layer}.{_names(nodes)}.{key}"
            tensors.append(Tensor(inputs[key], shape, "weight", all_of[0].format, parts, interleaved))
    return inputs, tuple(tensors)


# Chains of parts -------------------------------------------------------------------------------------------------

# All parts of a chain work on the same rows, because wires connect them.
_ROW_DIMS = ("tokens", "batched")


class _Match:
    """Nodes that are parts of a chain: which tensors its wires are, and what the nodes say of its dims."""

    def __init__(self, chain: Chain, dims: Mapping[str, Any] | None = None) -> None:
        self.chain = chain
        self.nodes: list[tuple[Part, Node]] = []
        self.wires: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.dims: dict[str, Any] = dict(dims or {})
        self.different: str | None = None  # the first dim or wire that nodes disagree about

    def take(self, part: Part, node: Node, overrides: Iterable[str] = ()) -> bool:
        """Take a node as a part; False if it has dims that the part does not have in this chain."""
        self.nodes.append((part, node))
        if node.dims.get("batched") and "batched" in self.chain.dims:
            self.wire("batch", node.inputs["batch"])
        for name, value in node.dims.items():
            if name == "tokens" and "count" in node.dims and not node.dims.get("batched"):
                continue  # ops that take every value by itself need not say how many rows there are
            dim = part.dims.get(name, name)
            if isinstance(dim, Is):
                if value != dim.value:
                    return False
            elif isinstance(dim, str) and dim in self.chain.dims:
                before = self.dims.setdefault(dim, value)
                if dim in overrides:
                    self.dims[dim] = value
                elif dim == "batched":
                    self.dims[dim] = before or value
                elif before != value:
                    self.different = self.different or f"{dim} differs: {before} and {value}"
            elif isinstance(dim, str) and name not in _ROW_DIMS:
                default = OPS[node.op].dims[name]
                default = default(node.dims) if callable(default) else default
                if value != default and isinstance(value, (bool, str)):
                    return False
                if value != default:
                    self.different = self.different or f"{name} of {node.op} is {value}, not {default}"
        return True

    def wire(self, wire: str, tensor: str) -> None:
        """A part reads a wire."""
        before = self.wires.setdefault(wire, tensor)
        if before != tensor:
            self.different = self.different or f"{wire} differs: {before} and {tensor}"

    def node(self, layer: str, **sets: Any) -> Node | str:
        """The node of the chain, or why these are not its parts."""
        if self.different:
            return self.different
        try:
            dims = resolve(self.chain.name, {**self.dims, **sets})
        except InputError as problem:
            return str(problem)
        for part, node in self.nodes:
            expected = self.chain.dims_of(part, dims)
            for name in part.dims:
                if name not in _ROW_DIMS and node.dims[name] != expected[name]:
                    return f"{name} of {node.op} is {node.dims[name]}, not {expected[name]}"
        inputs = {wire: self.wires[wire] for wire in self.chain.inputs if wire in self.wires}
        outputs = {wire: self.outputs[wire] for wire in self.chain.outputs if wire in self.outputs}
        return Node(self.chain.name, dims, inputs, outputs, layer)


def _orders(node: Node) -> list[Node]:
    """The node, and the same with those operands exchanged that may be."""
    op = OPS[node.op]
    swap = ("a", "b") if node.op == "add" else op.swap if isinstance(op, Chain) else None
    if swap is None or node.inputs[swap[0]] == node.inputs[swap[1]]:
        return [node]
    a, b = swap
    return [node, replace(node, inputs={**node.inputs, a: node.inputs[b], b: node.inputs[a]})]


def compose(name: str, *, follows: tuple[str, str] | None = None, only: Mapping[str, Any] | None = None) -> Find:
    """The rule for a chain, asked about the node of its last part.

    `follows`: what an op with this operand reads is `out` of the chain, where that is not the last part's. `only`: it
    is for these dims.
    """
    chain = CHAINS[name]
    *before, last = [part for part in chain.parts if part.when(_defaults(chain))]

    def find(index: GraphIndex, anchor: Node) -> Answer:
        answers = (composed(index, order, anchor) for order in _orders(anchor))
        return next((answer for answer in answers if answer is not None), None)

    def composed(index: GraphIndex, order: Node, anchor: Node) -> Answer:
        match = _Match(chain)
        if not match.take(last, order):
            return None
        for operand, wire in last.gives.items():
            match.outputs[wire] = order.outputs[operand]
        for operand, wire in last.reads.items():
            if operand in order.inputs:
                match.wire(wire, order.inputs[operand])
        if follows is not None:
            op, operand = follows
            readers = index.readers[order.outputs["k_cache"]]
            reader = next((node for node in readers if node.op == op), None)
            if reader is None:
                return None
            match.outputs["out"] = reader.inputs[operand]
        old, inner = [anchor], list[str]()
        for part in before[::-1]:
            wire = part.gives["out"]
            tensor = match.wires.pop(wire, None) or match.outputs[wire]
            node = index.made_by(tensor, part.op)
            if part.implied and (node is None or index.uses[tensor] > 1 or not part.implied(node.dims)):
                match.wires[part.reads["x"]] = tensor
                continue
            if node is None or not match.take(part, node):
                return None
            old.append(node)
            inner.append(tensor)
            for operand, output in part.gives.items():
                if output in chain.outputs and output != wire:
                    match.wire(output, node.outputs[operand])
                    match.outputs[output] = node.outputs[operand]
                elif output in chain.outputs and output not in match.outputs:
                    match.outputs[output] = tensor
            for operand, read in part.reads.items():
                if operand in node.inputs:
                    match.wire(read, node.inputs[operand])
        if any(match.dims.get(key) != value for key, value in (only or {}).items()):
            return None
        fused = match.node(anchor.layer)
        reasons = (index.used_by_others(tensor) for tensor in inner if tensor not in match.outputs.values())
        reason = next((each for each in reasons if each), None)
        return fused if isinstance(fused, str) else reason or Rewrite(tuple(old), (fused,))

    return find


def extend(
    name: str, op: str, *, gives: Iterable[str] = (), needs: Mapping[str, Any] | None = None, **sets: Any
) -> Find:
    """The rule for a part that reads the result of a chain, asked about that part.

    A node of the chain then has the dims `sets`, and takes those that the part `gives` from it. It must have the dims
    that the rule `needs`.
    """
    chain = CHAINS[name]
    part = _option(chain, op, sets)

    def find(index: GraphIndex, anchor: Node) -> Answer:
        operands = [operand for operand, wire in part.reads.items() if wire == "out"]
        for order in _orders(anchor):
            tensor = order.inputs[operands[0]]
            base = index.made_by(tensor, name)
            if base is None or not _may_have(chain, base, part, sets):
                continue
            if any(base.dims[dim] != value for dim, value in (needs or {}).items()):
                continue
            others = {order.inputs[operand] for operand in operands} - {tensor}
            if others:
                return f"{', '.join(operands)} are not one tensor: {', '.join(sorted({tensor, *others}))}"
            match = _Match(chain, base.dims)
            match.wires = dict(base.inputs)
            if not match.take(part, order, gives):
                return None
            for operand, wire in part.reads.items():
                if wire != "out" and operand in order.inputs:
                    match.wire(wire, order.inputs[operand])
            results = {wire: order.outputs[operand] for operand, wire in part.gives.items()}
            match.outputs = {**base.outputs, **results}
            fused = match.node(anchor.layer, **sets)
            if isinstance(fused, str):
                return fused
            return index.used_by_others(tensor) or Rewrite((base, anchor), (fused,))
        return None

    return find


def precede(*names: str, part: str, **sets: Any) -> Find:
    """The rule for a part that makes the input x of chains, asked about that part.

    Each node that reads it computes it again: that costs less than a dispatch. A part with more results has one reader.
    A part whose result the chain gives as another one is before a single product; others read it after that.
    """
    parts = {name: _option(CHAINS[name], part, sets) for name in names}

    def takes(node: Node, tensor: str) -> bool:
        wired = [operand for operand, name in node.inputs.items() if name == tensor]
        return node.op in parts and wired == ["x"] and _may_have(CHAINS[node.op], node, parts[node.op], sets)

    def find(index: GraphIndex, anchor: Node) -> Answer:
        tensor, rewritten = anchor.out, list[Node]()
        readers = index.readers.get(tensor, [])
        products = [node for node in readers if takes(node, tensor)]
        if not products:
            return None
        others = [node.op for node in readers if node not in products]
        given = all("x" not in parts[node.op].gives.values() for node in products)
        if len(anchor.outputs) > 1 and (reason := index.used_by_others(tensor)):
            return reason
        if not given and (others or index.uses[tensor] > len(readers)):
            return f"{tensor} is also read by {', '.join(others) or 'the outside'}"
        for node in products:
            prologue, match = parts[node.op], _Match(CHAINS[node.op], node.dims)
            match.wires = {**node.inputs}
            match.wires |= {wire: anchor.inputs[key] for key, wire in prologue.reads.items() if key in anchor.inputs}
            if not match.take(prologue, anchor, overrides=("eps",)):
                return None
            results = {wire: anchor.outputs[operand] for operand, wire in prologue.gives.items() if wire != "x"}
            match.outputs = {**node.outputs, **results}
            new = match.node(node.layer, **sets)
            if isinstance(new, str):
                return new
            rewritten.append(new)
        if given and len(products) > 1:
            return f"{tensor} is read by {len(products)} products"
        return Rewrite((anchor, *products), tuple(rewritten), in_place=len(anchor.outputs) == 1 and not given)

    return find


def _defaults(chain: Chain) -> dict[str, Any]:
    return {name: None if callable(default) else default for name, default in chain.dims.items()}


def _option(chain: Chain, op: str, sets: Mapping[str, Any]) -> Part:
    """The part of this op that a chain may have, where `sets` says so."""
    (option,) = (
        part
        for part in chain.parts
        if part.op == op and not part.when(_defaults(chain)) and (not sets or part.when({**_defaults(chain), **sets}))
    )
    return option


def _may_have(chain: Chain, node: Node, part: Part, sets: Mapping[str, Any]) -> bool:
    """Has the node of a chain neither this part nor another one in its place?"""
    return not part.when(node.dims) and all(node.dims[name] == chain.dims[name] for name in sets)


# What lies between products --------------------------------------------------------------------------------------


def _linear_rounded(index: GraphIndex, linear: Node) -> Answer:
    """Inputs are rounded once, by the product that makes them, and not by every workgroup that reads them."""
    if linear.dims["tokens"] > 1 or linear.dims["batched"] or linear.dims["prologue"] != "none":
        return None
    gated = index.made_by(linear.inputs["x"], "linear")
    if gated is None or gated.dims["epilogue"] not in ("silu_mul", "gelu_mul"):
        return None
    if list(linear.inputs.values()).count(gated.out) > 1:
        return f"{gated.out} is two inputs of one product"
    if linear.dims["K"] % 32:
        return f"{linear.dims['K']} inputs are not whole blocks of 32"
    first = replace(gated, dims=resolve("linear", {**gated.dims, "rounded": True}))
    second = replace(linear, dims=resolve("linear", {**linear.dims, "prologue": "int16_activations"}))
    return index.used_by_others(gated.out) or Rewrite((gated, linear), (first, second), in_place=True)


FUSIONS = (
    Fusion("embedding_scale", "scale", extend("embedding", "scale", gives=("factor",))),
    Fusion("rms_norm_mul", "mul", compose("rms_norm_mul")),
    Fusion("experts_shared", "add_gated", _shared_expert),
    *(Fusion(f"linear_{op}", op, gate("linear", "epilogue")) for op in ("silu_mul", "gelu_mul")),
    *(Fusion(f"linear_{op}", op, extend("linear", op, epilogue=op)) for op in ("gelu", "gelu_erf")),
    Fusion("linear_gelu_residual", "gelu_mul", extend("linear", "gelu_mul", epilogue="gelu_residual")),
    *(Fusion(f"experts_{op}", op, gate("linear_experts", "combine")) for op in EXPERT_GATES),
    Fusion("experts_add", "add", extend("linear_experts", "add", needs={"combine": "sum"}, residual=True)),
    Fusion("linear_merge", "linear", _merge),
    Fusion("rope_kv_write", "kv_write", compose("rope_kv_write", follows=("attention", "q"))),
    Fusion("rms_norm_rope_kv_write", "rope_kv_write", compose("rms_norm_rope_kv_write")),
    Fusion("rms_norm_rope_attention", "attention", compose("rms_norm_rope_attention", only={"tokens": 1})),
    Fusion("rms_norm_rope", "rope", compose("rms_norm_rope")),
    Fusion("short_conv_gated_delta_rule", "silu_mul", compose("short_conv_gated_delta_rule", only={"single": True})),
    Fusion("mul_short_conv_mul", "mul", compose("mul_short_conv_mul")),
    Fusion("slice_short_conv", "short_conv", compose("slice_short_conv")),
    Fusion("slice_gated_delta_rule", "gated_delta_rule", compose("slice_gated_delta_rule")),
    Fusion("mamba2_scan_silu_mul", "silu_mul", compose("mamba2_scan_silu_mul")),
    Fusion("rms_norm_silu_mul", "silu_mul", compose("rms_norm_silu_mul")),
    *(Fusion(name, "attend_spans", compose(name)) for name in ("slice_rope_by_row_attend_spans", "slice_attend_spans")),
    Fusion("slice_sigmoid_mul", "sigmoid_mul", compose("slice_sigmoid_mul")),
    Fusion("linear_add", "add", extend("linear", "add", epilogue="add")),
    Fusion("add_rms_norm", "rms_norm_mul", compose("add_rms_norm")),
    Fusion("rms_norm_add_rms_norm", "add_rms_norm", compose("rms_norm_add_rms_norm")),
    Fusion("rms_norm_mul_add", "add", extend("rms_norm_mul", "add", residual=True)),
    Fusion("rms_norm_mul_add_mul", "mul", extend("rms_norm_mul", "mul", needs={"residual": True}, scaled=True)),
    Fusion(
        "rms_norm_linear", "rms_norm_mul", precede("linear", "linear_experts", part="rms_norm_mul", prologue="rms_norm")
    ),
    Fusion(
        "rms_norm_add_rms_norm_linear",
        "rms_norm_add_rms_norm",
        precede("linear", part="rms_norm_add_rms_norm", prologue="rms_norm_add_rms_norm"),
    ),
    Fusion("rms_norm_add_linear", "rms_norm_mul", precede("linear", part="rms_norm_mul", prologue="rms_norm_add")),
    Fusion(
        "linear_rope_kv_write",
        "rope_kv_write",
        extend(
            "linear",
            "rope_kv_write",
            gives=("Hq", "Hkv", "D", "rotary", "cache"),
            needs={"prologue": "rms_norm"},
            epilogue="rope_kv_write",
        ),
    ),
    Fusion("rms_norm_rope_attention_linear", "linear", compose("rms_norm_rope_attention_linear")),
    Fusion("linear_rounded", "linear", _linear_rounded),
)
