"""Fusion rules: what becomes what, what is refused and why, and that no subset of them changes results."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile.lowering import Lowering
from shaderlm.errors import InputError, KernelError
from shaderlm.gpu import WEBGPU_DEFAULT
from shaderlm.graph import interpret
from shaderlm.graph.batch import contiguous_batch, make_batch
from shaderlm.graph.chains import Chain, Part
from shaderlm.graph.fuse import FUSIONS, Fusion, GraphIndex, _Match, fuse
from shaderlm.graph.graph import Builder, Graph, Node, Rewrite
from shaderlm.graph.ops import label, resolve
from shaderlm.graph.primitives import REQUIRED
from shaderlm.graph.reference import rope_table
from shaderlm.kernels.registry import first_of
from shaderlm.models.config import StepSpec

from .architectures import TINY, llama

# These models have neither GELU nor experts nor norms of heads nor norms of what is added.
_ABSENT = (
    "gelu",
    "experts",
    "rms_norm_rope",
    "rms_norm_add",
    "rms_norm_mul_add",
    "embedding_scale",
    "short_conv",
    "delta",
    "mamba2",
    "rms_norm_silu",
    "sigmoid",
    "attend_spans",
)
NAMES = [fusion.name for fusion in FUSIONS if not any(part in fusion.name for part in _ABSENT)]


def ops(graph: Graph) -> Counter[str]:
    """Nodes by op, products with their prologue and epilogue."""
    return Counter(label(node.op, node.dims) for node in graph.nodes)


def build(tokens: int = 3, **options: Any) -> Graph:
    made, config = llama(**options)
    return made.build(config, StepSpec(tokens))


def head(tokens: int = 3, rows: int = 1) -> Graph:
    made, config = llama()
    return made.head(config, rows, tokens)


def test_a_layer_becomes_five_nodes() -> None:
    graph, rejected = fuse(build())
    layers = TINY[0]
    assert rejected == ()
    assert ops(graph) == {
        "embedding": 1,
        "rms_norm+linear+rope_kv_write": layers,  # q, k and v as one
        "attention": layers,
        "linear+add": 2 * layers,
        "rms_norm+linear+silu_mul": layers,
    }


@pytest.mark.parametrize(("tokens", "nodes"), [(1, {}), (3, {"take_rows": 1})])
def test_a_head_becomes_one_product_of_the_rows_that_give_logits(tokens: int, nodes: dict[str, int]) -> None:
    graph, rejected = fuse(head(tokens))
    assert rejected == ()
    assert ops(graph) == {"rms_norm+linear": 1, **nodes}


def test_what_cannot_be_run_is_not_fused() -> None:
    """The one who will run the graph may refuse a node, and is quoted."""

    def unsupported_reason(node: Node) -> str | None:
        return "no" if label(node.op, node.dims) == "rms_norm+linear" else None

    graph, rejected = fuse(build(), unsupported_reason=unsupported_reason)
    assert ops(graph)["rms_norm+linear"] == ops(graph)["rms_norm+linear+rope_kv_write"] == 0
    assert ops(graph)["rms_norm+linear+silu_mul"] == TINY[0]
    assert [(r.fusion, r.reason) for r in rejected] == [("rms_norm_linear", "no")] * TINY[0]
    assert [(r.fusion, r.reason) for r in fuse(head(), None, unsupported_reason)[1]] == [("rms_norm_linear", "no")]


def test_a_norm_that_others_read_too_is_not_folded() -> None:
    b = Builder()
    b.tensor("x", 1, 32, role="input")
    b.tensor("n", 32, role="weight")
    b.tensor("w", 8, 32, role="weight")
    for name, width in (("normed", 32), ("y", 8), ("sum", 32)):
        b.tensor(name, 1, width)
    b.add("rms_norm_mul", {"tokens": 1, "width": 32}, {"x": "x", "weight": "n"}, "l", out="normed")
    b.add("linear", {"tokens": 1, "K": 32, "N": 8}, {"x": "normed", "weight": "w"}, "l", out="y")
    graph, rejected = fuse(b.graph("y", "normed"))
    assert [node.op for node in graph.nodes] == ["rms_norm_mul", "linear"]
    b.add("add", {"count": 32}, {"a": "normed", "b": "x"}, "l", out="sum")
    graph, more = fuse(b.graph("y", "sum"))
    assert [node.op for node in graph.nodes] == ["rms_norm_mul", "linear", "add"]
    assert [r.reason for r in rejected] == ["normed is also read by the outside"]
    assert [r.reason for r in more] == ["normed is used by 2 nodes", "normed is also read by add"]


def test_without_fusions_the_graph_stays() -> None:
    graph = build()
    assert fuse(graph, ())[0] == graph


POOL = 8  # rows


def values(graph: Graph, tokens: int) -> dict[str, Any]:
    """Random inputs, weights (by part, so that fused and unfused graphs get the same) and states."""

    def part(name: str, shape: tuple[int, ...]) -> Any:
        seed = sum(map(ord, name)) * 7919 % 2**32
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8

    ids = np.arange(tokens) * 7 % TINY[-1]
    found: dict[str, Any] = {"batch": contiguous_batch(0, tokens, ids, outputs=1), "tokens": np.zeros(1, np.uint32)}
    found["rope_table"] = rope_table(np.arange(POOL), TINY[4]).astype(np.float32)
    found["hidden"] = part("hidden", (tokens, TINY[1]))
    found["outputs"] = np.zeros((1, 8), np.uint32)
    found["outputs"][0, 0] = tokens - 1
    for tensor in graph.tensors.values():
        if tensor.role == "weight":
            pieces = [part(each.name, (each.rows, *tensor.shape[1:])) for each in tensor.parts]
            whole = np.stack(pieces, axis=1) if tensor.interleaved else np.concatenate(pieces)
            found[tensor.name] = whole.reshape(tensor.shape)
        elif tensor.role == "state":
            found[tensor.name] = np.zeros((POOL, *tensor.shape[1:]), np.float32)
    return found


def distinct_fusions(graph: Graph, subsets: Iterable[Sequence[str]]) -> list[tuple[Sequence[str], Graph]]:
    """The fused graphs that differ, each with a subset of the fusions that gives it."""
    every = [(subset, fuse(graph, subset)[0]) for subset in subsets]
    return [*{repr(fused): (subset, fused) for subset, fused in every}.values()]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("part", ["build", "head"])
def test_every_subset_of_fusions_computes_the_same(part: str, tokens: int) -> None:
    graph, out = (build(tokens), "hidden") if part == "build" else (head(tokens), "logits")
    given = values(graph, tokens)
    expected = interpret.run(graph, given)[out]
    assert expected.shape == ((tokens, TINY[1]) if part == "build" else (1, TINY[-1]))
    assert np.abs(expected).max() > 0.1
    others = [name for name in NAMES if name != "linear_rounded"]  # which computes what is there already
    subsets = [s for n in range(1, len(others) + 1) for s in itertools.combinations(others, n)] + [tuple(NAMES)]
    states = [name for name, tensor in graph.tensors.items() if tensor.role == "state"]
    for subset, fused in distinct_fusions(graph, subsets):
        own = values(fused, tokens)
        actual = interpret.run(fused, own)[out]
        np.testing.assert_allclose(actual, expected, atol=1e-5, err_msg=str(subset))
        for name in states:
            np.testing.assert_allclose(own[name], given[name], atol=1e-5, err_msg=f"{name} after {subset}")


def test_fused_rows_go_by_the_positions_and_slots_of_their_own() -> None:
    """Rows of several sequences, at other positions than the first row's: rope and cache writes are per row."""
    graph = build(3)
    fused = fuse(graph)[0]
    batch = make_batch([5, 0, 2], [4, 7, 1], 0, [3, 9, 40])
    results = []
    for each in (graph, fused):
        given = values(each, 3) | {"batch": batch}
        results.append((interpret.run(each, given)["hidden"], given["blk.0.k_cache"], given["blk.0.v_cache"]))
    for plain, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, plain, atol=1e-5)
    assert sorted(np.flatnonzero(results[1][1].any(axis=(1, 2)))) == [1, 4, 7]


def _rotated(queries: str, keys: str, written: str) -> Graph:
    """q and k are rotated and k is written, each by the batch of this name."""
    b = Builder()
    for name in dict.fromkeys((queries, keys, written)):
        b.tensor(name, 3, 4, role="input", format="u32")
    for name in ("q", "k", "v"):
        b.tensor(name, 2, 1, 16, role="input")
    b.tensor("table", 1, 8, 2, role="table")
    for name in ("k_cache", "v_cache"):
        b.tensor(name, 1, 1, 16, role="state")
    dims = {"tokens": 2, "H": 1, "D": 16}
    for name, batch in (("q", queries), ("k", keys)):
        b.tensor(f"{name}_rotated", 2, 1, 16)
        b.add("rope", dims, {"x": name, "batch": batch, "table": "table"}, "l", out=f"{name}_rotated")
    caches = {"k_cache": "k_cache", "v_cache": "v_cache"}
    b.add(
        "kv_write",
        {"tokens": 2, "Hkv": 1, "D": 16},
        {"k": "k_rotated", "v": "v", "batch": written, **caches},
        "l",
        **caches,
    )
    b.tensor("out", 2, 16)
    inputs = {"q": "q_rotated", **caches, "batch": written}
    b.add("attention", {"tokens": 2, "Hq": 1, "Hkv": 1, "D": 16}, inputs, "l", out="out")
    return b.graph("out")


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (("one", "one", "one"), None),
        (("one", "two", "two"), "batch differs: two and one"),
        (("one", "one", "two"), "batch differs: two and one"),
    ],
)
def test_rope_and_cache_writes_are_fused_where_they_read_the_same_rows(
    batches: tuple[str, str, str], reason: str | None
) -> None:
    graph, rejected = fuse(_rotated(*batches))
    assert [each.reason for each in rejected] == ([reason] if reason else [])
    assert ops(graph)["rope_kv_write"] == (0 if reason else 1)


@pytest.mark.parametrize("name", NAMES)
def test_each_fusion_changes_the_graph(name: str) -> None:
    before_it = {
        "add_rms_norm": ["rms_norm_mul"],
        "rms_norm_linear": ["rms_norm_mul"],
        "linear_rope_kv_write": ["rms_norm_mul", "linear_merge", "rope_kv_write", "rms_norm_linear"],
        "linear_rounded": ["linear_silu_mul"],
    }
    needs = [*before_it.get(name, []), name]
    tokens = 1 if name == "linear_rounded" else 3
    before = fuse(build(tokens), needs[:-1])[0]
    assert fuse(build(tokens), needs)[0].nodes != before.nodes


def test_mixed_formats_merge_what_they_can_and_say_what_not() -> None:
    graph, rejected = fuse(build(formats={"attn_v": "f16", "ffn_up": "f16"}))
    count = ops(graph)
    assert count["linear+silu_mul"] == count["rms_norm+linear+silu_mul"] == 0
    assert count["rms_norm+linear"] == TINY[0] * 4  # q+k, v, gate, up in each layer
    assert count["rope_kv_write"] == TINY[0]
    said = [f"{rejection.fusion} {rejection.layer} {rejection.reason}" for rejection in rejected]
    gate = "blk.1.ffn_gate.weight is q4_0, blk.1.ffn_up.weight is f16"
    assert f"linear_silu_mul blk.1 formats differ: {gate}" in said
    assert f"linear_merge blk.1 formats differ: {gate}" in said
    assert any("linear_merge blk.0" in line and "attn_v.weight is f16" in line for line in said)


def test_heads_that_are_no_quads_keep_their_rope() -> None:
    graph, rejected = fuse(
        build(shape=(2, 64, 4, 2, 6, 96, 300), kind="f32"), None, Lowering(WEBGPU_DEFAULT).unsupported_reason
    )
    assert ops(graph)["rope_kv_write"] == 0
    assert ops(graph)["rope"] == 4
    assert next(r.reason for r in rejected if r.fusion == "rope_kv_write") == "quads: rotary % 4 must be 0, rotary is 6"


def test_a_tensor_that_others_read_is_not_fused_away() -> None:
    b = Builder()
    b.tensor("x", 2, 8, role="input")
    b.tensor("w", 8, role="weight")
    for name in ("n", "m", "twice"):
        b.tensor(name, 2, 8)
    b.add("rms_norm", {"tokens": 2, "width": 8}, {"x": "x"}, "l", out="n")
    b.add("mul", {"count": 16, "period": 8}, {"a": "n", "b": "w"}, "l", out="m")
    b.add("add", {"count": 16}, {"a": "n", "b": "m"}, "l", out="twice")
    graph, rejected = fuse(b.graph("twice"))
    assert ops(graph)["rms_norm"] == 1
    assert [(rejection.fusion, rejection.reason) for rejection in rejected] == [
        ("rms_norm_mul", "n is used by 2 nodes")
    ]


@pytest.mark.parametrize("read_by", ["add", "the outside"])
def test_a_rule_that_does_not_look_for_readers_breaks_no_graph(read_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder()
    b.tensor("x", 2, 8, role="input")
    b.tensor("w", 8, role="weight")
    for name in ("n", "m", "twice"):
        b.tensor(name, 2, 8)
    b.add("rms_norm", {"tokens": 2, "width": 8}, {"x": "x"}, "l", out="n")
    b.add("mul", {"count": 16, "period": 8}, {"a": "n", "b": "w"}, "l", out="m")
    if read_by == "add":
        b.add("add", {"count": 16}, {"a": "n", "b": "m"}, "l", out="twice")
    graph = b.graph("twice") if read_by == "add" else b.graph("n", "m")

    def takes_the_norm_out(index: GraphIndex, mul: Node) -> Rewrite:
        return Rewrite((index.producers["n"], mul), (replace(mul, inputs={**mul.inputs, "a": "x"}),))

    monkeypatch.setattr("shaderlm.graph.fuse.FUSIONS", (Fusion("careless", "mul", takes_the_norm_out),))
    fused, rejected = fuse(graph)
    assert ops(fused) == ops(graph)
    assert [each.reason for each in rejected] == ["n is used by others"]


def test_an_unknown_fusion_is_named() -> None:
    with pytest.raises(
        InputError, match=r"unknown fusion \['rms_norm_mull'\]; there are embedding_scale, rms_norm_mul"
    ):
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


# Graphs that no model has ---------------------------------------------------------------------------------------


class Small:
    """Builds graphs over tensors [4, 32]. An op gets its operands by name, and the name of its result."""

    def __init__(self) -> None:
        self.b = Builder()
        for name in ("x", "y"):
            self.b.tensor(name, 4, 32, role="input")
        self.b.tensor("batch", 5, 4, role="input", format="u32")

    def add(self, op: str, out: str, dims: dict[str, Any] | None = None, width: int = 32, **operands: str) -> Small:
        sizes: dict[str, dict[str, Any]] = {
            "linear": {"tokens": 4, "K": 32, "N": width},
            "rms_norm_mul": {"tokens": 4, "width": 32},
        }
        for name, operand in operands.items():
            if name == "weight":
                self.b.tensor(operand, *((width, 32) if op == "linear" else (32,)), role="weight")
        self.b.tensor(out, 4, width)
        self.b.add(op, {**sizes.get(op, {"tokens": 4, "count": 4 * width}), **(dims or {})}, operands, "l", out=out)
        return self

    def graph(self, *outputs: str) -> Graph:
        return self.b.graph(*outputs)


BATCHED = {"batched": True}
SMALL = {
    "a product and itself": Small().add("linear", "a", x="x", weight="w").add("add", "out", a="a", b="a").graph("out"),
    "a norm and itself": Small()
    .add("rms_norm_mul", "a", x="x", weight="n")
    .add("add", "out", a="a", b="a")
    .graph("out"),
    "two norms of a sum": Small()
    .add("add", "s", a="x", b="y")
    .add("rms_norm_mul", "a", x="s", weight="n")
    .add("rms_norm_mul", "b", x="s", weight="m")
    .add("mul", "out", a="a", b="b")
    .graph("out"),
    "a sum that is read before its norm": Small()
    .add("add", "s", a="x", b="y")
    .add("gelu", "g", x="s")
    .add("rms_norm_mul", "a", x="s", weight="n")
    .add("mul", "out", a="a", b="g")
    .graph("out"),
    "products that are read in between": Small()
    .add("linear", "q", x="x", weight="w")
    .add("gelu", "g", x="q")
    .add("linear", "k", x="x", weight="v")
    .add("mul", "out", a="g", b="k")
    .graph("out"),
    "gate and up are one": Small()
    .add("linear", "g", x="x", weight="w")
    .add("silu_mul", "out", a="g", b="g")
    .graph("out"),
    "a norm as input and residual": Small()
    .add("rms_norm_mul", "n", x="x", weight="m")
    .add("linear", "a", x="n", weight="w")
    .add("add", "out", a="n", b="a")
    .graph("out"),
    "only the sum is batched": Small()
    .add("linear", "a", x="x", weight="w")
    .add("add", "out", BATCHED, a="y", b="a", batch="batch")
    .graph("out"),
}


@pytest.mark.parametrize("name", SMALL)
def test_graphs_that_no_model_has_stay_right(name: str) -> None:
    """What cannot be one node stays several. A fused node that asks for the true number of rows has the batch."""
    graph = SMALL[name]
    fused = fuse(graph)[0]
    for node in fused.nodes:
        assert not node.dims.get("batched") or "batch" in node.inputs
    results = []
    for each in (graph, fused):
        rng = np.random.default_rng(5)
        given: dict[str, Any] = {"batch": contiguous_batch(0, 4)}
        given |= {part: rng.standard_normal((4, 32)).astype(np.float32) for part in ("x", "y")}
        given |= {part: rng.standard_normal((32, 32)).astype(np.float32) for part in ("w", "v")}
        given |= {part: rng.standard_normal(32).astype(np.float32) for part in ("n", "m")}
        for tensor in each.tensors.values():
            if len(tensor.parts) > 1:
                given[tensor.name] = np.concatenate([given[part.name] for part in tensor.parts])
        results.append(interpret.run(each, given)["out"])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_a_chain_of_values_has_the_rows_of_its_batch() -> None:
    """Of ops that take every value by itself, those that ask for the true number of rows say how many there are."""
    parts = Part("scale", "x -> out=scaled"), Part("add", "a=residual b=scaled batch -> out")
    match = _Match(Chain("scale_add", parts, {"tokens": 1, "count": REQUIRED, "factor": REQUIRED, "batched": False}))
    graph = SMALL["only the sum is batched"]
    assert match.take(parts[1], graph.nodes[-1])
    assert (match.dims["tokens"], match.dims["batched"]) == (4, True)


def test_gate_and_up_have_as_many_columns() -> None:
    made = Small().add("linear", "g", width=32, x="x", weight="w").add("linear", "u", width=8, x="x", weight="v")
    graph = made.add("silu_mul", "out", {"count": 128, "period": 32}, a="g", b="u").graph("out")
    _, rejected = fuse(graph, ["linear_silu_mul"])
    assert [each.reason for each in rejected] == ["g has 32 columns, u 8"]


def test_a_sum_that_repeats_one_operand_is_left_alone() -> None:
    graph = Small().add("linear", "a", x="x", weight="w").add("add", "out", {"period": 32}, a="y", b="a").graph("out")
    _, rejected = fuse(graph, ["linear_add"])
    assert [each.reason for each in rejected] == ["period of add is 32, not 128"]


def test_columns_apart_are_not_copied_by_a_kernel_for_neighbours() -> None:
    dims = resolve("slice", {"tokens": 2, "width": 8, "count": 4, "step": 2})
    assert "step is 2" in str(first_of("slice", dims, WEBGPU_DEFAULT, "exact"))
