"""The CPU with weights as they are stored: blocks, products, ops, attention, models, sizes, threads, code on disk."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.engine import cpu
from shaderlm.engine.loading import load_with
from shaderlm.formats.block_numbers import NUMBER_SHAPES, block_numbers
from shaderlm.formats.quantize import quantize
from shaderlm.formats.weight_formats import BLOCK_FORMATS
from shaderlm.graph import interpret, reference
from shaderlm.graph.batch import PAGE, make_batch
from shaderlm.graph.graph import Builder, Graph
from shaderlm.runtime.packed_cpu import PackedRunner, code, program, threads
from shaderlm.runtime.packed_cpu.attention import pool_shape
from shaderlm.runtime.packed_cpu.lowering import lower
from shaderlm.runtime.packed_cpu.packing import pack
from shaderlm.runtime.packed_cpu.runner import CompiledGraph
from shaderlm.runtime.runner import SequenceChunk

from .checkpoints import names, recorded
from .checkpoints import write_gguf as write_checkpoint
from .compare import assert_close
from .gguf_files import quantised
from .oracles import NAMES, Oracle
from .runners import runner_of
from .session import Session as Sequence
from .sweeps import every_third_by_default
from .tiny_models import write_tiny_llama
from .weights import make_weight, whole_k

F32 = NDArray[np.float32]
PACKED = sorted(NUMBER_SHAPES)


def test_every_block_format_is_packed() -> None:
    assert set(NUMBER_SHAPES) == set(BLOCK_FORMATS)


@pytest.mark.parametrize("kind", PACKED)
def test_numbers_scales_and_offsets_are_the_weights(kind: str) -> None:
    rng = np.random.default_rng(0)
    raw, weights = make_weight(rng, kind, 5, 768)
    numbers, scales, offsets = block_numbers(raw, kind)
    bits, group, half, has_offsets, zero = NUMBER_SHAPES[kind]
    assert scales.dtype == (np.float16 if half else np.float32)
    whole = numbers.view(np.int8)
    if bits == 4:
        pairs = numbers.reshape(-1, group // 2)
        whole = np.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(5, -1)
    found = (whole.astype(np.float64) - zero) * np.repeat(scales, group, 1)
    assert (offsets is not None) == has_offsets
    if offsets is not None:
        found += np.repeat(offsets, group, 1)
    np.testing.assert_allclose(found, weights, rtol=0, atol=1e-6 * np.abs(weights).max())


# Products ------------------------------------------------------------------------------------------------


class Tensors:
    """A source of weights: arrays by name, as their formats have them."""

    repeats = False

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def rows(self, name: str, kind: str, first: int, end: int) -> Any:
        return self._arrays[name][first:end]

    def vector(self, name: str) -> Any:
        return self._arrays[name]


class Compiled:
    """A graph of one row and its weights, ready to run."""

    def __init__(self, graph: Graph, arrays: Mapping[str, Any], precision: str = "exact") -> None:
        source, self._arrays = Tensors(arrays), arrays
        self.lowered = lower(graph, precision)
        weights: dict[str, Any] = {name: arrays[name] for name in self.lowered.vectors}
        for product in self.lowered.products.values():
            weights |= pack(product, source, lambda nbytes: None)
        self._graph = CompiledGraph(self.lowered, weights, source)

    def run(self, values: Mapping[str, Any], **arrays: Any) -> dict[str, Any]:
        rows = len(values["batch"]) - 1 if "batch" in values else len(values["x"])
        return {name: array.copy() for name, array in self._graph.run(rows, values, arrays, lambda: NO_GRAPH).items()}


NO_GRAPH = Graph({}, (), ())  # no node is left for NumPy


def linear_graph(kind: str, k: int, *sizes: int, bias: bool = False) -> Graph:
    """Products of one x with matrices of these sizes."""
    b = Builder()
    b.tensor("x", 1, k, role="input")
    for i, n in enumerate(sizes):
        b.tensor(f"w{i}", n, k, role="weight", format=kind)
        dims = {"tokens": 1, "K": k, "N": n, "format": kind, "bias": bias}
        operands = {"x": "x", "weight": f"w{i}", "bias": b.tensor(f"b{i}", n, role="weight") if bias else None}
        b.add("linear", dims, operands, "", out=b.tensor(f"y{i}", 1, n))
    return b.graph(*(f"y{i}" for i in range(len(sizes))))


FORMATS = [*PACKED, "f16", "bf16", "f32"]
PRODUCTS = [(kind, precision, None) for kind in FORMATS for precision in ("exact", "fast")]
GENERIC = [(kind, "fast", ()) for kind in ("q4_1", "q3_k", "q8_0", "q6_k")]  # one of each kernel that differs


@pytest.mark.parametrize(("kind", "precision", "features"), [*PRODUCTS, *GENERIC])
def test_products(kind: str, precision: str, features: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix, and two that read one x; one column, awkward and even numbers of them; few and many rows."""
    if features is not None:  # instructions of the processor are not asked for by name
        monkeypatch.setattr(program, "_vector_features", lambda: features)
    rng = np.random.default_rng(1)
    for k, sizes, bias in ((96, (1,), False), (1184, (33, 7), False), (64, (130,), True)):
        k = whole_k(k, kind)
        arrays, dense = {}, []
        for i, n in enumerate(sizes):
            raw, weights = make_weight(rng, kind, n, k)
            arrays[f"w{i}"] = raw
            arrays[f"b{i}"] = rng.standard_normal(n).astype(np.float32)
            dense.append((weights, arrays[f"b{i}"] if bias else 0))
        if kind in ("f16", "bf16", "f32"):  # dense weights are read in f32
            arrays |= {f"w{i}": weights.astype(np.float32) for i, (weights, _) in enumerate(dense)}
        compiled = Compiled(linear_graph(kind, k, *sizes, bias=bias), arrays, precision)
        for rows in (1, 2, 17, 64):
            x = rng.standard_normal((rows, k)).astype(np.float32)
            x[:, 3] *= 50  # a large value takes the precision of its block
            known = compiled.run({"x": x})
            for i, (weights, b) in enumerate(dense):
                expected = x.astype(np.float64) @ weights.astype(np.float64).T + b
                label = f"{kind} {precision} {rows} × {k} × {sizes[i]}"
                if precision == "exact":
                    assert_close(known[f"y{i}"], expected, "linear", label)
                    continue
                # x is off by half of a 32767th of the largest value.
                rest = np.abs(x).max(1, keepdims=True) / (2 * 32767) * np.abs(weights).sum(1)
                assert (np.abs(known[f"y{i}"] - expected) <= rest + 1e-4 + 1e-5 * np.abs(expected)).all(), label


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "q6_k", "f32"])
def test_what_is_no_number_stays_none(kind: str, precision: str) -> None:
    """NaN in x reaches every result of its row, and no other row."""
    rng, k = np.random.default_rng(0), whole_k(64, kind)
    raw, weights = make_weight(rng, kind, 9, k)
    arrays = {"w0": weights.astype(np.float32) if kind == "f32" else raw}
    x = rng.standard_normal((3, k)).astype(np.float32)
    x[1, 5] = np.nan
    found = Compiled(linear_graph(kind, k, 9), arrays, precision).run({"x": x})["y0"]
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


# Ops -----------------------------------------------------------------------------------------------------

K, HEADS, WIDTH = 48, 4, 12
OPS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("rms_norm", {"width": K, "eps": 1e-5}, {}),
    ("rms_norm", {"heads": HEADS, "width": WIDTH, "eps": 1e-5}, {}),
    ("layer_norm", {"width": K, "eps": 1e-5, "bias": True}, {"weight": (K,), "bias": (K,)}),
    ("layer_norm", {"width": K, "eps": 1e-5, "bias": False}, {"weight": (K,)}),
    ("mul", {"count": K, "period": WIDTH}, {"b": (WIDTH,)}),
    ("mul", {"count": K}, {"b": (K,)}),
    ("add", {"count": K}, {"b": None}),
    ("silu_mul", {"count": K}, {"b": None}),
    ("gelu_mul", {"count": K}, {"b": None}),
    ("swiglu_clamped", {"count": K}, {"b": None}),
    ("gelu", {"count": K}, {}),
    ("gelu_erf", {"count": K}, {}),
    ("relu_squared", {"count": K}, {}),
    ("scale", {"count": K, "factor": 0.37}, {}),
    ("softcap", {"count": K, "cap": 5.0}, {}),
    ("slice", {"width": K, "first": 3, "count": 5, "step": 7}, {}),
    ("add_gated", {"width": K, "K": K}, {"b": None, "x": None, "gate": (K,)}),
    ("rope", {"H": HEADS, "D": WIDTH, "rotary": WIDTH}, {}),
    ("rope", {"H": HEADS, "D": WIDTH, "rotary": 8, "interleaved": True}, {}),
)


def op_graph(op: str, dims: Mapping[str, Any], operands: Mapping[str, Any], rows: int) -> Graph:
    """A product, and the op of what it gives."""
    b = Builder()
    b.tensor("x", rows, K, role="input")
    b.tensor("w", K, K, role="weight")
    b.add("linear", {"tokens": rows, "K": K, "N": K}, {"x": "x", "weight": "w"}, "", out=b.tensor("y", rows, K))
    first = "a" if "b" in operands else "x"
    inputs: dict[str, str] = {first: "y"}
    for name, shape in operands.items():
        inputs[name] = "x" if shape is None else b.tensor(name, *shape, role="weight")
    if op == "rope":
        inputs |= {"batch": b.tensor("batch", 1 + rows, 4, role="input", format="u32")}
        inputs |= {"table": b.tensor("table", 1, dims["rotary"] // 2, 2, role="table")}
    sizes = dict(dims)
    if "count" in sizes and op != "slice":
        sizes = {"period": sizes["count"], **sizes} if "b" in operands else sizes
        if sizes.get("period") == K and operands.get("b", K) is None:
            sizes["period"] = rows * K
        sizes["count"] = rows * K
    out = b.tensor("out", rows, sizes["count"] if op == "slice" else K)
    b.add(op, {"tokens": rows, **sizes}, inputs, "", out=out)
    return b.graph("out")


@pytest.mark.parametrize(("op", "dims", "operands"), OPS, ids=[f"{op}-{i}" for i, (op, *_) in enumerate(OPS)])
def test_ops(op: str, dims: dict[str, Any], operands: dict[str, Any]) -> None:
    """What a kernel computes is the formula of its op."""
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in operands.items() if shape}
    arrays["w"] = (3 * rng.standard_normal((K, K)) / math.sqrt(K)).astype(np.float32)
    compiled = Compiled(op_graph(op, dims, operands, 1), arrays)
    for rows in (1, 3):
        x = rng.standard_normal((rows, K)).astype(np.float32)
        positions = rng.integers(0, 50, rows)
        values: dict[str, Any] = {**arrays, "x": x, "batch": make_batch(positions, 0)}
        tables = {}
        if op == "rope":
            values["table"] = tables["table"] = reference.rope_table(np.arange(50), dims["rotary"]).astype(np.float32)
        found = compiled.run(values, **tables)["out"]
        expected = interpret.run(op_graph(op, dims, operands, rows), values)["out"]
        assert_close(found, expected.reshape(rows, -1), "attention", f"{op} of {rows} rows")


# Attention -----------------------------------------------------------------------------------------------


SCORES: tuple[dict[str, Any], ...] = (
    {},
    {"window": 20},
    {"window": 150},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 9, "sinks": True},
)


@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize("on", SCORES, ids=str)
def test_attention(on: dict[str, Any], cache: str) -> None:
    """Rows of several sequences in one step, over one page and over many, which do and do not follow each other."""
    rng = np.random.default_rng(3)
    heads, group, width, pages = 2, 3, 16, 30
    d = {
        "Hq": heads * group,
        "Hkv": heads,
        "D": width,
        "scale": None,
        "window": 0,
        "softcap": 0.0,
        "sinks": False,
        **on,
    }
    sinks = rng.standard_normal(heads * group).astype(np.float32)
    counts, before = [1, 1, 1, 2, 17, 40], [5, 200, 900, 127, 0, 300]
    taken = iter([3, 7, 8, *range(10, 18), 20, 2, 1, 25, 26, 27])
    table, rows = np.zeros(64, np.uint32), []
    for sequence, (count, first) in enumerate(zip(counts, before, strict=True)):
        for page in range(-(-(first + count) // PAGE)):
            table[10 * sequence + page] = next(taken)
        for position in range(first, first + count):
            slot = int(table[10 * sequence + position // PAGE]) * PAGE + position % PAGE
            rows.append((position, slot, 10 * sequence))
    batch = make_batch(*(np.array(column) for column in zip(*rows, strict=True)))
    dtype = np.float16 if cache == "f16" else np.float32
    k_cache, v_cache = (rng.standard_normal((pages * PAGE, heads, width)).astype(dtype) for _ in "kv")
    keys = np.ascontiguousarray(k_cache.reshape(pages, PAGE, heads, width).transpose(0, 2, 3, 1))
    values = np.ascontiguousarray(v_cache.reshape(pages, PAGE, heads, width).transpose(0, 2, 1, 3))
    assert keys.shape == pool_shape("k_cache", pages, heads, width)
    assert values.shape == pool_shape("v_cache", pages, heads, width)
    q, k, v = (rng.standard_normal((len(rows), n, width)).astype(np.float32) for n in (heads * group, heads, heads))
    reference.kv_write(k, v, k_cache, v_cache, batch)
    own = sinks if d["sinks"] else None
    found = attend(d, cache, q, k, v, keys, values, batch, table, sinks)
    how = reference.Scores(d["scale"], d["window"], d["softcap"], own)
    expected = reference.attention(q, k_cache, v_cache, batch, table, how)
    assert_close(found, expected.reshape(len(rows), -1), "attention", f"{on} {cache}")


def attend(
    d: Mapping[str, Any],
    cache: str,
    q: F32,
    k: F32,
    v: F32,
    keys: Any,
    values: Any,
    batch: Any,
    table: Any,
    sinks: F32 | None = None,
) -> Any:
    """Keys and values of rows to their pages, and attention of the rows: [rows, Hq · D]."""
    b = Builder()
    heads, kv_heads, width = d["Hq"], d["Hkv"], d["D"]
    b.tensor("q", 1, heads * width, role="input")
    for name in "kv":
        b.tensor(name, 1, kv_heads * width, role="input")
        b.tensor(f"{name}_cache", 1, kv_heads, width, role="state", format=cache)
    b.tensor("batch", 2, 4, role="input", format="u32")
    b.tensor("page_table", len(table), role="input", format="u32")
    b.tensor("sinks", heads, role="weight")
    b.tensor("out", 1, heads * width)
    caches = {"k_cache": "k_cache", "v_cache": "v_cache", "batch": "batch"}
    written = {name: caches[name] for name in ("k_cache", "v_cache")}
    b.add(
        "kv_write",
        {"tokens": 1, "Hkv": kv_heads, "D": width, "cache": cache},
        {"k": "k", "v": "v"} | caches,
        "",
        **written,
    )
    operands: dict[str, str | None] = {"q": "q", **caches, "page_table": "page_table"}
    operands["sinks"] = "sinks" if d["sinks"] else None
    b.add("attention", {"tokens": 1, "cache": cache, "paged": True, **d}, operands, "", out="out")
    compiled = Compiled(b.graph("out"), {"sinks": sinks})
    rows = {name: array.reshape(len(array), -1) for name, array in (("q", q), ("k", k), ("v", v))}
    return compiled.run({**rows, "batch": batch, "page_table": table}, k_cache=keys, v_cache=values)["out"]


def test_what_was_in_a_page_does_not_matter() -> None:
    """NaN times 0 is NaN: keys that a row does not see are not read, whatever lies there."""
    heads, width = 1, 4
    keys, values = (np.full(pool_shape(f"{name}_cache", 6, heads, width), np.nan, np.float32) for name in "kv")
    table, one = np.arange(6, dtype=np.uint32), np.ones((1, heads, width), np.float32)
    d = {"Hq": 1, "Hkv": 1, "D": width, "scale": 0.5, "window": 0, "softcap": 0.0, "sinks": False}
    for position in (0, 1):
        found = attend(d, "f32", one, one, one, keys, values, make_batch([position], [position]), table)
        assert_close(found, one[0], "pointwise", f"{position}")


# Models --------------------------------------------------------------------------------------------------


def compare_with_numpy(path: Path) -> None:
    """A prompt, and rows one by one, in both precisions."""
    ids = [int(i) for i in np.random.default_rng(5).integers(0, 250, 21)]
    with load_with(path, device="numpy") as model:
        expected = model.logits(ids)
    for precision in ("exact", "fast"):
        with load_with(path, device="cpu", precision=precision) as model:
            assert isinstance(model.runner, PackedRunner)
            assert model.runner.bytes.packed > 0
            sequence = Sequence(model.runner)
            found = [sequence.logits(ids[:18]), *(sequence.logits([each]) for each in ids[18:])]
        assert_close(np.stack(found), expected[17:], "model", f"{path.name} {precision}")


@pytest.mark.parametrize("kind", ["q4_1", pytest.param("q8_0", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", every_third_by_default(name for name in NAMES if name != "gpt-oss-mxfp4"))  # quantised
def test_quantised_checkpoints(name: str, kind: str, oracles: dict[str, Oracle], tmp_path: Path) -> None:
    compare_with_numpy(quantised(oracles[name].gguf, tmp_path / "packed.gguf", kind))


@pytest.mark.parametrize("name", every_third_by_default(names()))
def test_quantised_checkpoints_without_an_oracle(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny.gguf", recorded(name))
    compare_with_numpy(quantised(path, tmp_path / "packed.gguf"))


# Sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "f16"])
def test_predicted_bytes_are_those_of_the_arrays(kind: str, tmp_path: Path) -> None:
    """Embeddings stay in the file."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind=kind)
    made = runner_of(path, "cpu", precision="exact")
    assert isinstance(made, PackedRunner)
    norm = made.head_of(1, 1, logits=False).weights()  # of final states, and of logits
    assert {each.name for each in norm} <= made.arrays.keys()
    assert made.report()["weight_bytes"] == sum(array.nbytes for array in made.arrays.values())
    assert made.report()["dense_bytes"] == (made.bytes.dense if kind == "f16" else 0)
    made.close()


def test_a_mixture_says_what_is_dense(oracles: dict[str, Oracle], tmp_path: Path) -> None:
    path = quantised(oracles["mixtral"].gguf, tmp_path / "packed.gguf")
    with load_with(path, device="cpu") as model:
        experts = 4 * sum(math.prod(s) for name, s in model.runner.config.shapes.items() if "_exps.weight" in name)
        routers = 4 * sum(math.prod(s) for name, s in model.runner.config.shapes.items() if "_inp.weight" in name)
        assert model.report.dense_bytes == experts + routers
        assert "dense, in f32)" in model.report.lines()[2]


# With and without ----------------------------------------------------------------------------------------


def test_without_llvmlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING, "shaderlm"), load_with(path, device="cpu") as model:
        assert (model.report.device, model.report.precision) == ("cpu (NumPy)", "exact")
    assert [record.getMessage().endswith("'shaderlm[cpu]'") for record in caplog.records] == [True]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shaderlm"), load_with(path, device="numpy") as model:
        assert model.report.device == "cpu (NumPy)"
    assert caplog.records == []


def run_program(program: str, path: Path) -> list[str]:
    """The lines that a program prints."""
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_after_a_fork(tmp_path: Path) -> None:
    """Threads are not forked: a model of before says so. A new one computes."""
    program = """
        import os, sys, warnings
        import shaderlm
        from shaderlm.errors import DeviceError
        warnings.simplefilter("ignore")
        ids = list(range(40))
        model = shaderlm.load(sys.argv[1], device="cpu")
        model.logits(ids)
        child = os.fork()
        if child == 0:
            try:
                again = lambda: print(shaderlm.load(sys.argv[1], device="cpu").logits(ids).shape[0], flush=True)
                for use in (lambda: model.generate([1], max_tokens=2), lambda: model.logits([1]), again):
                    try:
                        use()
                    except DeviceError as problem:
                        print("spawn" in str(problem), flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    """
    assert run_program(program, write_tiny_llama(tmp_path / "tiny.gguf", kind="q8_0")) == ["True", "True", "40"]


# Code and threads ----------------------------------------------------------------------------------------


def one(precision: str = "fast") -> Any:
    """A small product, of which every number is 576."""
    raw = quantize(np.ones((64, 576), np.float32), "q8_0")
    return Compiled(linear_graph("q8_0", 576, 64), {"w0": raw}, precision).run({"x": np.ones((1, 576), np.float32)})[
        "y0"
    ]


def test_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start compiles nothing; what is damaged is compiled again, and so is all where nothing can be read."""
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path))
    compiled: list[str] = []

    def started() -> Any:
        host = code.Host()
        monkeypatch.setattr(code, "host", lambda: host)
        monkeypatch.setattr(program, "host", lambda: host)
        compile_module = host.compile

        def compile_and_count(text: str) -> bytes:
            compiled.append(text)
            return compile_module(text)

        monkeypatch.setattr(host, "compile", compile_and_count)
        compiled.clear()
        assert_close(one(), np.full((1, 64), 576.0), "linear", "kept")
        return len(compiled)

    first = started()
    assert first >= 2
    assert started() == 0
    for damaged, path in zip((b"", b"?" * 40, None), sorted((tmp_path / "cpu").iterdir()), strict=False):
        path.write_bytes(path.read_bytes()[:-1] if damaged is None else damaged)
    assert started() == min(first, 3)
    assert started() == 0
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "file"))
    assert started() == first


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX")
@pytest.mark.parametrize("who", ["folder", "file"])
def test_code_that_others_may_write_is_not_run(who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path))
    code._keep("key", b"code")
    path = tmp_path / "cpu" / "key"
    assert code._read("key") == b"code"
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    (path.parent if who == "folder" else path).chmod(0o777)
    assert code._read("key") is None
    code._keep("key", b"other")
    assert code._read("key") == (None if who == "folder" else b"other")


@pytest.mark.parametrize(("version", "there"), [("0.50.0", True), ("1.0rc1", True), ("0.49.9", False), (None, False)])
def test_which_llvmlite_is_new_enough(version: str | None, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "version_of", lambda package: version)
    assert code.is_available() is there


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota of CPU time counts like cores."""
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    for text, count in (("250000 100000", 3), ("50000 100000", 1), ("max 100000", 64), ("6400000 50000", 64)):
        threads._QUOTA.write_text(text)
        assert threads.cores() == count


def test_memory_that_is_not_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for which there is no memory is an error, as often as it is tried, and smaller ones still run."""
    raw = quantize(np.ones((64, 576), np.float32), "q8_0")
    made = Compiled(linear_graph("q8_0", 576, 64), {"w0": raw})
    few, many = np.ones((2, 576), np.float32), np.ones((100, 576), np.float32)
    made.run({"x": few})
    zeros = np.zeros

    def full(shape: Any, *types: Any) -> Any:
        if isinstance(shape, int) and shape > 100 * 576:
            raise MemoryError
        return zeros(shape, *types)

    monkeypatch.setattr(np, "zeros", full)
    for _ in range(2):
        with pytest.raises(MemoryError):
            made.run({"x": many})
        assert_close(made.run({"x": few})["y0"], np.full((2, 64), 576.0), "linear", "few")


def test_ctrl_c_between_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that were not written yet are written by the next run."""
    raw = quantize(np.ones((64, 576), np.float32), "q8_0")
    made = Compiled(linear_graph("q8_0", 576, 64), {"w0": raw})
    made.run({"x": np.ones((1, 576), np.float32)})
    with monkeypatch.context() as patch:
        patch.setattr(program.Program, "bind", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.run({"x": np.ones((9, 576), np.float32)})
    assert_close(made.run({"x": np.ones((9, 576), np.float32)})["y0"], np.full((9, 64), 576.0), "linear", "after")


def test_ctrl_c_waits_for_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is interrupted while other threads are at work is over before anybody goes on."""
    workers = threads._get_workers()
    start = workers.start

    def interrupted(*work: Any) -> None:
        start(*work)
        raise KeyboardInterrupt

    raw = quantize(np.ones((64, 576), np.float32), "q8_0")
    made = Compiled(linear_graph("q8_0", 576, 64), {"w0": raw})
    values = {"x": np.ones((33, 576), np.float32)}
    with monkeypatch.context() as patch:
        patch.setattr(workers, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.run(values)
    (part,) = made._graph._parts
    assert isinstance(part, program.Program)
    counts = part._words[:-1, threads.DONE] & 0xFFFFFFFF
    np.testing.assert_array_equal(counts, part._words[:-1, threads.CHUNKS])
    assert not workers.busy.locked()
    assert_close(made.run(values)["y0"], np.full((33, 64), 576.0), "linear", "after")


def test_one_thread_can_finish_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is waited for that has not begun."""
    workers = threads._get_workers()
    monkeypatch.setattr(workers, "start", lambda *work: None)
    assert_close(one(), np.full((1, 64), 576.0), "linear", "alone")


def test_programs_at_the_same_time() -> None:
    """One has the threads; the other runs alone."""
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda i: one("exact" if i % 2 else "fast"), range(40)):
            assert_close(found, np.full((1, 64), 576.0), "linear", "beside another")


def test_a_late_thread_takes_nothing() -> None:
    """A thread that comes to a step that is over returns, and changes no counter."""
    words, step = np.zeros((2, threads.WORDS), np.int64), np.zeros(threads.STEP_WORDS, np.int64)
    words[:, threads.STAGE] = -1, 0
    words[:, threads.CHUNKS] = 5, 0
    words[:, threads.NEXT] = words[:, threads.DONE] = 7 << 32
    before = words.copy()
    threads._walker()(words.ctypes.data, 2, step.ctypes.data, 6)
    np.testing.assert_array_equal(words, before)


def test_rows_that_share_a_step_with_nothing_to_give(tmp_path: Path) -> None:
    """A step whose rows give nothing runs no head, and the next one finds its keys."""
    made, oracle = (runner_of(write_tiny_llama(tmp_path / "t.gguf", kind="q8_0"), where) for where in ("cpu", None))
    found = []
    for each in (made, oracle):
        sequence = each.add()
        each.step([SequenceChunk(sequence, [1, 2, 3], "nothing")])
        found.append(each.step([SequenceChunk(sequence, [4], "hidden")]).hidden)
        each.close()
    assert_close(found[0], found[1], "model", "hidden")
