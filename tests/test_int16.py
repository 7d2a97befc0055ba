"""Matrix products with inputs of 16 bits: every configuration, odd numbers, whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.compile import lower
from shaderlm.compile.steps import Head
from shaderlm.engine import LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import InputError
from shaderlm.gpu import Device, open_device
from shaderlm.graph import reference, resolve
from shaderlm.graph.ops import label
from shaderlm.kernels import choose, routes_of
from shaderlm.kernels.linear import int16
from shaderlm.models.config import StepSpec
from shaderlm.models.shapes import SYNTHETIC
from shaderlm.runtime.gpu_runner import GpuRunner

from .cases import CASES, INT16, Case, make, result, tolerance
from .compare import assert_close
from .operands import MAKERS
from .session import Session
from .sweeps import every_second
from .tiny_models import write_tiny_llama
from .weights import make_weight, whole_k

EPS = 1e-5


def product(
    device: Device, config: int16.Int16Config, x: Any, weight: Any, dims: dict[str, Any], norm_weight: Any = None
) -> Any:
    launch_list = int16.launch_list_with(config, dims, device.caps)
    route = next(found for found in routes_of("linear") if found.name == "gemv_int16")
    operands = {"x": x, "weight": weight} | ({"norm_weight": norm_weight} if norm_weight is not None else {})
    return device.run(lower(route, dims, device.caps, operands, launch_list=launch_list))["out"].view(np.float32)


def candidates() -> list[int16.Int16Config]:
    """Those of the models that people measure, on a large GPU, as far as the adapter has threads for them."""
    caps = replace(open_device().caps, max_workgroup_memory=48 << 10, kind="discrete")
    found = []
    for shape in SYNTHETIC.values():
        for name, (K, N) in shape.matrices.items():
            epilogue = "silu_mul" if name == "gate/up" else "none"
            dims = resolve("linear", {"tokens": 1, "K": K, "N": N, "format": "q4_0", "epilogue": epilogue})
            config = int16.config_for(dims, caps)
            found.append(replace(config, stage=2 * config.lanes_per_row))
    # Lane groups that lie across subgroups, and that leave lanes idle.
    odd = [int16.Int16Config(64, 9, 2, 18), int16.Int16Config(128, 36, 4, 36), int16.Int16Config(96, 5, 1, 10)]
    plain = [int16.Int16Config(64, 4, 1, 4), int16.Int16Config(32, 32, 4, 32)]
    return list(dict.fromkeys([*found, *odd, *plain]))


@pytest.mark.parametrize(
    ("config", "norm"), every_second([(config, i % 4 == 0) for i, config in enumerate(candidates())]), ids=str
)
def test_every_config(config: int16.Int16Config, norm: bool, gpu: Device) -> None:
    """Several stages, of which the last is not full, and rows that do not fill the last lane group."""
    rng = np.random.default_rng(config.lanes_per_row)
    K, N = 32 * (2 * config.stage + 3), 2 * config.per_group + 1
    how = {"prologue": "rms_norm" if norm else "none", "eps": EPS}
    dims = resolve("linear", {"tokens": 1, "K": K, "N": N, "format": "q4_0", **how})
    weight, dense = make_weight(rng, "q4_0", N, K)
    x = rng.standard_normal((1, K)).astype(np.float32)
    norm_weight = rng.standard_normal(K).astype(np.float32) if norm else None
    taken = x.astype(np.float64) * (norm_weight if norm_weight is not None else 1)
    root = np.sqrt((x.astype(np.float64) ** 2).mean() + EPS) if norm else 1.0
    actual = product(gpu, config, x, weight, dims, norm_weight)
    assert_close(actual, reference.linear(taken / root, dense)[0], "linear", str(config))


@pytest.mark.parametrize(
    ("config", "epilogue", "rounds"),
    [
        (int16.Int16Config(128, 18, 4, 36), "gelu_mul", 2),
        (int16.Int16Config(96, 17, 4, 34), "add", 2),
        (int16.Int16Config(64, 18, 2, 18), "none", 1),
        (int16.Int16Config(128, 18, 4, 54), "gelu_mul", 0),
    ],
    ids=str,
)
def test_behind_two_norms(config: int16.Int16Config, epilogue: str, rounds: int, gpu: Device) -> None:
    """Lanes that have one or two blocks load them at once. Several lanes add the sums of a row, and two store them."""
    sizes = {"tokens": 1, "K": 32 * config.stage, "N": 2 * config.per_group + 2, "format": "q4_0", "epilogue": epilogue}
    dims = resolve("linear", {**sizes, "prologue": "rms_norm_add_rms_norm", "eps": EPS})
    launch_list = int16.launch_list_with(config, dims, gpu.caps)
    assert [each.constants["ROUNDS"] for each in launch_list.dispatches] == [rounds]
    operands, expected = MAKERS["linear"](np.random.default_rng(config.lanes_per_row), dims)
    route = next(found for found in routes_of("linear") if found.name == "gemv_int16")
    found = gpu.run(lower(route, dims, gpu.caps, operands, launch_list=launch_list))
    for name in ("out", "sum"):
        wanted = expected[name]
        assert wanted is not None
        assert_close(found[name].view(np.float32)[: wanted.size], wanted[0], "linear", f"{config} {name}")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dims.get("epilogue") == "rope_kv_write"][-2:], ids=lambda case: case.name
)
def test_two_lanes_of_a_row_store_rotated_pairs(case: Case, gpu: Device) -> None:
    config = int16.Int16Config(128, 18, 4, 18)
    assert case.dims["K"] == 32 * config.stage
    operands, expected = make(case)
    route = next(found for found in routes_of("linear") if found.name == "gemv_int16")
    launch_list = int16.launch_list_with(config, case.dims, gpu.caps)
    found = gpu.run(lower(route, case.dims, gpu.caps, operands, launch_list=launch_list))
    for name, wanted in expected.items():
        assert wanted is not None
        assert_close(result(case, name, found[name], wanted), wanted, tolerance(case, route, name), name)


@pytest.mark.parametrize(
    ("epilogue", "prologue"),
    [("add", "none"), ("silu_mul", "rms_norm"), ("none", "rms_norm"), ("rope_kv_write", "rms_norm")],
)
def test_several_rows_are_each_the_row_alone(epilogue: str, prologue: str, gpu: Device) -> None:
    """Three rows in the bucket of four. Not a bit differs; the row that pads is not written."""
    heads = {"Hq": 3, "Hkv": 1, "D": 8, "rotary": 4, "cache": "f32"} if epilogue == "rope_kv_write" else {}
    batched = {} if heads else {"batched": True}
    sizes = {"K": 224, "N": 40, "format": "q4_1", "bias": True, "epilogue": epilogue, "prologue": prologue, "eps": EPS}
    sizes |= {**heads, **batched}
    route = next(found for found in routes_of("linear") if found.name == "gemv_int16")
    operands, _ = MAKERS["linear"](np.random.default_rng(1), resolve("linear", {"tokens": 4, **sizes}))

    def run(tokens: int, given: dict[str, Any]) -> dict[str, Any]:
        program = lower(route, resolve("linear", {"tokens": tokens, **sizes}), gpu.caps, {**operands, **given})
        found = gpu.run(program)
        return {name: found[name].view(np.float32) for name in ("out", "k_cache", "v_cache") if name in found}

    of_rows = ("x", "residual")
    records = np.array([[7, 2, 1, 0], [8, 0, 3, 0], [9, 5, 0, 0], [0, 0, 2, 0]], np.uint32)
    together = run(4, {"batch": np.concatenate([np.array([[3, 3, 0, 0]], np.uint32), records])})
    width = 24 if heads else 20 if epilogue == "silu_mul" else 40
    rows = together["out"][: 4 * width].reshape(4, width)
    assert not rows[3].any()
    for i, record in enumerate(records[:3]):
        own = {name: value[i : i + 1] for name, value in operands.items() if value is not None and name in of_rows}
        alone = run(1, {**own, "batch": np.array([[1, 1, 0, 0], record], np.uint32)})
        assert rows[i].tobytes() == alone["out"][:width].tobytes()
        slot = slice(8 * record[2], 8 * record[2] + 8)
        for name in ("k_cache", "v_cache") if heads else ():
            written = alone[name][slot]
            assert written.any()
            assert together[name][slot].tobytes() == written.tobytes()


@pytest.mark.parametrize(
    ("most", "blocks", "lanes_per_row"),
    [(16, 64, 16), (8, 36, 8), (16, 36, 12), (32, 36, 18), (64, 36, 36), (64, 592, 64), (32, 112, 28), (8, 1, 4)],
)
def test_rows_have_few_idle_lanes(most: int, blocks: int, lanes_per_row: int) -> None:
    assert int16.lanes_per_row_for(most, blocks) == lanes_per_row


@pytest.mark.parametrize("kind", INT16)
def test_odd_numbers(kind: str, gpu: Device) -> None:
    """Zeros, numbers near the smallest and the largest, and one that is far larger than its neighbours."""
    rng = np.random.default_rng(5)
    K, N, config = whole_k(128, kind), 9, int16.Int16Config(64, 8, 1, 64)
    dims = resolve("linear", {"tokens": 1, "K": K, "N": N, "format": kind})
    weight, dense = make_weight(rng, kind, N, K)
    ordinary = rng.standard_normal((1, K)).astype(np.float32)
    assert not product(gpu, config, np.zeros_like(ordinary), weight, dims).any()
    assert np.abs(product(gpu, config, ordinary * 1e-38, weight, dims)).max() < 1e-30
    large = product(gpu, config, ordinary * 1e30, weight, dims) / 1e30
    assert_close(large, reference.linear(ordinary, dense)[0], "linear", "1e30")
    for spoiled in (np.nan, np.inf, -np.inf):
        x = ordinary.copy()
        x[0, 40] = spoiled
        assert np.isnan(product(gpu, config, x, weight, dims)).all(), "an input that is no number is not hidden"


def test_what_one_product_rounds_the_next_one_reads(gpu: Device) -> None:
    """Also zeros, and numbers that are none."""
    rng = np.random.default_rng(7)
    K, middle, N = 64, 160, 1029
    gate = resolve("linear", {"tokens": 1, "K": K, "N": 2 * middle, "format": "q8_0", "epilogue": "silu_mul"})
    down = resolve("linear", {"tokens": 1, "K": middle, "N": N, "format": "q4_0"})
    (first, dense), (second, second_dense) = (make_weight(rng, d["format"], d["N"], d["K"]) for d in (gate, down))
    routes = {route.name: route for route in routes_of("linear")}
    as_stored = {name: pack for name, pack in routes["gemv_rounded"].pack.items() if name != "x"}
    reader = replace(routes["gemv_rounded"], pack=as_stored)

    def chain(x: Any) -> Any:
        dims = resolve("linear", {**gate, "rounded": True})
        operands = {"x": x, "weight": first}
        between = gpu.run(lower(routes["gemv_int16"], dims, gpu.caps, operands))["out"].view(np.float32)
        dims = resolve("linear", {**down, "prologue": "int16_activations"})
        operands = {"x": between.reshape(1, -1), "weight": second}
        return gpu.run(lower(reader, dims, gpu.caps, operands))["out"].view(np.float32)[:N]

    ordinary = rng.standard_normal((1, K)).astype(np.float32)
    y = reference.linear(ordinary, dense)
    wanted = reference.linear(reference.silu_mul(y[:, 0::2], y[:, 1::2]), second_dense)[0]
    assert_close(chain(ordinary), wanted, "linear", "two products")
    assert not chain(np.zeros_like(ordinary)).any()
    for spoiled in (np.nan, np.inf):
        x = ordinary.copy()
        x[0, 40] = spoiled
        assert np.isnan(chain(x)).all()


@pytest.mark.parametrize(("size", "supported"), [(32, True), (64, False), (0, False)])
def test_results_are_rounded_behind_norms_where_subgroups_divide_the_workgroup(size: int, supported: bool) -> None:
    """Gate and up of gemma-3-1b have 288 threads. Norms add up the sums of whole subgroups."""
    given = {"tokens": 1, "K": 1152, "N": 13824, "format": "q4_0", "epilogue": "gelu_mul", "rounded": True}
    dims = resolve("linear", {**given, "prologue": "rms_norm_add_rms_norm"})
    caps = replace(LARGE_GPU, subgroup_size=size)
    assert int16.config_for(dims, caps).threads == 288
    reason = int16.unsupported_reason(dims, caps)
    assert reason is None if supported else "subgroups that divide 288 threads" in str(reason)
    sizes = {config.threads % (size or 128) for config in int16.candidate_configs(dims, caps)}
    assert sizes <= {0}


@pytest.mark.parametrize("size", [8, 32, 64, 128, 0])
def test_workgroups_of_heads_are_whole_subgroups(size: int) -> None:
    caps = replace(LARGE_GPU, subgroup_size=size)
    found = set()
    for k in (576, 1024, 1152, 1280, 1536, 2048, 2304, 2560, 3072, 4096, 5120, 8192):
        for n in (49152, 128256, 262144):
            given = {"tokens": 1, "K": k, "N": n, "format": "q8_0", "prologue": "rms_norm"}
            found.add(int16.config_for(resolve("linear", given), caps).threads)
    assert {threads % (size or 128) for threads in found} == {0}
    assert (192 in found) == (size in (8, 32, 64))


def test_only_models_on_a_gpu_round_without_being_asked(device: Device, gpu: Device) -> None:
    dims = resolve("linear", {"tokens": 1, "K": 2048, "N": 2048, "format": "q4_0"})
    assert choose("linear", dims, gpu.caps, None).name == "gemv"
    assert choose("linear", dims, gpu.caps, None, "fast").name == "gemv_int16"
    assert choose("linear", dims, replace(gpu.caps, kind="software"), None, "fast").name == "rows"
    small = {**dims, "N": 64}
    assert choose("linear", small, gpu.caps, None, "fast").name == "gemv", "not worth it"
    assert choose("linear", small, gpu.caps, "gemv_int16").name == "gemv_int16"


# Models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("int16") / "tiny.gguf", kind="q4_0")


def decoded(model: LanguageModel, ids: list[int]) -> Any:
    """Logits after each token, one at a time."""
    session = Session(model.runner)
    found = []
    for token in ids:
        found.append(session.logits([token]).copy())
    session.close()
    return np.array(found)


def test_precision_is_a_choice(tiny: Path, gpu: Device) -> None:
    ids = [3, 11, 60, 7, 19]
    with shaderlm.load(tiny, device="cpu", precision="exact") as reference_model:
        expected = decoded(reference_model, ids)
    with load_with(tiny, device=gpu, precision="exact", cache="f32") as exact:
        assert exact.report.precision == "exact"
        np.testing.assert_allclose(decoded(exact, ids), expected, atol=2e-4)
    with load_with(tiny, device=gpu, cache="f32") as fast:
        assert fast.report.precision == "fast"
        assert isinstance(fast.runner, GpuRunner)
        launches = fast.runner.plan(StepSpec(1, cache="f32")).launches
        assert sum(launch.layer == "blk.0" for launch in launches) == 5
        launches += fast.runner.plan(Head(1, 1, "logits")).launches
        assert {label(launch.op, launch.dims) for launch in launches if launch.route == "gemv_int16"} == {
            "rms_norm+linear",
            "rms_norm+linear+rope_kv_write",
            "rms_norm+linear+silu_mul",
        }
        rounded = decoded(fast, ids)
        assert 0 < np.abs(rounded - expected).max() < 1e-3 * expected.std()
    with pytest.raises(InputError, match="precision must be one of 'fast', 'exact', got 'low'"):
        shaderlm.load(tiny, device=gpu, precision="low")
