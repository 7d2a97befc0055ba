"""Fusions: nodes that become one. Each is one rule with one predicate, which answers why not where it refuses.

A rule is asked about every node of its anchor's op and answers with a rewrite, with the reason why the pattern is
there but cannot be fused, or with None where there is no such pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..errors import InputError
from .graph import Graph, Node, Rewrite, Tensor
from .ops import resolve


class Look:
    """A graph with what rules ask about it, worked out once."""

    def __init__(self, graph: Graph) -> None:
        self.tensors = graph.tensors
        self.producers = graph.producers()
        self.uses = graph.uses()
        self.readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in set(node.inputs.values()):
                self.readers.setdefault(name, []).append(node)

    def made_by(self, name: str, op: str) -> Node | None:
        """The node of this op that makes a tensor."""
        node = self.producers.get(name)
        return node if node is not None and node.op == op else None

    def product(self, name: str, prologue: str = "none") -> Node | None:
        """The linear with this prologue and without an epilogue that makes a tensor."""
        node = self.made_by(name, "linear")
        return node if node is not None and _is_product(node, prologue) else None


def _is_product(node: Node, prologue: str = "none") -> bool:
    return node.op == "linear" and node.dims["epilogue"] == "none" and node.dims["prologue"] == prologue


Answer = Rewrite | str | None


@dataclass(frozen=True)
class Fusion:
    """A rule. `formula` says in the ops' words what becomes what."""

    name: str
    formula: str
    anchor: str
    find: Callable[[Look, Node], Answer]


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
    wanted = [fusion.name for fusion in FUSIONS] if fusions is None else list(fusions)
    unknown = [name for name in wanted if name not in {fusion.name for fusion in FUSIONS}]
    if unknown:
        raise InputError(f"unknown fusion {unknown}; there are {', '.join(fusion.name for fusion in FUSIONS)}")
    rejected: list[RejectedFusion] = []
    for fusion in FUSIONS:
        if fusion.name not in wanted:
            continue
        look, rewrites = Look(graph), []
        for node in graph.nodes:
            if node.op == fusion.anchor:
                answer = fusion.find(look, node)
                if isinstance(answer, Rewrite) and unsupported_reason is not None:
                    answer = next((reason for new in answer.new if (reason := unsupported_reason(new))), answer)
                if isinstance(answer, Rewrite):
                    rewrites.append(answer)
                reason = answer.left_out if isinstance(answer, Rewrite) else answer
                if reason is not None:
                    rejected.append(RejectedFusion(fusion.name, node.layer, reason))
        graph = graph.rewritten(rewrites)
    return graph.check(), tuple(rejected)


def _only_here(look: Look, name: str) -> str | None:
    return f"{name} is used by {look.uses[name]} nodes" if look.uses[name] > 1 else None


def _rms_norm_mul(look: Look, mul: Node) -> Answer:
    norm = look.made_by(mul.inputs["a"], "rms_norm")
    if norm is None:
        return None
    if mul.dims["period"] != norm.dims["width"]:
        return f"the factor repeats every {mul.dims['period']} values, a row has {norm.dims['width']}"
    inputs = {**norm.inputs, "weight": mul.inputs["b"]}
    return _only_here(look, norm.out) or Rewrite(
        (norm, mul), (Node("rms_norm_mul", resolve("rms_norm_mul", norm.dims), inputs, mul.outputs, mul.layer),)
    )


def _embedding_scale(look: Look, scale: Node) -> Answer:
    embedding = look.made_by(scale.inputs["x"], "embedding")
    if embedding is None:
        return None
    dims = resolve("embedding", {**embedding.dims, "factor": embedding.dims["factor"] * scale.dims["factor"]})
    made = replace(embedding, dims=dims, outputs=scale.outputs)
    return _only_here(look, embedding.out) or Rewrite((embedding, scale), (made,))


def _rms_norm_mul_add(look: Look, add: Node) -> Answer:
    for key, other in (("b", "a"), ("a", "b")):
        norm = look.made_by(add.inputs[key], "rms_norm_mul")
        if norm is None or norm.dims["residual"] or add.inputs[key] == add.inputs[other]:
            continue
        if add.dims["period"] != add.dims["count"]:
            return f"the sum repeats one operand every {add.dims['period']} values"
        dims = resolve("rms_norm_mul", {**norm.dims, "residual": True})
        made = Node("rms_norm_mul", dims, {**norm.inputs, "residual": add.inputs[other]}, add.outputs, add.layer)
        return _only_here(look, norm.out) or Rewrite((norm, add), (made,))
    return None


def _linear_gated(look: Look, gated: Node) -> Answer:
    gate, up = (look.product(gated.inputs[key]) for key in "ab")
    if gate is None or up is None:
        return None
    reason = _unsupported_reason_one_matmul([gate, up]) or _only_here(look, gate.out) or _only_here(look, up.out)
    if reason:
        return reason
    merged, tensors = _merged(look, [gate, up], interleaved=True)
    node = replace(merged, dims=resolve("linear", {**merged.dims, "epilogue": gated.op}), outputs=gated.outputs)
    return Rewrite((gate, up, gated), (node,), tensors)


def _linear_gelu(look: Look, gelu: Node) -> Answer:
    linear = look.product(gelu.inputs["x"])
    if linear is None:
        return None
    node = replace(linear, dims=resolve("linear", {**linear.dims, "epilogue": gelu.op}), outputs=gelu.outputs)
    return _only_here(look, linear.out) or Rewrite((linear, gelu), (node,))


def _experts_gated(look: Look, gated: Node) -> Answer:
    gate, up = (look.made_by(gated.inputs[key], "linear_experts") for key in "ab")
    if gate is None or up is None or gate.dims["combine"] != "none" or up.dims["combine"] != "none":
        return None
    if any(gate.inputs[key] != up.inputs[key] for key in ("x", "ids")):
        return "they read different inputs"
    reason = _unsupported_reason_one_matmul([gate, up]) or _only_here(look, gate.out) or _only_here(look, up.out)
    if reason:
        return reason
    inputs, tensors = dict(gate.inputs), []
    for key in ("weight", "bias"):
        if key not in gate.inputs:
            continue
        # Row by row in turns over all experts: so are the rows of each, which has as many of both.
        both = [look.tensors[node.inputs[key]] for node in (gate, up)]
        parts = tuple(part for tensor in both for part in tensor.parts)
        inputs[key] = f"{gate.layer}.{_joined([gate, up])}.{key}"
        shape = (sum(tensor.shape[0] for tensor in both), *both[0].shape[1:])
        tensors.append(Tensor(inputs[key], shape, "weight", both[0].format, parts, interleaved=True))
    dims = resolve("linear_experts", {**gate.dims, "N": 2 * gate.dims["N"], "combine": gated.op})
    node = Node("linear_experts", dims, inputs, gated.outputs, gated.layer)
    return Rewrite((gate, up, gated), (node,), tuple(tensors))


def _experts_add(look: Look, add: Node) -> Answer:
    for key, other in (("b", "a"), ("a", "b")):
        experts = look.made_by(add.inputs[key], "linear_experts")
        if experts is None or experts.dims["combine"] != "sum" or experts.dims["residual"]:
            continue
        if add.dims["period"] != add.dims["count"]:
            return f"the sum repeats one operand every {add.dims['period']} values"
        dims = resolve("linear_experts", {**experts.dims, "residual": True})
        node = Node(experts.op, dims, {**experts.inputs, "residual": add.inputs[other]}, add.outputs, add.layer)
        return _only_here(look, experts.out) or Rewrite((experts, add), (node,))
    return None


def _linear_merge(look: Look, first: Node) -> Answer:
    """Anchored at the first of the linears that read one tensor; those of the most common format are merged."""
    group = [node for node in look.readers[first.inputs["x"]] if _is_product(node)]
    if len(group) < 2 or group[0] is not first:
        return None
    alike = max(([n for n in group if n.dims["format"] == m.dims["format"]] for m in group), key=len)
    if len(alike) < 2:
        return _unsupported_reason_one_matmul(group)
    reason = _unsupported_reason_one_matmul(alike)
    if reason:
        return reason
    merged, tensors = _merged(look, alike, interleaved=False)
    width = sum(node.dims["N"] for node in alike)
    wide = Tensor(f"{first.layer}.{_joined(alike)}", (first.dims["tokens"], width))
    nodes = [replace(merged, outputs={"out": wide.name})]
    at = 0
    for node in alike:
        dims = {"tokens": node.dims["tokens"], "width": width, "first": at, "count": node.dims["N"]}
        dims["batched"] = node.dims["batched"]
        batch = {"batch": node.inputs["batch"]} if node.dims["batched"] else {}
        taken = {"x": wide.name, **batch}
        nodes.append(Node("slice", resolve("slice", dims), taken, node.outputs, node.layer))
        at += node.dims["N"]
    return Rewrite(tuple(alike), tuple(nodes), (*tensors, wide), _unsupported_reason_one_matmul(group))


def _unsupported_reason_one_matmul(nodes: list[Node]) -> str | None:
    first = nodes[0]
    if any(node.inputs["x"] != first.inputs["x"] for node in nodes):
        return "they read different inputs"
    formats = {node.inputs["weight"]: node.dims["format"] for node in nodes}
    if len(set(formats.values())) > 1:
        return "formats differ: " + ", ".join(f"{name} is {kind}" for name, kind in formats.items())
    if len({node.dims["bias"] for node in nodes}) > 1:
        return "some have a bias and some have none"
    return None


def _joined(nodes: list[Node]) -> str:
    return "+".join(node.out.split(".")[-1] for node in nodes)


def _merged(look: Look, nodes: list[Node], *, interleaved: bool) -> tuple[Node, tuple[Tensor, ...]]:
    """One linear with the rows of all, and its new weight and bias."""
    first, rows = nodes[0], sum(node.dims["N"] for node in nodes)
    tensors = []
    inputs = {key: first.inputs[key] for key in ("x", "batch") if key in first.inputs}
    for key, shape in (("weight", (rows, first.dims["K"])), ("bias", (rows,))):
        if key in first.inputs:
            parts = tuple(part for node in nodes for part in look.tensors[node.inputs[key]].parts)
            name = f"{first.layer}.{_joined(nodes)}.{key}"
            kind = look.tensors[first.inputs[key]].format
            tensors.append(Tensor(name, shape, "weight", kind, parts, interleaved))
            inputs[key] = name
    dims = resolve("linear", {**first.dims, "N": rows})
    return Node("linear", dims, inputs, first.outputs, first.layer), tuple(tensors)


def _linear_add(look: Look, add: Node) -> Answer:
    for key, other in (("b", "a"), ("a", "b")):
        linear = look.product(add.inputs[key])
        if linear is None:
            continue
        if add.dims["period"] != add.dims["count"]:
            return f"the sum repeats one operand every {add.dims['period']} values"
        inputs = {**linear.inputs, "residual": add.inputs[other]}
        node = Node("linear", resolve("linear", {**linear.dims, "epilogue": "add"}), inputs, add.outputs, add.layer)
        return _only_here(look, linear.out) or Rewrite((linear, add), (node,))
    return None


def _add_rms_norm(look: Look, norm: Node) -> Answer:
    add = look.made_by(norm.inputs["x"], "add")
    if add is None or norm.dims["residual"]:
        return None
    if add.dims["period"] != add.dims["count"]:
        return f"the sum repeats one operand every {add.dims['period']} values"
    inputs = {**add.inputs, "weight": norm.inputs["weight"]}
    outputs = {"sum": add.out, "out": norm.out}
    dims = resolve("add_rms_norm", {name: value for name, value in norm.dims.items() if name != "residual"})
    return Rewrite((add, norm), (Node("add_rms_norm", dims, inputs, outputs, norm.layer),))


_PRODUCTS = ("linear", "linear_experts")


def _rms_norm_linear(look: Look, norm: Node) -> Answer:
    """The norm is computed again by each matmul that reads it: that costs less than a dispatch."""
    if norm.dims["residual"]:
        return None
    readers = look.readers.get(norm.out, [])
    products = [node for node in readers if node.op in _PRODUCTS and node.dims["prologue"] == "none"]
    if not products:
        return None
    others = [node.op for node in readers if node not in products]
    if others or look.uses[norm.out] > len(readers):
        return f"{norm.out} is also read by {', '.join(others) or 'the outside'}"
    nodes = []
    for node in readers:
        inputs = {**node.inputs, "x": norm.inputs["x"], "norm_weight": norm.inputs["weight"]}
        dims = resolve(node.op, {**node.dims, "prologue": "rms_norm", "eps": norm.dims["eps"]})
        nodes.append(replace(node, dims=dims, inputs=inputs))
    return Rewrite((norm, *readers), tuple(nodes), in_place=True)


def _rms_norm_add_rms_norm_linear(look: Look, norms: Node) -> Answer:
    """As above; the product also gives the sum, so that there can be but one."""
    readers = look.readers.get(norms.out, [])
    if not any(node.op == "linear" and node.dims["prologue"] == "none" for node in readers):
        return None
    if look.uses[norms.out] > 1:
        return f"{norms.out} is used by {look.uses[norms.out]} nodes"
    (node,) = readers
    before = {"x": norms.inputs["b"], "skip": norms.inputs["a"]}
    weights = {"post_weight": norms.inputs["weight"], "norm_weight": norms.inputs["next_weight"]}
    dims = resolve("linear", {**node.dims, "prologue": norms.op, "eps": norms.dims["eps"]})
    outputs = {**node.outputs, "sum": norms.outputs["sum"]}
    made = replace(node, dims=dims, inputs={**node.inputs, **before, **weights}, outputs=outputs)
    return Rewrite((norms, node), (made,))


def _rope_kv_write(look: Look, write: Node) -> Answer:
    k = look.made_by(write.inputs["k"], "rope")
    attention = next((n for n in look.readers[write.outputs["k_cache"]] if n.op == "attention"), None)
    q = look.made_by(attention.inputs["q"], "rope") if attention else None
    if k is None or q is None:
        return None
    same = ("rotary", "interleaved", "D", "tokens")
    different = [key for key in same if q.dims[key] != k.dims[key]]
    different += [key for key in ("batch", "table") if q.inputs[key] != k.inputs[key]]
    if different:
        return f"queries and keys are rotated differently: {', '.join(different)}"
    if k.inputs["batch"] != write.inputs["batch"]:
        return f"keys are rotated by {k.inputs['batch']} and written by {write.inputs['batch']}"
    d = {key: k.dims[key] for key in same} | {"Hq": q.dims["H"]} | {key: write.dims[key] for key in ("Hkv", "cache")}
    reason = _not_in_quads(d) or _only_here(look, q.out) or _only_here(look, k.out)
    if reason:
        return reason
    inputs = {key: write.inputs[key] for key in ("batch", "k_cache", "v_cache")} | {"table": k.inputs["table"]}
    absorbed = []
    for key, name in (("q", q.inputs["x"]), ("k", k.inputs["x"]), ("v", write.inputs["v"])):
        inputs[key], columns, parts = _as_columns(look, key, name)
        d |= columns
        absorbed += parts
    outputs = {"out": q.out, **write.outputs}
    node = Node("rope_kv_write", resolve("rope_kv_write", d), inputs, outputs, write.layer)
    return Rewrite((q, k, write, *absorbed), (node,))


def _as_columns(look: Look, key: str, name: str) -> tuple[str, dict[str, int], list[Node]]:
    """Where q, k or v is read from: a tensor, or columns of a wider one, with the slice that is not needed then."""
    part = look.made_by(name, "slice")
    if part is None or look.uses[name] > 1 or part.dims["first"] % 4 or part.dims["width"] % 4:
        return name, {}, []
    return part.inputs["x"], {f"{key}_first": part.dims["first"], f"{key}_stride": part.dims["width"]}, [part]


def _rms_norm_rope_kv_write(look: Look, rope: Node) -> Answer:
    norms = [look.made_by(rope.inputs[key], "rms_norm_mul") for key in "qk"]
    if norms[0] is None or norms[1] is None or norms[0].dims["residual"] or norms[1].dims["residual"]:
        return None
    d, inputs, absorbed = dict(rope.dims), dict(rope.inputs), []
    if norms[0].dims["eps"] != norms[1].dims["eps"]:
        return f"queries are normed with eps {norms[0].dims['eps']}, keys with {norms[1].dims['eps']}"
    for key, norm in zip("qk", norms, strict=True):
        if norm is None or norm.dims["width"] != d["D"]:
            return f"{rope.inputs[key]} is not normed head by head"
        inputs[key], columns, parts = _as_columns(look, key, norm.inputs["x"])
        inputs[f"{key}_norm"] = norm.inputs["weight"]
        d |= columns
        absorbed += [norm, *parts]
        if reason := _only_here(look, norm.out):
            return reason
    dims = resolve("rms_norm_rope_kv_write", {**d, "eps": norms[0].dims["eps"]})
    node = Node("rms_norm_rope_kv_write", dims, inputs, rope.outputs, rope.layer)
    return Rewrite((rope, *absorbed), (node,))


def _rms_norm_rope_attention(look: Look, attention: Node) -> Answer:
    """Of one row, whose own key and value each workgroup makes for itself."""
    rope = look.made_by(attention.inputs["q"], "rms_norm_rope_kv_write")
    if rope is None or attention.dims["tokens"] > 1:
        return None
    if any(rope.outputs[name] != attention.inputs[name] for name in ("k_cache", "v_cache")):
        return "keys and values are written to other caches than are read"
    dims = resolve("rms_norm_rope_attention", {**attention.dims, **rope.dims})
    inputs, outputs = {**attention.inputs, **rope.inputs}, {**rope.outputs, **attention.outputs}
    node = Node("rms_norm_rope_attention", dims, inputs, outputs, attention.layer)
    return _only_here(look, rope.outputs["out"]) or Rewrite((rope, attention), (node,))


def _rms_norm_rope_attention_linear(look: Look, linear: Node) -> Answer:
    attention = look.made_by(linear.inputs["x"], "rms_norm_rope_attention")
    if attention is None or linear.dims["prologue"] != "none":
        return None
    if linear.dims["epilogue"] not in ("none", "add"):
        return f"the product has the epilogue {linear.dims['epilogue']}"
    kept = {name: linear.dims[name] for name in ("K", "N", "format", "bias", "epilogue")}
    dims = resolve("rms_norm_rope_attention_linear", {**attention.dims, **kept})
    inputs = {**attention.inputs, **{name: of for name, of in linear.inputs.items() if name not in ("x", "batch")}}
    outputs = {**attention.outputs, **linear.outputs}
    node = Node("rms_norm_rope_attention_linear", dims, inputs, outputs, linear.layer)
    return _only_here(look, attention.out) or Rewrite((attention, linear), (node,))


def _linear_rounded(look: Look, linear: Node) -> Answer:
    """Inputs are rounded once, by the product that makes them, and not by every workgroup that reads them."""
    if linear.dims["tokens"] > 1 or linear.dims["batched"] or linear.dims["prologue"] != "none":
        return None
    gated = look.made_by(linear.inputs["x"], "linear")
    if gated is None or gated.dims["epilogue"] not in ("silu_mul", "gelu_mul"):
        return None
    if linear.dims["K"] % 32:
        return f"{linear.dims['K']} inputs are not whole blocks of 32"
    first = replace(gated, dims=resolve("linear", {**gated.dims, "rounded": True}))
    second = replace(linear, dims=resolve("linear", {**linear.dims, "prologue": "rounded"}))
    return _only_here(look, gated.out) or Rewrite((gated, linear), (first, second), in_place=True)


def _rms_norm_add_rms_norm(look: Look, norm: Node) -> Answer:
    for key, other in (("b", "a"), ("a", "b")):
        inner = look.made_by(norm.inputs[key], "rms_norm_mul")
        if inner is None or inner.dims["residual"]:
            continue
        different = [name for name in ("heads", "width", "eps") if inner.dims[name] != norm.dims[name]]
        if different:
            return f"what is added is normed differently: {', '.join(different)}"
        weights = {"weight": inner.inputs["weight"], "next_weight": norm.inputs["weight"]}
        inputs = {**norm.inputs, "a": norm.inputs[other], "b": inner.inputs["x"], **weights}
        node = Node("rms_norm_add_rms_norm", norm.dims, inputs, norm.outputs, norm.layer)
        return _only_here(look, inner.out) or Rewrite((inner, norm), (node,))
    return None


def _linear_rope_kv_write(look: Look, rope: Node) -> Answer:
    linear = look.product(rope.inputs["q"], "rms_norm")
    if linear is None:
        return None
    if {rope.inputs[name] for name in "qkv"} != {linear.out}:
        return "queries, keys and values come from different products"
    d = rope.dims
    starts = {"q_first": 0, "k_first": d["Hq"] * d["D"], "v_first": (d["Hq"] + d["Hkv"]) * d["D"]}
    if any(d[name] != start for name, start in starts.items()):
        return "the rows of the product are not queries, keys and values in this order"
    if not d["interleaved"]:
        return "elements of a head that are rotated together do not lie together"
    kept = {name: d[name] for name in ("Hq", "Hkv", "D", "rotary", "cache")}
    dims = resolve("linear", {**linear.dims, **kept, "epilogue": "rope_kv_write"})
    inputs = {**linear.inputs, **{name: rope.inputs[name] for name in ("batch", "table", "k_cache", "v_cache")}}
    node = Node("linear", dims, inputs, rope.outputs, rope.layer)
    return _only_here(look, linear.out) or Rewrite((linear, rope), (node,))


def _not_in_quads(d: dict[str, int]) -> str | None:
    pairs = 4 if d["interleaved"] else 8
    if d["D"] % 4 or d["rotary"] % pairs:
        return f"D must be a multiple of 4 and rotary of {pairs}, they are {d['D']} and {d['rotary']}"
    return None


FUSIONS = (
    Fusion("embedding_scale", "embedding, scale → embedding with a factor", "scale", _embedding_scale),
    Fusion("rms_norm_mul", "rms_norm, mul → rms_norm_mul", "mul", _rms_norm_mul),
    Fusion(
        "linear_silu_mul", "linear gate, linear up, silu_mul → linear, epilogue silu_mul", "silu_mul", _linear_gated
    ),
    Fusion(
        "linear_gelu_mul", "linear gate, linear up, gelu_mul → linear, epilogue gelu_mul", "gelu_mul", _linear_gated
    ),
    Fusion("linear_gelu", "linear, gelu → linear, epilogue gelu", "gelu", _linear_gelu),
    Fusion("linear_gelu_erf", "linear, gelu_erf → linear, epilogue gelu_erf", "gelu_erf", _linear_gelu),
    Fusion(
        "experts_silu_mul",
        "linear_experts gate, linear_experts up, silu_mul → linear_experts, combine silu_mul",
        "silu_mul",
        _experts_gated,
    ),
    Fusion(
        "experts_swiglu_clamped",
        "linear_experts gate, linear_experts up, swiglu_clamped → linear_experts, combine swiglu_clamped",
        "swiglu_clamped",
        _experts_gated,
    ),
    Fusion("experts_add", "linear_experts, combine sum, add → linear_experts with residual", "add", _experts_add),
    Fusion("linear_merge", "linears that read one tensor (q, k, v) → linear, slice", "linear", _linear_merge),
    Fusion("rope_kv_write", "rope q, rope k, kv_write (and slice) → rope_kv_write", "kv_write", _rope_kv_write),
    Fusion(
        "rms_norm_rope_kv_write",
        "rms_norm_mul q, rms_norm_mul k (and slice), rope_kv_write → rms_norm_rope_kv_write",
        "rope_kv_write",
        _rms_norm_rope_kv_write,
    ),
    Fusion(
        "rms_norm_rope_attention",
        "rms_norm_rope_kv_write, attention of one row → rms_norm_rope_attention",
        "attention",
        _rms_norm_rope_attention,
    ),
    Fusion("linear_add", "linear, add → linear, epilogue add", "add", _linear_add),
    Fusion("add_rms_norm", "add, rms_norm_mul → add_rms_norm", "rms_norm_mul", _add_rms_norm),
    Fusion(
        "rms_norm_add_rms_norm",
        "rms_norm_mul, add_rms_norm → rms_norm_add_rms_norm",
        "add_rms_norm",
        _rms_norm_add_rms_norm,
    ),
    Fusion("rms_norm_mul_add", "rms_norm_mul, add → rms_norm_mul with residual", "add", _rms_norm_mul_add),
    Fusion(
        "rms_norm_linear",
        "rms_norm_mul, linears (and linear_experts) → the same, prologue rms_norm",
        "rms_norm_mul",
        _rms_norm_linear,
    ),
    Fusion(
        "rms_norm_add_rms_norm_linear",
        "rms_norm_add_rms_norm, linear → linear, prologue rms_norm_add_rms_norm",
        "rms_norm_add_rms_norm",
        _rms_norm_add_rms_norm_linear,
    ),
    Fusion(
        "linear_rope_kv_write",
        "linear of queries, keys and values, rope_kv_write → linear, epilogue rope_kv_write",
        "rope_kv_write",
        _linear_rope_kv_write,
    ),
    Fusion(
        "rms_norm_rope_attention_linear",
        "rms_norm_rope_attention, linear → rms_norm_rope_attention_linear",
        "linear",
        _rms_norm_rope_attention_linear,
    ),
    Fusion(
        "linear_rounded",
        "linear, epilogue silu_mul or gelu_mul, linear → the same, rounded to 16 bits in between",
        "linear",
        _linear_rounded,
    ),
)
