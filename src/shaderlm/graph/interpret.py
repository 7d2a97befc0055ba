"""Runs any graph in NumPy, node by node, with the formulas that every kernel is compared with.

In float32. Slow and obvious; what it is given as weights are dense arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import reference
from .graph import Graph, Node

Array = NDArray[Any]
Operands = Mapping[str, Array]


def run(graph: Graph, values: MutableMapping[str, Array]) -> dict[str, Array]:
    """The graph's outputs. `values` holds its inputs, weights and states; states are changed in place."""
    known: dict[str, Array] = {}
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs.values()}
    with reference.single():
        for i, node in enumerate(graph.nodes):
            operands = {k: known[n] if n in known else values[n] for k, n in node.inputs.items()}
            results = FORMULAS[node.op](node, operands)
            for key, name in node.outputs.items():
                if key in results:
                    known[name] = results[key].reshape(graph.tensors[name].shape)
            for name in node.inputs.values():
                if last[name] == i and name not in graph.outputs:
                    known.pop(name, None)
    return {name: known[name] for name in graph.outputs}


def _pos(x: Operands) -> int:
    return int(x["positions"][0])


def _heads(array: Array, heads: int, width: int) -> Array:
    return array.reshape(len(array), heads, width)


def _linear(node: Node, x: Operands) -> dict[str, Array]:
    return {"out": reference.linear(x["x"], x["weight"], x.get("bias"))}


def _linear_add(node: Node, x: Operands) -> dict[str, Array]:
    return {"out": reference.linear_add(x["x"], x["weight"], x["residual"], x.get("bias"))}


def _linear_silu_mul(node: Node, x: Operands) -> dict[str, Array]:
    return {"out": reference.linear_silu_mul(x["x"], x["weight"], x.get("bias"))}


def _rms_norm_linear(node: Node, x: Operands) -> dict[str, Array]:
    formula = getattr(reference, node.op)
    return {"out": formula(x["x"], x["norm_weight"], x["weight"], x.get("bias"), node.dims["eps"])}


def _add_rms_norm(node: Node, x: Operands) -> dict[str, Array]:
    total, out = reference.add_rms_norm(x["a"], x["b"], x["weight"], node.dims["eps"])
    return {"sum": total, "out": out}


def _rope(node: Node, x: Operands) -> dict[str, Array]:
    d = node.dims
    heads = _heads(x["x"], d["H"], d["D"])
    return {"out": reference.rope(heads, x["table"][x["positions"]], d["interleaved"])}


def _kv_write(node: Node, x: Operands) -> dict[str, Array]:
    d = node.dims
    k, v = (_heads(x[name], d["Hkv"], d["D"]) for name in "kv")
    reference.kv_write(k, v, x["k_cache"], x["v_cache"], _pos(x))
    return {}


def _attention(node: Node, x: Operands) -> dict[str, Array]:
    q = _heads(x["q"], node.dims["Hq"], node.dims["D"])
    return {"out": reference.attention(q, x["k_cache"], x["v_cache"], _pos(x), node.dims["scale"])}


def _rope_kv_write(node: Node, x: Operands) -> dict[str, Array]:
    d, pos = node.dims, _pos(x)
    table = x["table"][pos : pos + d["T"]]
    part = {}
    for name, heads in (("q", d["Hq"]), ("k", d["Hkv"]), ("v", d["Hkv"])):
        columns = x[name].reshape(d["T"], -1)[:, d[f"{name}_first"] :][:, : heads * d["D"]]
        part[name] = _heads(columns, heads, d["D"])
    turned = reference.rope(part["k"], table, d["interleaved"])
    reference.kv_write(turned, part["v"], x["k_cache"], x["v_cache"], pos)
    return {"out": reference.rope(part["q"], table, d["interleaved"])}


def _rms_norm_linear_rope_kv_write(node: Node, x: Operands) -> dict[str, Array]:
    d, pos = node.dims, _pos(x)
    y = reference.rms_norm_linear(x["x"], x["norm_weight"], x["weight"], x.get("bias"), d["eps"])
    parts = np.split(y, [d["Hq"] * d["D"], (d["Hq"] + d["Hkv"]) * d["D"]], axis=1)
    q, k, v = (_heads(part, heads, d["D"]) for part, heads in zip(parts, (d["Hq"], d["Hkv"], d["Hkv"]), strict=True))
    table = x["table"][pos : pos + d["M"]]
    reference.kv_write(reference.rope(k, table, True), v, x["k_cache"], x["v_cache"], pos)
    return {"out": reference.rope(q, table, True)}


def _columns(node: Node, x: Operands) -> dict[str, Array]:
    d = node.dims
    return {"out": x["x"].reshape(d["rows"], d["width"])[:, d["first"] : d["first"] + d["count"]]}


def _next_position(node: Node, x: Operands) -> dict[str, Array]:
    reference.next_position(x["positions"], node.dims["by"])
    return {}


FORMULAS: Mapping[str, Callable[[Node, Operands], dict[str, Array]]] = {
    "embedding": lambda node, x: {"out": reference.embedding(x["ids"], x["weight"])},
    "rms_norm": lambda node, x: {"out": reference.rms_norm(x["x"], node.dims["eps"])},
    "rms_norm_mul": lambda node, x: {"out": reference.rms_norm_mul(x["x"], x["weight"], node.dims["eps"])},
    "add_rms_norm": _add_rms_norm,
    "mul": lambda node, x: {"out": reference.mul(x["a"], x["b"])},
    "add": lambda node, x: {"out": reference.add(x["a"], x["b"])},
    "silu_mul": lambda node, x: {"out": reference.silu_mul(x["a"], x["b"])},
    "linear": _linear,
    "linear_add": _linear_add,
    "linear_silu_mul": _linear_silu_mul,
    "rms_norm_linear": _rms_norm_linear,
    "rms_norm_linear_silu_mul": _rms_norm_linear,
    "rope": _rope,
    "kv_write": _kv_write,
    "attention": _attention,
    "rope_kv_write": _rope_kv_write,
    "rms_norm_linear_rope_kv_write": _rms_norm_linear_rope_kv_write,
    "columns": _columns,
    "argmax": lambda node, x: {"out": np.asarray(reference.argmax(x["x"]))},
    "next_position": _next_position,
}
