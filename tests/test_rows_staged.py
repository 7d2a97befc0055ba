"""Several rows that a product rounds itself: every kind of configuration, prologue and epilogue, rows that pad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.gpu import Device
from shaderlm.gpu.caps import MatrixShape
from shaderlm.graph import reference, resolve
from shaderlm.graph.batch import contiguous_batch
from shaderlm.kernels import routes_of
from shaderlm.kernels.linear import int16
from shaderlm.kernels.linear.rows_staged import RowsConfig, candidate_configs, config_for, fitted

from .cases import INT16, Case, make, result, tolerance
from .compare import assert_close
from .weights import make_weight, whole_k

ROUTE = next(route for route in routes_of("linear") if route.name == "gemv_int16")
NORM = {"prologue": "rms_norm", "eps": 1e-5}
HEADS = {"Hq": 3, "Hkv": 1, "D": 8, "rotary": 4, "N": 40, "epilogue": "rope_kv_write"}


def run(config: RowsConfig, dims: dict[str, Any], operands: dict[str, Any], device: Device) -> dict[str, Any]:
    launch_list = int16.launch_list_with(config, dims, device.caps)
    return device.run(lower(ROUTE, dims, device.caps, operands, launch_list=launch_list))


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (RowsConfig(64, 8, 4, 4, 16), {"tokens": 3, **NORM}),  # several stages, and two tiles below
        (RowsConfig(32, 4, 2, 2, 4), {"tokens": 5, "format": "q4_1", "bias": True, "epilogue": "silu_mul", **NORM}),
        (RowsConfig(32, 16, 1, 2, 16), {"tokens": 2, "format": "q8_0", "epilogue": "add"}),  # across subgroups of four
        (RowsConfig(64, 64, 4, 4, 64), {"tokens": 4, "format": "q6_k", "bias": True, "epilogue": "gelu"}),
        (RowsConfig(128, 8, 2, 8, 40), {"tokens": 9, "format": "q4_0", "epilogue": "gelu_mul", **NORM}),
        (RowsConfig(64, 8, 2, 4, 8), {"tokens": 6, "K": 96, **HEADS, "cache": "f32", **NORM}),
        (RowsConfig(32, 4, 4, 2, 4), {"tokens": 3, "K": 96, **HEADS, "cache": "f16", "bias": True, **NORM}),
    ],
    ids=str,
)
def test_every_config(config: RowsConfig, given: dict[str, Any], gpu: Device) -> None:
    """The last stage is not full, nor the last lane group, nor the last rows of x."""
    form = given.get("format", "q4_0")
    K = whole_k(32 * (2 * config.stage + 3), form)
    case = Case("linear", tuple({"K": K, "N": 2 * config.per_group + 2, "format": form, **given}.items()))
    operands, expected = make(case)
    found = run(config, case.dims, operands, gpu)
    for name, wanted in expected.items():
        assert wanted is not None
        assert_close(result(case, name, found[name], wanted), wanted, tolerance(case, ROUTE, name), f"{config} {name}")


def test_there_is_a_slot_for_each_subgroup() -> None:
    """Where drivers choose their size, this kernel may get smaller ones than a probe saw."""
    config, chosen = RowsConfig(64, 32, 4, 4, 32), replace(LARGE_GPU, subgroup_min=16, subgroup_max=32, subgroup_size=0)
    assert config.constants(chosen)["SLOTS"] == 64 // 4
    assert config.constants(replace(chosen, subgroup_reported=8))["SLOTS"] == 64 // 8
    assert config.constants(replace(chosen, subgroup_max=16, subgroup_size=16))["SLOTS"] == 64 // 16


@pytest.mark.parametrize("kind", INT16)
def test_odd_numbers(kind: str, gpu: Device) -> None:
    """Rows of zeros, near the smallest and the largest numbers, and with one that is none: each minds its own."""
    rng = np.random.default_rng(5)
    K, N = whole_k(128, kind), 9
    dims = resolve("linear", {"tokens": 6, "K": K, "N": N, "format": kind})
    weight, dense = make_weight(rng, kind, N, K)
    ordinary = rng.standard_normal(K).astype(np.float32)
    x = np.stack([ordinary * factor for factor in np.array([0, 1e-38, 1, 1e30, 1, 1], np.float32)])
    x[4, 40], x[5, 3] = np.nan, -np.inf
    out = run(RowsConfig(32, 4, 1, 4, 4), dims, {"x": x, "weight": weight}, gpu)["out"].view(np.float32)
    out = out[: 6 * N].reshape(6, N)
    expected = reference.linear(ordinary[None], dense)[0]
    assert not out[0].any()
    assert np.abs(out[1]).max() < 1e-30
    assert_close(out[2], expected, "linear", "1")
    assert_close(out[3] / 1e30, expected, "linear", "1e30")
    assert np.isnan(out[4:]).all(), "an input that is no number is not hidden"


@pytest.mark.parametrize("rope", [False, True])
def test_rows_that_pad_are_not_computed(rope: bool, gpu: Device) -> None:
    heads = {**HEADS, "cache": "f32"} if rope else {"N": 40, "batched": True}
    dims = resolve("linear", {"tokens": 8, "K": 96, "format": "q4_0", **heads, **NORM})
    rng = np.random.default_rng(8)
    weight, _ = make_weight(rng, "q4_0", 40, 96)
    x = rng.standard_normal((8, 96)).astype(np.float32)
    batch = contiguous_batch(0, 8)
    operands = {"x": x, "weight": weight, "norm_weight": np.ones(96, np.float32), "batch": batch}
    operands |= {"table": rng.standard_normal((8, 4)).astype(np.float32)} if rope else {}
    operands |= {name: np.zeros((16, 8), np.float32) for name in ("k_cache", "v_cache") if rope}
    whole = run(RowsConfig(64, 8, 2, 4, 4), dims, operands, gpu)
    batch = batch.copy()
    batch[0, 0] = 5
    x = x.copy()
    x[5:] = np.nan
    found = run(RowsConfig(64, 8, 2, 4, 4), dims, {**operands, "x": x, "batch": batch}, gpu)
    width = 24 if rope else 40
    rows, wanted = (each["out"].view(np.float32)[: 8 * width].reshape(8, width) for each in (found, whole))
    assert wanted.all()
    assert rows[:5].tobytes() == wanted[:5].tobytes()
    assert not rows[5:].any()
    for name in ("k_cache", "v_cache") if rope else ():
        cache, all_rows = (each[name].view(np.float32).reshape(-1, 8) for each in (found, whole))
        assert cache[:5].tobytes() == all_rows[:5].tobytes()
        assert all_rows[5:8].any()
        assert not cache[5:].any()


def test_which_shapes_take_it() -> None:
    """As measured; where a device has fewer processors, for as many rows of the weight for each."""
    caps = replace(LARGE_GPU, processors=132)

    def taken(K: int, N: int, tokens: int, units: bool = False, **more: Any) -> str | None:
        kinds = (MatrixShape("f16", "f32", 16, 16, 16),) if units else ()
        dims = resolve("linear", {"tokens": tokens, "K": K, "N": N, "format": "q4_0", **more})
        config = config_for(dims, replace(caps, matrix_shapes=kinds, f16=True))
        return str(config) if config else None

    assert [taken(2048, 16384, tokens) for tokens in (1, 2, 3, 4)] == [None, "512x16x4x2", *["512x16x4x4"] * 2]
    assert [taken(2048, 16384, 8, units) for units in (False, True)] == ["512x16x4x8", None]
    assert [taken(8192, 2048, tokens, True) for tokens in (2, 4, 8, 16)] == [
        "512x64x2x2",
        "512x64x2x4",
        "512x32x2x4",
        None,
    ]
    small = [taken(2048, 2048, tokens, units) for tokens, units in ((2, False), (16, False), (16, True), (17, False))]
    assert small == [None, "256x16x2x4", None, None]
    assert taken(576, 1536, 4) is None, "not measured"
    halved = replace(caps, processors=66)
    dims = resolve("linear", {"tokens": 4, "K": 2048, "N": 1024, "format": "q4_0"})
    assert str(config_for(dims, halved)) == "512x64x2x4"
    assert str(config_for(dims, replace(halved, max_invocations=256))) == "256x64x2x4"


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_the_tuner_has_candidates(tokens: int, gpu: Device) -> None:
    caps = replace(gpu.caps, max_workgroup_memory=48 << 10, max_invocations=1024, subgroup_size=32)
    dims = resolve("linear", {"tokens": tokens, "K": 2048, "N": 2048, "format": "q4_0"})
    configs = candidate_configs(dims, caps, lambda workgroups: workgroups >= 16)
    assert len(configs) >= 8
    assert {config.x_rows for config in configs} == {2 if tokens == 2 else 4}
    assert {str(config) for config in configs} <= set(ROUTE.candidates(dims, caps))


def test_a_device_with_little_memory_has_shorter_stages(gpu: Device) -> None:
    dims = resolve("linear", {"tokens": 4, "K": 8192, "N": 2048, "format": "q4_0"})
    stages = {}
    for kib in (16, 32, 48):
        caps = replace(gpu.caps, max_workgroup_memory=kib << 10, max_invocations=1024, subgroup_size=32)
        config = fitted(RowsConfig(256, 32, 4, 4, 0), dims, caps)
        assert config is not None
        stages[kib] = config.stage
    assert stages == {16: 32, 32: 96, 48: 128}, "multiples of 32 lanes"
    assert fitted(RowsConfig(256, 32, 4, 4, 0), dims, replace(gpu.caps, max_workgroup_memory=8 << 10)) is None
