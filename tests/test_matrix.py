"""Products by matrix units: staging, edges, formats, prologues, epilogues. Where there are none, they are emulated."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.compile.execute import op_plan
from shaderlm.compile.roofline import matrix_dims
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import DeviceError
from shaderlm.formats.weight_formats import WEIGHT_FORMATS
from shaderlm.gpu import Device, DeviceCaps, MatrixShape, Program, Step, matrices
from shaderlm.graph import reference, resolve
from shaderlm.kernels import LaunchList, Route, choose, over_limits, routes_of
from shaderlm.kernels.linear import matrix
from shaderlm.kernels.linear.matrix import FewConfig, MatrixConfig
from shaderlm.kernels.pointwise import matrix_chain
from shaderlm.kernels.wgsl import unrolled

from .cases import Case, make
from .compare import assert_close
from .front_ends import read_shader
from .sweeps import every_pair, every_second, with_all
from .tiers import runs_all
from .weights import make_weight, whole_k

Config = MatrixConfig | FewConfig
SHAPE = MatrixShape("f16", "f32", 16, 16, 16)
ROUTE: Route = next(route for route in routes_of("linear") if route.name == "matrix")


def with_units(caps: DeviceCaps, shape: MatrixShape = SHAPE, lanes: int = 32) -> DeviceCaps:
    """The capabilities of a GPU with matrix units."""
    more: dict[str, Any] = {"kind": "discrete", "f16": True, "subgroups": True, "matrix_shapes": (shape,)}
    return replace(caps, **more, subgroup_min=lanes, subgroup_max=lanes)


def launches(config: Config, dims: dict[str, Any], device: Device, shape: MatrixShape = SHAPE) -> LaunchList:
    """What is run: the device's own units, or their emulation, which needs no feature of the device."""
    if device.caps.subgroup_matrix:
        return matrix.launch_list_with(config, dims, replace(device.caps, matrix_shapes=(shape,)))
    return matrix.launch_list_with(config, dims, with_units(device.caps, shape), "shared/matrix_emulated")


def results(dims: dict[str, Any], config: Config, device: Device, operands: Any, **how: Any) -> dict[str, Any]:
    program = lower(ROUTE, dims, device.caps, operands, launch_list=launches(config, dims, device, **how))
    return device.run(program)


def product(dims: dict[str, Any], config: Config, device: Device, operands: Any) -> Any:
    return results(dims, config, device, operands)["out"].view(np.float32)


def check(config: Config, device: Device, shape: MatrixShape = SHAPE, **given: Any) -> None:
    """A product against the reference. Rows that pad a batch stay as they were: zeros."""
    case = Case("linear", tuple(given.items()))
    operands, expected = make(case)
    found = results(case.dims, config, device, operands, shape=shape)
    for name, wanted in expected.items():
        assert wanted is not None
        dtype = np.float16 if name != "out" and case.dims["cache"] == "f16" else np.float32
        actual = found[name].view(dtype)[: wanted.size].reshape(wanted.shape)
        assert_close(actual, wanted, "linear f16, formats", f"{name} of {case.name} {config}")


SMALL = MatrixConfig(16, 32, 8, (1, 1, 2))
FEW = FewConfig(16, 16, 4, 3, spread=2)
ROPE: dict[str, Any] = {"Hq": 3, "Hkv": 1, "D": 8, "rotary": 4, "N": 40, "epilogue": "rope_kv_write"}


@pytest.mark.parametrize(("kind", "config"), every_pair([*WEIGHT_FORMATS], [SMALL, FEW], 4), ids=str)
def test_every_format(kind: str, config: Config, device: Device) -> None:
    check(config, device, tokens=5, K=whole_k(96, kind), N=35, format=kind, bias=True)


@pytest.mark.parametrize("prologue", ["none", "rms_norm"])
@pytest.mark.parametrize("epilogue", ["none", "add", "silu_mul", "gelu_residual", "rope_kv_write"])
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, split=3), FEW], ids=str)
def test_prologues_and_epilogues(prologue: str, epilogue: str, config: Config, device: Device) -> None:
    """Rows of a batch that is not full, columns that fill neither a tile nor a quad, a part of k that is shorter."""
    given: dict[str, Any] = {
        "tokens": 19,
        "K": 352,
        "N": 38,
        "format": "q8_0",
        "bias": config.split == 1,
        "eps": 1e-5,
        "batched": True,
        **(ROPE if epilogue == "rope_kv_write" else {}),
    }
    check(config, device, **{**given, "prologue": prologue, "epilogue": epilogue})


def test_rotated_rows_of_a_cache_of_f16(device: Device) -> None:
    """Heads lie in several tiles, all their elements are rotated, and the shape fixes the number of rows."""
    rope = {**ROPE, "Hq": 2, "D": 24, "rotary": 24, "N": 96, "cache": "f16"}
    check(SMALL, device, tokens=18, K=64, format="q4_0", **rope)


@pytest.mark.parametrize(
    "tiles", every_second((*matrix.TILES, matrix.PICTURE_TILES)), ids=lambda tiles: f"{tiles.rows} rows"
)
def test_every_tile(tiles: matrix.Tiles, device: Device) -> None:
    """More than one tile of rows and of columns, neither of them full, and a last step of k that is not.

    Those that a device has the memory for; of each line, a software adapter has it for one at least.
    """
    count = 0
    for i, config in enumerate(replace(config, split=1 + i % 2) for i, config in enumerate(tiles.configs)):
        given: dict[str, Any] = {"tokens": config.rows + 3, "K": 64 * config.blocks + 32, "N": config.columns + 6 + i}
        given["format"] = "q4_0"
        if over_limits(launches(config, resolve("linear", given), device), device.caps) is None:
            check(config, device, **given)
            count += 1
    assert count


@pytest.mark.parametrize(
    "config",
    [
        FewConfig(16, 16, 8, 2, buffers=2, spread=1),
        with_all(FewConfig(32, 16, 4, 3, spread=2)),
        with_all(FewConfig(16, 32, 2, 6, buffers=2, spread=2)),
        FewConfig(16, 16, 4, 2, spread=4, split=2),
    ],
    ids=str,
)
def test_few_rows(config: FewConfig, device: Device) -> None:
    """More tiles of columns than workgroups, and blocks past the end of k."""
    check(config, device, tokens=config.rows + 3, K=352, N=5 * config.columns + 6, format="q4_0")


@pytest.mark.parametrize("epilogue", ["add", "silu_mul", "gelu_residual"])
def test_few_rows_and_parts_of_k(epilogue: str, device: Device) -> None:
    """The kernel stores parts, and has an epilogue that the merge applies. A part of k is shorter than the others."""
    given: dict[str, Any] = {"tokens": 19, "K": 352, "N": 38, "format": "q8_0", "batched": True, "epilogue": epilogue}
    check(replace(FEW, subgroups=1, split=3), device, **given, prologue="rms_norm", eps=1e-5, bias=True)


def test_other_shapes_of_matrices(device: Device) -> None:
    """Those of the device, if it has matrix units."""
    sizes = ((8, 8, 8), (16, 8, 16), (16, 8, 8), (32, 8, 16)) if runs_all() else ((16, 8, 8),)
    shapes = [shape for shape in device.caps.matrix_shapes if (shape.component, shape.result) == ("f16", "f32")]
    for shape in shapes or [MatrixShape("f16", "f32", *size) for size in sizes]:
        check(MatrixConfig(32, 32, 4, (1, 2, 1), buffers=2), device, shape, tokens=33, K=96, N=40)
        check(FewConfig(32, 16, 4, 1), device, shape, tokens=33, K=96, N=40)


@pytest.mark.parametrize("size", [with_all((16, 16, 16)), (16, 8, 16), with_all((8, 8, 8))], ids=str)
def test_the_chain_that_measures_them(size: tuple[int, int, int], device: Device) -> None:
    """Small numbers, so that sums are exact: every product of every round is there, once."""
    shape = MatrixShape("f16", "f32", *size)
    own = shape in device.caps.matrix_shapes
    caps = replace(device.caps, matrix_shapes=(shape,)) if own else with_units(device.caps, shape)
    case = Case("matrix_chain", tuple({**matrix_dims(caps), "count": 3, "rounds": 64}.items()))
    operands, expected = make(case)
    units = matrix.MATRIX_UNITS if own else "shared/matrix_emulated"
    (route,) = routes_of("matrix_chain")
    launch_list = matrix_chain.launch_list_with(case.dims, caps, units)
    wanted = expected["out"]
    assert wanted is not None
    actual = device.run(lower(route, case.dims, caps, operands, launch_list=launch_list))["out"].view(np.float32)
    assert_close(actual.reshape(wanted.shape), wanted, "exact", f"chain of {shape}")


def test_which_chains_run(device: Device) -> None:
    caps = with_units(device.caps)
    (route,) = routes_of("matrix_chain")
    dims = dict(matrix_dims(caps))
    assert route.reason(dims, caps) is None
    reasons: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "has no matrix units": ({}, {"matrix_shapes": ()}),
        "matrices of 16×16×16 do not make up 40×64×16": ({"rows": 40}, {}),
        "rounds % 32 must be 0, rounds is 33": ({"rounds": 33}, {}),
    }
    for words, (more, changes) in reasons.items():
        assert words in str(route.reason({**dims, **more}, replace(caps, **changes)))


@pytest.mark.parametrize("config", [SMALL, FEW], ids=str)
def test_odd_numbers(config: Config, device: Device) -> None:
    """Zeros, rows far above what f16 holds and far below it, and one input that is far larger than its neighbours."""
    rng = np.random.default_rng(3)
    dims = resolve("linear", {"tokens": 7, "K": 64, "N": 9, "format": "q8_0"})
    weight, dense = make_weight(rng, "q8_0", 9, 64)
    x = rng.standard_normal((7, 64)).astype(np.float32)
    factors = np.array([1, 0, 1e5, 1e30, 1e-20, 1, 1], np.float32)[:, None]
    x = x * factors
    x[5, 17] = 1e5
    x[6, 3] = np.nan
    actual = product(dims, config, device, {"x": x, "weight": weight})[: 7 * 9].reshape(7, 9)
    expected = reference.linear(x, dense)
    size = 4 * np.abs(expected[:6]).max(axis=1, keepdims=True)  # the tolerance is for results of the order of 0.1
    assert not actual[1].any()
    size[1] = 1
    assert_close(actual[:6] / size, expected[:6] / size, "linear f16, formats", "rows of all magnitudes")
    assert np.isnan(actual[6]).all(), "an input that is no number is not hidden"


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, split=2),
        *map(with_all, (FewConfig(16, 16, 8, 3, spread=4), FewConfig(16, 16, 8, 2, spread=4, split=2))),
    ],
    ids=str,
)
def test_weights_in_several_bindings(config: Config, small_device: Device) -> None:
    given: dict[str, Any] = {"tokens": 6, "K": 544, "N": 300, "format": "q8_0", "bias": True}
    case = Case("linear", tuple(given.items()))
    assert len(launches(config, case.dims, small_device).dispatches) > 1 + config.split, "one binding holds it all"
    check(config, small_device, **given)


@pytest.mark.parametrize("config", [with_all(SMALL), FEW], ids=str)
def test_a_tile_without_rows_writes_nothing(config: Config, device: Device) -> None:
    """A bucket of 48 rows with 5 of them: two of three tiles have nothing to do."""
    rng = np.random.default_rng(1)
    dims = resolve("linear", {"tokens": 48, "K": 64, "N": 40, "format": "f32", "batched": True})
    weight, dense = make_weight(rng, "f32", 40, 64)
    x = rng.standard_normal((48, 64)).astype(np.float32) / 8
    batch = np.zeros((49, 4), np.uint32)
    batch[0, 0] = 5
    actual = product(dims, config, device, {"x": x, "weight": weight, "batch": batch})[: 48 * 40].reshape(48, 40)
    assert_close(actual[:5], reference.linear(x[:5], dense), "linear f16, formats", "rows of the batch")
    assert not actual[5:].any()


def test_when_it_is_taken(device: Device) -> None:
    caps = replace(with_units(device.caps), max_workgroup_memory=48 << 10, max_invocations=1024)
    dims = resolve("linear", {"tokens": 128, "K": 2048, "N": 2048, "format": "q4_0", "prologue": "rms_norm"})
    assert choose("linear", dims, caps, None, "fast").name == "matrix"
    assert choose("linear", {**dims, "prologue": "none"}, caps, None, "exact").name == "tile_shared"
    reasons: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "has no matrix units": ({}, {"matrix_shapes": ()}),
        "sums in f32; they have i8 → i32": ({}, {"matrix_shapes": (MatrixShape("i8", "i32", 16, 16, 32),)}),
        "they have 8 to 32 lanes": ({}, {"subgroup_min": 8}),
        "tokens is 1": ({"tokens": 1}, {}),
        "they are 8 and 6": ({"epilogue": "rope_kv_write", "D": 8, "rotary": 6}, {}),
        "left to gemv_rows_int16 and rope_kv_write; tokens is 4": ({"epilogue": "rope_kv_write", "tokens": 4}, {}),
    }
    for words, (more, changes) in reasons.items():
        assert words in str(matrix.unsupported_reason({**dims, **more}, replace(caps, **changes)))


@pytest.mark.parametrize("tokens", [2, 16, 64, 512])
def test_every_candidate_is_whole(tokens: int, device: Device) -> None:
    """Subgroups get whole matrices, and a large GPU has the threads and the memory."""
    caps = replace(with_units(device.caps), max_workgroup_memory=48 << 10, max_invocations=1024)
    for K, N in ((2048, 2048), (4096, 28672), (14336, 4096)):
        dims = resolve("linear", {"tokens": tokens, "K": K, "N": N, "format": "q4_0"})
        assert matrix.config_for(dims, caps).fits(SHAPE)
        for name, launch_list in matrix.candidates(dims, caps).items():
            assert over_limits(launch_list(), caps) is None, name


def test_where_inputs_stay_in_registers(device: Device) -> None:
    """Few rows, and not many columns; the longer k, the fewer of them. And only where there is the memory for it."""
    caps = replace(with_units(device.caps), max_workgroup_memory=48 << 10, max_invocations=1024)
    small = replace(caps, max_workgroup_memory=16 << 10)

    def taken(caps: DeviceCaps, tokens: int, K: int, N: int) -> str:
        return str(matrix.config_for(resolve("linear", {"tokens": tokens, "K": K, "N": N, "format": "q4_0"}), caps))

    assert taken(caps, 16, 2048, 3072) == "few16x16x8-8b-96-1"
    assert taken(caps, 17, 2016, 2048) == "few32x16x8-8-128-1"
    assert taken(caps, 17, 2048, 16384) == "few32x16x8-8-128-1"
    assert taken(caps, 16, 8192, 2048) == "few16x16x8-8b-32-4"
    others = (
        *((caps, 33, 2048, 2048), (caps, 16, 2080, 4096), (caps, 16, 2048, 8192), (small, 16, 2048, 2048)),
        *((caps, 16, 8224, 2048), (caps, 32, 2048, 32768)),
    )
    assert not any(taken(*other).startswith("few") for other in others)


def test_tiles_of_pictures(device: Device) -> None:
    """Weights of 16 bits, many rows: narrower tiles where wide ones would leave most cores idle in the last round."""
    caps = replace(with_units(device.caps), max_workgroup_memory=48 << 10, max_invocations=1024, processors=132)

    def taken(tokens: int, K: int, N: int, form: str = "f16") -> str:
        dims = resolve("linear", {"tokens": tokens, "K": K, "N": N, "format": form})
        assert over_limits(launches(matrix.config_for(dims, caps), dims, device), caps) is None
        return str(matrix.config_for(dims, caps))

    assert {taken(4096, 1024, N) for N in (1024, 3072, 4096)} == {"128x128x4-2.4.1-1"}
    assert {taken(4096, K, 1152) for K in (1152, 4304)} == {"128x96x8-4.2.1-1"}
    assert {taken(4096, 1152, N) for N in (3456, 4304)} == {"128x128x4-2.4.1-1"}
    assert taken(512, 1152, 1152) == taken(512, 1152, 1152, "q4_0"), "a prompt"
    assert taken(4096, 4096, 4096, "q8_0") == "128x128x8-4.2.1-1"


class Units:
    """A device whose matrix units multiply right, except those of one shape; others are refused by the driver."""

    def __init__(self, caps: DeviceCaps, wrong: MatrixShape, refused: MatrixShape) -> None:
        self.caps, self.wrong, self.refused = caps, wrong, refused

    def run(self, program: Program) -> dict[str, Any]:
        if f"found {self.refused}" in program.outputs:
            raise DeviceError("it cannot be compiled")
        found = {}
        for shape in self.caps.matrix_shapes:
            if f"found {shape}" in program.outputs:
                left, right = (side.astype(np.float32) for side in matrices.operands(shape))
                product = 2 * left @ right.T
                product[1, 2] += shape == self.wrong
                found[f"found {shape}"] = product.reshape(-1).view(np.uint8)
        return found


def test_units_that_are_wrong_are_not_used(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    shapes = tuple(MatrixShape("f16", "f32", 16, n, k) for n, k in ((16, 16), (8, 16), (8, 8)))
    integers = MatrixShape("i8", "i32", 16, 16, 32)
    # A name of its own: what was right on this device is kept.
    caps = replace(with_units(device.caps), name="units that are wrong", matrix_shapes=(*shapes, integers))
    units = Units(caps, wrong=shapes[0], refused=shapes[2])
    logger = logging.getLogger("shaderlm")
    propagated, logger.propagate = logger.propagate, True
    try:
        found = matrices.with_probed_matrices(cast(Device, units), ("test", 0))
    finally:
        logger.propagate = propagated
    assert found.matrix_shapes == (shapes[1], integers)
    assert "f16 → f32 16×16×16: result [1, 2] is" in caplog.text
    assert "f16 → f32 16×8×8: it cannot be compiled" in caplog.text


@pytest.mark.smoke
@pytest.mark.dawn
@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_tint_reads_every_kernel(kind: str, null: Any) -> None:
    """Every format with every prologue and epilogue, and every tile, as devices with matrix units get them."""
    caps = replace(with_units(LARGE_GPU), implementation="dawn")
    configs = (SMALL, replace(SMALL, split=2), FEW)
    names = ("none", "add", "silu_mul", "gelu_residual")
    epilogues: tuple[dict[str, Any], ...] = (*({"epilogue": name} for name in names), ROPE)
    ways = itertools.product(("none", "rms_norm"), epilogues, (False, True), configs)
    made: list[tuple[dict[str, Any], Config]] = [
        ({"format": kind, "prologue": prologue, "batched": batched, **epilogue}, config)
        for prologue, epilogue, batched, config in ways
    ]
    if kind == "q4_0":
        many = (*matrix.TILES, matrix.PICTURE_TILES)
        made += [({"format": kind}, config) for tiles in many for config in tiles.configs]
        made += [({"format": kind}, FewConfig(rows, 16, 8, 8, buffers)) for rows, buffers in ((16, 2), (32, 1))]
        made += [({"format": kind, "epilogue": "add"}, replace(FEW, subgroups=1, split=2))]
        made += [({"format": kind, **ROPE, "cache": cache}, SMALL) for cache in ("f16", "f32")]
    steps: dict[str, Step] = {}
    for how, config in made:
        dims = resolve("linear", {"tokens": 16, "K": 256, "N": 64, **how})
        plan = op_plan(ROUTE, dims, caps, matrix.launch_list_with(config, dims, caps))
        steps |= {launch.step.source: launch.step for launch in plan.launches}
    for size in ((16, 16, 16), (16, 8, 16), (8, 8, 8)):
        units = replace(caps, matrix_shapes=(MatrixShape("f16", "f32", *size),))
        plan = op_plan(routes_of("matrix_chain")[0], matrix_dims(units), units)
        steps |= {launch.step.source: launch.step for launch in plan.launches}
    for step in steps.values():
        read_shader(null, step.label, step.source)
    assert any("subgroupMatrixMultiplyAccumulate" in source for source in steps)
    assert not any("// unrolled" in source or "// registers" in source for source in steps)


def test_loops_are_written_out() -> None:
    source = """const N: u32 = 2u;
fn main() {
    var a: array<array<f32, 2>, N>;  // registers
    for (var i = 0u; i < N; i = i + 1u) {  // unrolled
        for (var j = 0u; j < 2u; j = j + 1u) {  // unrolled
            a[i][j] = f32(i * N + j);
        }
    }
    for (var i = 0u; i < 9u; i = i + 1u) {
        a[0u][1u] = f32(i);
    }
}
"""
    lines = [line.strip() for line in unrolled(source, {"N": "2u"}).splitlines()]
    assert [line for line in lines if line.startswith("var")] == [
        f"var a_{i}: f32;" for i in ("0_0", "0_1", "1_0", "1_1")
    ]
    assert [line for line in lines if "N +" in line] == [
        f"a_{i}_{j} = f32({i}u * N + {j}u);" for i, j in itertools.product(range(2), range(2))
    ]
    assert lines[-4:] == ["for (var i = 0u; i < 9u; i = i + 1u) {", "a_0_1 = f32(i);", "}", "}"], "others stay loops"
