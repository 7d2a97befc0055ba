"""Fusion rules: what becomes what, what is refused and why, and that no subset of them changes results."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shaderlm.errors import InputError, KernelError
from shaderlm.graph import interpret
from shaderlm.graph.fuse import FUSIONS, fuse
from shaderlm.graph.graph import Builder, Graph, Node, Rewrite
from shaderlm.graph.reference import rope_table
from shaderlm.models.architecture import Step

from .architectures import TINY, llama

NAMES = [fusion.name for fusion in FUSIONS]


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def build(rows: int = 3, **options: Any) -> Graph:
    made, config = llama(**options)
    return made.build(config, Step(rows, 8))


def test_a_layer_becomes_five_nodes() -> None:
    graph, rejected = fuse(build())
    layers = TINY[0]
    assert rejected == ()
    assert ops(graph) == {
        "embedding": 1,
        "rms_norm_linear_rope_kv_write": layers,  # q, k and v as one
        "rms_norm_linear": 1,  # the output matrix
        "attention": layers,
        "linear_add": 2 * layers,
        "rms_norm_linear_silu_mul": layers,
        "columns": 1,  # the last row
    }


def test_what_cannot_be_run_is_not_fused() -> None:
    """The one who will run the graph may refuse a node, and is quoted."""
    graph, rejected = fuse(build(), unsupported_reason=lambda node: "no" if node.op == "rms_norm_linear" else None)
    assert ops(graph)["rms_norm_linear"] == ops(graph)["rms_norm_linear_rope_kv_write"] == 0
    assert ops(graph)["rms_norm_linear_silu_mul"] == TINY[0]
    assert [(r.fusion, r.reason) for r in rejected] == [("rms_norm_linear", "no")] * (TINY[0] + 1)


def test_a_norm_that_others_read_too_is_not_folded() -> None:
    b = Builder()
    b.tensor("x", 1, 32, role="input")
    b.tensor("n", 32, role="weight")
    b.tensor("w", 8, 32, role="weight")
    for name, width in (("normed", 32), ("y", 8), ("sum", 32)):
        b.tensor(name, 1, width)
    b.add("rms_norm_mul", {"rows": 1, "width": 32}, {"x": "x", "weight": "n"}, "l", out="normed")
    b.add("linear", {"M": 1, "K": 32, "N": 8}, {"x": "normed", "weight": "w"}, "l", out="y")
    graph, rejected = fuse(b.graph("y", "normed"))
    assert [node.op for node in graph.nodes] == ["rms_norm_mul", "linear"]
    b.add("add", {"count": 32}, {"a": "normed", "b": "x"}, "l", out="sum")
    graph, more = fuse(b.graph("y", "sum"))
    assert [node.op for node in graph.nodes] == ["rms_norm_mul", "linear", "add"]
    assert [r.reason for r in (*rejected, *more)] == [f"normed is also read by {who}" for who in ("the outside", "add")]


def test_without_fusions_the_graph_stays() -> None:
    graph = build()
    assert fuse(graph, ())[0] == graph


def values(graph: Graph, rows: int) -> dict[str, Any]:
    """Random inputs, weights (by part, so that fused and unfused graphs get the same) and states."""

    def part(name: str, shape: tuple[int, ...]) -> Any:
        seed = sum(map(ord, name)) * 7919 % 2**32
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8

    found: dict[str, Any] = {"ids": np.arange(rows) * 7 % TINY[-1], "positions": np.arange(rows)}
    found["rope_table"] = rope_table(np.arange(8), TINY[4]).astype(np.float32)
    for tensor in graph.tensors.values():
        if tensor.role == "weight":
            pieces = [part(n, (r, *tensor.shape[1:])) for n, r in zip(tensor.parts, tensor.part_rows, strict=True)]
            whole = np.stack(pieces, axis=1) if tensor.interleaved else np.concatenate(pieces)
            found[tensor.name] = whole.reshape(tensor.shape)
        elif tensor.role == "state":
            found[tensor.name] = np.zeros(tensor.shape, np.float32)
    return found


@pytest.mark.parametrize("rows", [1, 3])
def test_every_subset_of_fusions_computes_the_same(rows: int) -> None:
    graph = build(rows)
    expected = interpret.run(graph, values(graph, rows))["logits"]
    assert expected.shape == (1, TINY[-1])
    assert np.abs(expected).max() > 0.1
    subsets = [s for n in range(1, len(NAMES) + 1) for s in itertools.combinations(NAMES, n)]
    for subset in subsets:
        fused = fuse(graph, subset)[0]
        actual = interpret.run(fused, values(fused, rows))["logits"]
        np.testing.assert_allclose(actual, expected, atol=1e-5, err_msg=str(subset))


@pytest.mark.parametrize("name", NAMES)
def test_each_fusion_changes_the_graph(name: str) -> None:
    before_it = {
        "add_rms_norm": ["rms_norm_mul"],
        "rms_norm_linear": ["rms_norm_mul"],
        "rms_norm_linear_rope_kv_write": ["rms_norm_mul", "linear_merge", "rope_kv_write", "rms_norm_linear"],
    }
    needs = [*before_it.get(name, []), name]
    before = fuse(build(), needs[:-1])[0]
    assert fuse(build(), needs)[0].nodes != before.nodes


def test_mixed_formats_merge_what_they_can_and_say_what_not() -> None:
    graph, rejected = fuse(build(formats={"attn_v": "f16", "ffn_up": "f16"}))
    count = ops(graph)
    assert count["linear_silu_mul"] == count["rms_norm_linear_silu_mul"] == 0
    assert count["rms_norm_linear"] == TINY[0] * 4 + 1  # q+k, v, gate, up in each layer; the output matrix
    assert count["rope_kv_write"] == TINY[0]
    said = [f"{rejection.fusion} {rejection.layer} {rejection.reason}" for rejection in rejected]
    gate = "blk.1.ffn_gate.weight is q4_0, blk.1.ffn_up.weight is f16"
    assert f"linear_silu_mul blk.1 formats differ: {gate}" in said
    assert f"linear_merge blk.1 formats differ: {gate}" in said
    assert any("linear_merge blk.0" in line and "attn_v.weight is f16" in line for line in said)


def test_heads_that_are_no_quads_keep_their_rope() -> None:
    graph, rejected = fuse(build(shape=(2, 64, 4, 2, 6, 96, 300), kind="f32"))
    assert ops(graph)["rope_kv_write"] == 0
    assert ops(graph)["rope"] == 4
    assert "multiple of 4" in next(r.reason for r in rejected if r.fusion == "rope_kv_write")


def test_a_tensor_that_others_read_is_not_fused_away() -> None:
    b = Builder()
    b.tensor("x", 2, 8, role="input")
    b.tensor("w", 8, role="weight")
    for name in ("n", "m", "twice"):
        b.tensor(name, 2, 8)
    b.add("rms_norm", {"rows": 2, "width": 8}, {"x": "x"}, "l", out="n")
    b.add("mul", {"count": 16, "period": 8}, {"a": "n", "b": "w"}, "l", out="m")
    b.add("add", {"count": 16}, {"a": "n", "b": "m"}, "l", out="twice")
    graph, rejected = fuse(b.graph("twice"))
    assert ops(graph)["rms_norm"] == 1
    assert [(rejection.fusion, rejection.reason) for rejection in rejected] == [
        ("rms_norm_mul", "n is used by 2 nodes")
    ]


def test_an_unknown_fusion_is_named() -> None:
    with pytest.raises(InputError, match=r"unknown fusion \['rms_norm_mull'\]; there are rms_norm_mul"):
        fuse(build(), ["rms_norm_mull"])


def test_a_graph_that_reads_before_it_writes_is_refused() -> None:
    b = Builder()
    b.tensor("x", 4)
    b.tensor("y", 4)
    b.add("copy", {"count": 4}, {"x": "x"}, "l", out="y")
    with pytest.raises(KernelError, match="reads \\['x'\\] before it is made"):
        b.graph("y")


def test_a_tensor_is_made_once() -> None:
    graph = build()
    again = graph.rewritten([Rewrite((graph.nodes[0],), (graph.nodes[0], graph.nodes[0]))])
    with pytest.raises(KernelError, match="a second time"):
        again.check()


def test_an_output_must_be_made() -> None:
    graph = build()
    with pytest.raises(KernelError, match="no node makes the output"):
        Graph(graph.tensors, graph.nodes[:-1], graph.outputs).check()


def test_an_operand_must_be_declared() -> None:
    b = Builder()
    with pytest.raises(KernelError, match="copy has no operands"):
        b.add("copy", {"count": 4}, {"y": "x"}, "l", out="y")


def test_the_interpreter_has_a_formula_for_every_op_of_a_graph() -> None:
    seen = {node.op for subset in ((), NAMES) for node in fuse(build(), subset)[0].nodes}
    assert seen | {"add_rms_norm"} <= set(interpret.FORMULAS)
    assert isinstance(fuse(build())[0].nodes[0], Node)
