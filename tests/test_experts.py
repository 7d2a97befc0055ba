"""Mixtures of experts: formulas against rows worked out one by one, what they cost, and what is read of the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower, tuner
from shaderlm.compile.execute import op_plan
from shaderlm.compile.timing import Filler, Operands
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import InputError
from shaderlm.formats.weight_formats import WEIGHT_FORMATS
from shaderlm.gpu import Device
from shaderlm.graph.fuse import fuse
from shaderlm.graph.ops import OPS, resolve
from shaderlm.kernels import choose, options
from shaderlm.kernels.experts.linear_experts import grouped_int16_with, matrix_config, matrix_with
from shaderlm.kernels.linear.matrix import MATRIX_UNITS, MatrixConfig
from shaderlm.kernels.linear.rows_int16 import TileConfig
from shaderlm.kernels.registry import routes_of
from shaderlm.models.architecture import Architecture
from shaderlm.models.config import Config, StepSpec
from shaderlm.models.supported import architecture

from .cases import CASES, Case, result
from .compare import assert_close
from .front_ends import read_shader
from .operands import MAKERS
from .test_matrix import with_units
from .test_plan import plan_of

EXPERT_OPS = ("route_experts", "linear_experts", "add_gated")


# The formulas take dense weights.
_DENSE = [case for case in CASES if case.op in EXPERT_OPS and case.dims.get("format", "f32") in ("f32", "f16")]


@pytest.mark.parametrize("case", _DENSE, ids=lambda case: case.name)
def test_formulas(case: Case) -> None:
    given, expected = MAKERS[case.op](np.random.default_rng(1), {**case.dims, "batched": False})
    found = OPS[case.op].compute(case.dims, {name: value for name, value in given.items() if value is not None})
    for name, wanted in expected.items():
        assert wanted is not None
        np.testing.assert_allclose(found[name].reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-6)


def test_decode_reads_the_chosen_experts_alone() -> None:
    sizes = {"experts": 128, "used": 8, "K": 256, "N": 64}
    one, many = (resolve("linear_experts", {**sizes, "tokens": tokens}) for tokens in (1, 512))
    op = OPS["linear_experts"]
    assert op.part("weight", one, 0) == 8 / 128
    assert op.part("weight", many, 0) == pytest.approx(1)
    assert op.flops(one, 0) == 2 * 8 * 256 * 64


@pytest.mark.parametrize(
    ("op", "dims", "message"),
    [
        ("route_experts", {"tokens": 1, "experts": 4, "used": 5}, "at most experts=4"),
        ("route_experts", {"tokens": 1, "experts": 4, "used": 2, "gating": "tanh"}, "softmax, softmax_used, sigmoid"),
        (
            "linear_experts",
            {"tokens": 1, "experts": 4, "used": 2, "K": 32, "N": 3, "combine": "silu_mul"},
            "N must be even",
        ),
        (
            "linear_experts",
            {"tokens": 1, "experts": 4, "used": 2, "K": 32, "N": 4, "combine": "sum", "prologue": "rms_norm"},
            "the prologue must be none",
        ),
        ("linear_experts", {"tokens": 1, "experts": 4, "used": 2, "K": 32, "N": 4, "residual": True}, "needs combine"),
    ],
)
def test_shapes_that_cannot_be(op: str, dims: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(op, dims)


SIZES = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 512,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "expert_count": 64,
    "expert_used_count": 4,
    "expert_feed_forward_length": 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def mixture(name: str, kind: str, biases: tuple[str, ...] = ()) -> tuple[Architecture, Config]:
    """A model whose matrices are of one format, without weights."""
    metadata = {"general.architecture": name, **{f"{name}.{key}": value for key, value in SIZES.items()}}
    if name == "gpt-oss":
        metadata["gpt-oss.attention.sliding_window"] = 128
    made = architecture(metadata)
    given = {"token_embd.weight": (1000, 512)} | {f"blk.{i}.{each}.bias": (0,) for i in range(2) for each in biases}
    shapes = {**given, **made.tensors(metadata, given)}
    formats = {key: kind if len(shape) > 1 and key.endswith("weight") else "f32" for key, shape in shapes.items()}
    return made, made.read(metadata, shapes, formats)


@pytest.mark.parametrize(
    ("name", "kind", "biases"),
    [("qwen3moe", "q4_0", ()), ("gpt-oss", "mxfp4", ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))],
)
def test_a_step_of_one_row_counts_the_chosen_experts_alone(name: str, kind: str, biases: tuple[str, ...]) -> None:
    """By hand: 4 of 64 experts of 3 · 512 · 256 weights; 18 bytes hold 32 of Q4_0, 17 of MXFP4."""
    plan = plan_of(*mixture(name, kind, biases), LARGE_GPU, 1)
    counted = sum(launch.work(100)[0] for launch in plan.launches if launch.op == "linear_experts")
    weights = 2 * 4 * 3 * 512 * 256 * {"q4_0": 18, "mxfp4": 17}[kind] // 32
    vectors = 2 * 4 * (2 * 256 + 512) * 4 if biases else 0
    # Inputs and results: x, the norm, gated values written and read, the sum, what it is added to, ids and factors.
    around = 2 * 4 * (512 + 512 + 4 * 256 + 4 * 256 + 512 + 512 + 3 * 4)
    assert weights + vectors < counted <= weights + vectors + around
    everything = sum(buffer.nbytes for buffer in plan.buffers.values() if buffer.role == "weight")
    whole = sum(launch.work(100)[0] for launch in plan.launches)
    assert whole < everything / 5  # nearly all weights are those of experts, and a sixteenth of these is read


@pytest.mark.parametrize("combine", ["silu_mul", "sum"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_that_no_row_chose_are_not_read(tokens: int, combine: str, device: Device) -> None:
    """Their weights are NaN: one product with them would show."""
    dims = resolve(
        "linear_experts",
        {"tokens": tokens, "experts": 8, "used": 2, "K": 64, "N": 38, "combine": combine, "bias": True},
    )
    given, _ = MAKERS["linear_experts"](np.random.default_rng(5), dims)
    operands: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    operands["ids"] = np.full((tokens, 2), 5, np.uint32) - np.arange(2, dtype=np.uint32) * 3  # 5 and 2
    wanted = OPS["linear_experts"].compute(dims, operands)["out"].reshape(-1)
    others = [e for e in range(8) if e not in (5, 2)]
    for name in ("weight", "bias"):
        operands[name] = operands[name].copy()
        operands[name].reshape(8, 38, -1)[others] = np.nan
    count = 0
    for route in routes_of("linear_experts"):
        if route.reason(dims, device.caps) is None:
            found = device.run(lower(route, dims, device.caps, operands))["out"].view(np.float32)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=route.name)
            count += 1
    assert count >= 2


@pytest.mark.parametrize("combine", ["silu_mul", "sum"])
def test_candidates_match_the_reference(combine: str, gpu: Device) -> None:
    """The first and the last configuration: compiling takes a software adapter a second each."""
    sizes = {"tokens": 1, "experts": 6, "used": 3, "K": 288, "N": 534, "format": "q4_0", "combine": combine}
    case = Case("linear_experts", tuple(resolve("linear_experts", sizes).items()))
    operands, expected = MAKERS["linear_experts"](np.random.default_rng(2), case.dims)
    wanted = expected["out"]
    assert wanted is not None
    found = [each for each in options("linear_experts", case.dims, gpu.caps, "fast") if each.config]
    assert len(found) > 1
    for each in (found[0], found[-1]):
        raw = gpu.run(lower(each.route, case.dims, gpu.caps, operands, launch_list=each.launch_list))
        assert_close(result(case, "out", raw["out"], wanted), wanted, "linear", each.name)


def test_experts_are_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one weight, of which every call chooses other experts."""
    dims = resolve("linear_experts", {"tokens": 1, "experts": 16, "used": 4, "K": 32, "N": 8, "format": "q4_0"})
    fill = Filler()
    choices = [tuple(int(i) for i in fill("ids", 16, dims).view(np.uint32)) for _ in range(8)]
    assert len(set(choices)) == 8
    assert all(len(set(each)) == 4 and max(each) < 16 for each in choices)
    few = [each for each in options("linear_experts", dims, device.caps, "exact") if each.route.name == "gemv"][:1]
    monkeypatch.setattr(tuner, "options", lambda *given: few)
    bound: list[frozenset[str]] = []
    bind = Operands.bind

    def seen(self: Operands, program: Any, dims: Any, inputs: frozenset[str], keys: Any) -> Any:
        bound.append(inputs)
        return bind(self, program, dims, inputs, keys)

    monkeypatch.setattr(Operands, "bind", seen)
    made = tuner.Tuner(device, "exact", tuner.QUICK)
    try:
        found = made.tune("linear_experts", dims)
    finally:
        made.close()
    assert found is not None
    assert found.built_in == "gemv"
    assert bound == [{"ids", "x"}]


def test_products_of_experts_are_tuned_for_one_row() -> None:
    made, config = mixture("qwen3moe", "q4_0")
    for tokens, count in ((1, 2), (4, 0)):
        graph, _ = fuse(made.build(config, StepSpec(tokens)))
        found = [node for node in tuner.shapes_of([graph], LARGE_GPU, "fast") if node.op == "linear_experts"]
        assert len(found) == count


SMALL = MatrixConfig(16, 32, 8, (1, 1, 2))
LARGE = MatrixConfig(64, 64, 8, (2, 2, 1), early=True)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (SMALL, {"tokens": 20, "experts": 5, "used": 2, "K": 96, "N": 70, "format": "q4_0", "combine": "silu_mul"}),
        (SMALL, {"tokens": 23, "experts": 6, "used": 3, "K": 64, "N": 67, "format": "q8_0", "combine": "sum"}),
        (
            SMALL,
            {"tokens": 70, "experts": 4, "used": 2, "K": 96, "N": 34, "format": "mxfp4", "combine": "swiglu_clamped"}
            | {"bias": True, "batched": True},
        ),
        (
            LARGE,
            {"tokens": 90, "experts": 3, "used": 2, "K": 352, "N": 66, "format": "q4_0", "combine": "sum"}
            | {"bias": True, "residual": True, "batched": True},
        ),
        (SMALL, {"tokens": 18, "experts": 40, "used": 1, "K": 32, "N": 10, "format": "f32"}),
    ],
)
def test_matrix_units(config: MatrixConfig, given: dict[str, Any], device: Device) -> None:
    """Those of the device, or their emulation."""
    case = Case("linear_experts", tuple(resolve("linear_experts", given).items()))
    operands, expected = MAKERS["linear_experts"](np.random.default_rng(4), case.dims)
    wanted = expected["out"]
    assert wanted is not None
    route = next(route for route in routes_of("linear_experts") if route.name == "matrix")
    own = device.caps.subgroup_matrix
    caps = device.caps if own else with_units(device.caps)
    launches = matrix_with(config, case.dims, caps, MATRIX_UNITS if own else "shared/matrix_emulated")
    raw = device.run(lower(route, case.dims, device.caps, operands, launch_list=launches))
    assert_close(result(case, "out", raw["out"], wanted), wanted, "linear f16, formats", case.name)


def test_matrix_units_take_many_rows_in_tiles_that_experts_fill() -> None:
    caps = with_units(LARGE_GPU)
    sizes = {"experts": 128, "used": 8, "K": 2048, "N": 1536, "format": "q4_0", "combine": "silu_mul"}
    for tokens, name, rows in ((16, "gemv_int16", 0), (64, "matrix", 16), (512, "matrix", 64), (4096, "matrix", 128)):
        dims = resolve("linear_experts", {**sizes, "tokens": tokens})
        route = choose("linear_experts", dims, caps, None, "fast")
        assert route.name == name
        assert not rows or matrix_config(dims).rows == rows
        assert choose("linear_experts", dims, caps, None, "exact").name == ("gemv" if tokens == 16 else "grouped")
        without = choose("linear_experts", dims, LARGE_GPU, None, "fast").name
        assert without == ("gemv_int16" if tokens == 16 else "grouped_int16")


# Software adapters take 20 to 80 s to compile one. The tests of `kernel_runs` have those that are taken untuned.
LONG_TILES = TileConfig(4, 4, 8, 8), TileConfig(8, 4, 8, 4), TileConfig(8, 8, 16, 1, 2)


@pytest.mark.parametrize(
    "config", [TileConfig(4, 2, 4, 4), *(pytest.param(tile, marks=pytest.mark.long) for tile in LONG_TILES)], ids=str
)
def test_tiles_of_16_bits(config: TileConfig, device: Device) -> None:
    given = {"tokens": 75, "experts": 4, "used": 2, "K": 96, "N": 67, "format": "q4_0", "combine": "sum"}
    case = Case("linear_experts", tuple(resolve("linear_experts", {**given, "batched": True, "bias": True}).items()))
    operands, expected = MAKERS["linear_experts"](np.random.default_rng(6), case.dims)
    wanted = expected["out"]
    assert wanted is not None
    route = next(route for route in routes_of("linear_experts") if route.name == "grouped_int16")
    raw = device.run(lower(route, case.dims, device.caps, operands, launch_list=grouped_int16_with(config, case.dims)))
    assert_close(result(case, "out", raw["out"], wanted), wanted, "linear", str(config))


@pytest.mark.dawn
def test_tint_reads_matrix_units(null: Any) -> None:
    """Every format, what becomes of results, and every tile, as devices with matrix units get them."""
    caps = replace(with_units(LARGE_GPU), implementation="dawn")
    route = next(route for route in routes_of("linear_experts") if route.name == "matrix")
    combined = ("none", "silu_mul", "swiglu_clamped", "sum")
    made: list[tuple[dict[str, Any], MatrixConfig]] = [
        ({"format": kind, "combine": combine, "batched": batched}, SMALL)
        for kind in WEIGHT_FORMATS
        for combine, batched in zip(combined, (False, True, False, True), strict=True)
    ]
    tiles = {matrix_config({"tokens": tokens, "used": 1, "experts": 4}) for tokens in (8, 64, 256, 1024)}
    assert len(tiles) == 4
    made += [({"format": "q4_0", "combine": "silu_mul"}, config) for config in tiles]
    sources: dict[str, Any] = {}
    for how, config in made:
        dims = resolve("linear_experts", {"tokens": 32, "experts": 4, "used": 2, "K": 256, "N": 64, **how})
        plan = op_plan(route, dims, caps, matrix_with(config, dims, caps))
        sources |= {launch.step.source: launch.step for launch in plan.launches}
    for step in sources.values():
        read_shader(null, step.label, step.source)
    assert any("subgroupMatrixMultiplyAccumulate" in source for source in sources)
