"""Fusions of norms: of heads before rope, and of what is added. Gemma 3 has both, and two tables of rope."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.synthetic import RandomWeights, _pool, config_of, load_synthetic
from shaderlm.gpu import Device
from shaderlm.gpu.policy import ON_GPU
from shaderlm.graph import interpret
from shaderlm.graph.batch import CONTEXTS, contiguous_batch
from shaderlm.graph.fuse import fuse
from shaderlm.graph.graph import Builder, Graph
from shaderlm.graph.ops import label
from shaderlm.graph.reference import rope_table
from shaderlm.kernels.linear.measured import MOST, Shape
from shaderlm.models.config import StepSpec
from shaderlm.models.shapes import SYNTHETIC
from shaderlm.runtime.gpu_runner import GpuRunner

from .session import Session

LAYERS, D = 2, 16
SIZES: dict[str, Any] = {"layers": LAYERS, "hidden": 64, "Hq": 4, "Hkv": 2, "D": D, "ffn": 96, "vocab": 40}
# What there is something to do for, once norms have their weights.
NAMES = (
    "linear_gelu_mul",
    "linear_merge",
    "rope_kv_write",
    "rms_norm_rope_kv_write",
    "linear_add",
    "add_rms_norm",
    "rms_norm_add_rms_norm",
    "rms_norm_linear",
    "rms_norm_add_rms_norm_linear",
)


def build(tokens: int) -> Graph:
    further = {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
    kind, config = config_of(replace(SYNTHETIC["gemma-3-1b"], **SIZES, further=further), "q8_0")
    return kind.build(config, StepSpec(tokens))


# A layer with a window and one without, and the same with the keys and values of these.
GEMMA4_SIZES: dict[str, Any] = {
    **SIZES,
    "layers": 4,
    "D": 2 * D,
    "vectors": {"rope_freqs.weight": D},
    "further": {
        **SYNTHETIC["gemma-4-4b"].further,
        "attention.sliding_window": 4,
        "attention.sliding_window_pattern": 2,
        "attention.key_length_swa": D,
        "attention.value_length_swa": D,
        "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 32,
    },
}


def build_gemma4(tokens: int) -> Graph:
    kind, config = config_of(replace(SYNTHETIC["gemma-4-4b"], **GEMMA4_SIZES), "q8_0")
    return kind.build(config, StepSpec(tokens))


def labels(graph: Graph) -> Counter[str]:
    return Counter(label(node.op, node.dims) for node in graph.nodes)


def values(graph: Graph, tokens: int) -> dict[str, Any]:
    """A batch, random weights (by part, so that fused and unfused graphs get the same) and two positions in caches."""

    def part(name: str, shape: tuple[int, ...]) -> Any:
        seed = sum(map(ord, name)) * 7919 % 2**32
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8

    found: dict[str, Any] = {"batch": contiguous_batch(2, tokens, np.arange(tokens) * 7 % SIZES["vocab"])}
    found |= {"tokens": np.zeros(1, np.uint32), "page_table": np.zeros(1, np.uint32)}
    for name, theta in (("rope_table", 10000.0), ("rope_table_local", 100.0)):
        width = 2 * graph.tensors[name].shape[1]
        found[name] = rope_table(np.arange(8), width, theta).astype(np.float32)
    for tensor in graph.tensors.values():
        if tensor.role == "weight":
            pieces = [part(each.name, (each.rows, *tensor.shape[1:])) for each in tensor.parts]
            whole = np.stack(pieces, axis=1) if tensor.interleaved else np.concatenate(pieces)
            found[tensor.name] = whole.reshape(tensor.shape)
        elif tensor.role == "state":
            found[tensor.name] = part(tensor.name, (8, *tensor.shape[1:]))
    return found


@pytest.mark.parametrize("tokens", [1, 3])
def test_every_subset_of_fusions_computes_the_same(tokens: int) -> None:
    graph = build(tokens)
    given = values(graph, tokens)
    caches = [name for name, tensor in graph.tensors.items() if tensor.role == "state"]
    expected = interpret.run(graph, given)["hidden"]
    assert np.abs(expected).max() > 0.1
    # With the last ones, which need most of the others, and without.
    more = ("embedding_scale", "rms_norm_rope_attention", "rms_norm_mul_add", "rms_norm_rope_attention_linear")
    subsets = [s for n in range(len(NAMES) + 1) for s in itertools.combinations(NAMES, n)]
    for subset in (*subsets, *((*NAMES, *s) for n in range(5) for s in itertools.combinations(more, n))):
        fused = fuse(graph, ("rms_norm_mul", *subset))[0]
        mine = values(fused, tokens)
        np.testing.assert_allclose(interpret.run(fused, mine)["hidden"], expected, atol=1e-5, err_msg=str(subset))
        for name in caches:
            np.testing.assert_allclose(mine[name], given[name], atol=1e-5, err_msg=f"{name}, {subset}")


def test_norms_take_one_dispatch_with_what_they_belong_to() -> None:
    graph, rejected = fuse(build(1))
    assert rejected == ()
    assert labels(graph) == {
        "embedding": 1,
        "rms_norm+linear": 1,  # of the first layer, to which nothing was added
        "rms_norm_add_rms_norm+linear": LAYERS - 1,
        "rms_norm_rope_attention_linear": LAYERS,
        "linear": LAYERS,
        "rms_norm_add_rms_norm+linear+gelu_mul": LAYERS,
        "rms_norm_mul": 1,  # after the last layer, with its residual
    }


# Of Gemma 4 alone: what each may have before it, to find something.
GEMMA4: dict[str, tuple[str, ...]] = {
    "linear_gelu_residual": (),
    "rms_norm_mul_add_mul": ("rms_norm_mul", "rms_norm_mul_add"),
    "rms_norm_rope": ("rms_norm_mul",),
    "rms_norm_add_linear": ("rms_norm_mul", "rms_norm_mul_add"),
}


@pytest.mark.parametrize("tokens", [1, 3])
def test_each_fusion_of_gemma_4_computes_the_same(tokens: int) -> None:
    graph = build_gemma4(tokens)
    given = values(graph, tokens)
    caches = [name for name, tensor in graph.tensors.items() if tensor.role == "state"]
    expected = interpret.run(graph, given)["hidden"]
    assert np.abs(expected).max() > 0.1
    for name, before in GEMMA4.items():
        fused, without = fuse(graph, (*before, name))[0], fuse(graph, before)[0]
        assert len(fused.nodes) < len(without.nodes), name
    for fusions in (*((*before, name) for name, before in GEMMA4.items()), None):
        fused = fuse(graph, fusions)[0]
        mine = values(fused, tokens)
        np.testing.assert_allclose(interpret.run(fused, mine)["hidden"], expected, atol=2e-5, err_msg=str(fusions))
        for name in caches:
            np.testing.assert_allclose(mine[name], given[name], atol=1e-5, err_msg=f"{name}, {fusions}")


@pytest.mark.long
def test_the_plan_of_a_gpu_computes_the_same(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU decodes, also past the window: norms as a prologue, attention in splits, rounding between products."""
    further = {"attention.sliding_window": 6, "attention.sliding_window_pattern": 2}
    sizes = {**SIZES, "D": 64, "context": 512, "further": further}
    monkeypatch.setitem(SYNTHETIC, "small", replace(SYNTHETIC["gemma-3-1b"], **sizes))
    monkeypatch.setitem(vars(device.caps), "policy", replace(ON_GPU, check_bounds=True))
    shape = Shape((SIZES["hidden"], SIZES["hidden"]), (1, MOST))
    monkeypatch.setattr("shaderlm.kernels.linear.rounded.AFTER_ROUNDING", (shape,))
    found, written = [], []
    for fusions in (None, ("rms_norm_mul",)):
        runner = load_synthetic("synthetic:small:q4_0", device, fusions=fusions, tune=False).runner
        try:
            assert isinstance(runner, GpuRunner)
            nodes = runner.graph(StepSpec(1, cache=runner.cache))[0].nodes
            assert sum(node.dims.get("rounded", False) for node in nodes) == (LAYERS if fusions is None else 0)
            assert sum(node.dims.get("prologue") == "int16_activations" for node in nodes) == (
                LAYERS if fusions is None else 0
            )
            ops = {label(node.op, node.dims) for node in nodes}
            assert ("rms_norm_add_rms_norm+linear" in ops) == (fusions is None)
            assert ("rms_norm_rope_attention_linear" in ops) == (fusions is None)
            session = Session(runner)
            tokens = [session.sample([1, 2, 3]), *(session.advance() for _ in range(8))]
            written.append([token.wait() for token in tokens])
            found.append([session.logits([i]) for i in range(3)])  # over the keys and values of all of them
            session.close()
        finally:
            runner.close()
    assert written[0] == written[1]
    assert np.std(found[1]) > 0.1
    np.testing.assert_allclose(found[0], found[1], atol=1e-3)  # inputs of products are rounded to 16 bits


def _rows_by_name(source: RandomWeights, name: str, kind: str, first: int, end: int) -> Any:
    """Of random weights, the same rows in whatever pieces they are asked for: fused products ask for others."""
    rows, columns = source._shapes[name]
    return _pool(kind, rows + zlib.crc32(name.encode()) % 97, columns)[first:end]


@pytest.mark.long
def test_gemma_4_on_a_gpu_computes_the_same(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the window and past the keys of a single pass, which layers with a window do not leave."""
    sizes = {**GEMMA4_SIZES, "D": 128, "context": 1024}
    further = {**sizes["further"], "attention.sliding_window": 130}
    further |= {"attention.key_length_swa": 64, "attention.value_length_swa": 64}
    sizes |= {"further": further, "vectors": {"rope_freqs.weight": 64}}
    monkeypatch.setitem(SYNTHETIC, "small", replace(SYNTHETIC["gemma-4-4b"], **sizes))
    monkeypatch.setitem(vars(device.caps), "policy", replace(ON_GPU, check_bounds=True))
    monkeypatch.setattr(RandomWeights, "rows", _rows_by_name)
    monkeypatch.setattr(RandomWeights, "repeats", False)
    prompt, found, written = [i % SIZES["vocab"] for i in range(254)], [], []
    for fusions in (None, ("rms_norm_mul",)):
        runner = load_synthetic("synthetic:small:q4_0", device, fusions=fusions, tune=False).runner
        try:
            for context in CONTEXTS[:2]:
                nodes = runner.graph(StepSpec(1, context, runner.cache))[0].nodes
                ops = Counter(label(node.op, node.dims) for node in nodes)
                local = 1 if context == "split" else 2
                assert ops["rms_norm_rope_attention_linear"] == (local if fusions is None else 0)
                assert ops["rms_norm_add+linear+gelu_residual"] == (4 if fusions is None else 0)
            session = Session(runner)
            tokens = [session.sample(prompt), *(session.advance() for _ in range(6))]
            written.append([token.wait() for token in tokens])
            found.append([session.logits([i]) for i in range(3)])
            session.close()
        finally:
            runner.close()
    assert written[0] == written[1]
    assert np.std(found[1]) > 0.1
    np.testing.assert_allclose(found[0], found[1], atol=4e-3)  # rounded inputs, and keys in f16


def _added(eps: float, twice: bool) -> Graph:
    """x + the norm of y, and the norm of that; the norm of y may be read by others, too."""
    b = Builder()
    for name in ("x", "y"):
        b.tensor(name, 2, 8, role="input")
    for name in ("w", "n"):
        b.tensor(name, 8, role="weight")
    for name in ("normed", "sum", "out"):
        b.tensor(name, 2, 8)
    dims = {"tokens": 2, "width": 8}
    b.add("rms_norm_mul", {**dims, "eps": eps}, {"x": "y", "weight": "w"}, "l", out="normed")
    b.add("add", {"tokens": 2, "count": 16}, {"a": "x", "b": "normed"}, "l", out="sum")
    b.add("rms_norm_mul", dims, {"x": "sum", "weight": "n"}, "l", out="out")
    return b.graph("out", "sum", *(["normed"] if twice else []))


@pytest.mark.parametrize(
    ("eps", "twice", "reason"),
    [
        (1e-6, False, None),
        (1e-5, False, "eps differs: 1e-06 and 1e-05"),
        (1e-6, True, "normed is used by 2 nodes"),
    ],
)
def test_a_norm_of_what_is_added_is_fused_where_it_is_the_same(eps: float, twice: bool, reason: str | None) -> None:
    graph, rejected = fuse(_added(eps, twice))
    assert [each.reason for each in rejected] == ([reason] if reason else [])
    assert labels(graph)["rms_norm_add_rms_norm"] == (0 if reason else 1)
