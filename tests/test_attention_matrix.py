"""Attention by matrix units: tiles, segments, rescaled sums, rounding. Where a device has no units, loops stand in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.gpu import Device, DeviceCaps, MatrixShape, Program
from shaderlm.graph import reference, resolve
from shaderlm.graph.batch import IMAGE_WORDS, PAGE, REACH, RUN, make_batch
from shaderlm.kernels import LaunchList, Route, choose, routes_of
from shaderlm.kernels.attention import reach
from shaderlm.kernels.attention.attention import launch_list_with
from shaderlm.kernels.attention.matrix import Tile, run_rows

from .attention_cases import MANY, RUNS
from .attention_operands import MAKERS, Stretch
from .compare import assert_close
from .index_guard import run_guarded, unchecked_device
from .matrix_loops import in_loops
from .sweeps import every_pair, with_all
from .test_attention import GPU, Heads, dims_of, rows_of
from .vision_operands import MAKERS as VISION

SHAPE, SMALL = (MatrixShape("f16", "f32", side, side, side) for side in (16, 8))
ROUTE: Route = next(route for route in routes_of("attention") if route.name == "matrix")


def with_units(caps: DeviceCaps, shape: MatrixShape = SHAPE) -> DeviceCaps:
    """The device's own capabilities, or those of a GPU with matrix units."""
    if caps.subgroup_matrix and shape in caps.matrix_shapes:
        return caps
    return replace(
        caps, kind="discrete", f16=True, subgroups=True, matrix_shapes=(shape,), subgroup_min=32, subgroup_max=32
    )


def runnable(program: Program, device: Device, shape: MatrixShape = SHAPE) -> Program:
    return program if shape in device.caps.matrix_shapes else in_loops(program)


def launches(
    on: Device, dims: dict[str, Any], tile: Tile | None = None, shape: MatrixShape = SHAPE, *, unroll: bool = False
) -> LaunchList:
    """Runs as with matrix units, with the tile that the route takes or another; other rows as the device can."""
    units = with_units(on.caps, shape)
    taken = ROUTE.launch_list(dims, units).dispatches[0] if tile is None else run_rows(tile, dims, shape, 32)
    assert taken.kernel.name == "attention_matrix"
    assert taken.kernel.unroll
    if shape not in on.caps.matrix_shapes:  # loops that are not written out compile in a fifth of the time
        taken = replace(taken, kernel=replace(taken.kernel, unroll=unroll))
    return launch_list_with(taken, dims, replace(on.caps, kind="discrete"))


def attend(
    on: Device,
    dims: dict[str, Any],
    operands: dict[str, Any],
    tile: Tile | None = None,
    shape: MatrixShape = SHAPE,
    *,
    unroll: bool = False,
) -> Any:
    """[tokens, Hq, D] by the route."""
    launch_list = launches(on, dims, tile, shape, unroll=unroll)
    program = lower(ROUTE, dims, with_units(on.caps, shape), operands, launch_list=launch_list)
    raw = on.run(runnable(program, on, shape))["out"]
    return raw.view(np.float32).reshape(dims["tokens"], dims["Hq"], -1)


def operands_of(heads: Heads, tokens: int, stretches: tuple[Stretch, ...], seed: int = 3, **more: Any) -> Any:
    dims = dims_of(heads, tokens, cache="f16", **more)
    return dims, *MAKERS["attention"](np.random.default_rng(seed), {**dims, "stretches": stretches})


CASES: list[Any] = [  # heads, tokens, context, stretches
    with_all((4, 1, 64), 25, "single_pass", RUNS),
    with_all((3, 1, 16), 90, "single_pass", MANY),  # groups of three: a tile has room for one pair more than it takes
    with_all((2, 2, 80), 23, "single_pass", RUNS),
    ((16, 1, 128), 21, "single_pass", RUNS),
    ((4, 1, 32), 20, "split", ((0, 590, 9), (1, 700, 1), (2, 11, 1), (3, 300, 9))),
]


@pytest.mark.parametrize(("heads", "tokens", "context", "stretches"), CASES, ids=str)
def test_batches(heads: Heads, tokens: int, context: str, stretches: tuple[Stretch, ...], gpu: Device) -> None:
    dims, operands, expected = operands_of(heads, tokens, stretches, context=context, paged=True)
    assert ROUTE.reason(dims, with_units(gpu.caps)) is None
    assert_close(attend(gpu, dims, operands), expected["out"], "attention f16", f"{heads} {context}")


# Window, cap of scores, sinks. Windows within a tile of keys, and over pages; of rows that share tiles of rows.
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [with_all(20, 0.0, False), with_all(150, 0.0, True), with_all(0, 2.0, False), (70, 1.5, True)],
    ids=str,
)
def test_scores(window: int, softcap: float, sinks: bool, gpu: Device) -> None:
    how: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    stretches: tuple[Stretch, ...] = ((0, 0, 12), (1, 120, 25), (2, 3, 1), (3, 290, 9))
    dims, operands, expected = operands_of((4, 1, 32), 48, stretches, context="split", paged=True, **how)
    assert ROUTE.reason(dims, with_units(gpu.caps)) is None
    assert_close(attend(gpu, dims, operands), expected["out"], "attention f16", f"{how}")


PADDED: dict[str, Any] = {"tokens": 70, "H": 3, "D": 72, "scale": 0.118}
WHOLE: dict[str, Any] = {"tokens": 90, "H": 2, "D": 32, "scale": 0.3}


# Heads that fill matrices, and heads that are padded; spans that end within a tile, and rows of none. Of tensors, and
# of a product that has all three.
@pytest.mark.parametrize(
    ("op", "dims"),
    [
        ("attend_spans", PADDED),
        ("attend_spans", WHOLE),
        ("slice_attend_spans", PADDED),
        ("slice_rope_by_row_attend_spans", {**WHOLE, "rotary": 16}),
    ],
)
def test_spans(op: str, dims: dict[str, Any], gpu: Device) -> None:
    route = next(route for route in routes_of(op) if route.name == "matrix")
    operands, expected = VISION[op](np.random.default_rng(3), dims)
    units = with_units(gpu.caps)
    assert route.reason(dims, units) is None
    launch_list = route.launch_list(dims, units)
    if SHAPE not in gpu.caps.matrix_shapes:
        dispatches = (replace(one, kernel=replace(one.kernel, unroll=False)) for one in launch_list.dispatches)
        launch_list = LaunchList(tuple(dispatches), launch_list.buffers)
    program = lower(route, dims, units, operands, launch_list=launch_list)
    raw = gpu.run(runnable(program, gpu))["out"]
    assert_close(raw.view(np.float32).reshape(expected["out"].shape), expected["out"], "attention f16", str(dims))


# An image over tiles of keys and a page; a row of another sequence; an image of fewer rows than a run; two images.
IMAGES: tuple[Stretch, ...] = ((0, 117, 14), (1, 290, 1), (2, 40, 5), (3, 0, 20))
BLOCKS = ((2, 12), (15, 20), (21, 26), (30, 40))  # rows that see each other


@pytest.mark.parametrize(("route", "window"), [("matrix", 9), ("tiles", 0), with_all("matrix", 0), ("tiles", 9)])
def test_rows_see_all_of_their_image(route: str, window: int, gpu: Device) -> None:
    """As the formula says, beside rows of text and of other sequences. Of a window, from its first key on."""
    dims, operands, _ = operands_of((4, 2, 32), 42, IMAGES, context="split", paged=True, window=window)
    after = np.zeros(42, np.int64)
    for first, end in BLOCKS:
        after[first:end] = end - 1 - np.arange(first, end)
        operands["batch"][1 + first : 1 + end, 3] |= RUN
    records = np.zeros((42, IMAGE_WORDS), np.uint32)
    records[:, REACH] = after
    filled = {key: np.nan_to_num(operands[key]) for key in ("k_cache", "v_cache")}
    scores = reference.Scores(None, window)
    wanted = reference.attention(
        operands["q"], filled["k_cache"], filled["v_cache"], operands["batch"], operands["page_table"], scores, after
    )
    found = next(each for each in routes_of("attention_reach") if each.name == route)
    dims = resolve("attention_reach", {key: value for key, value in dims.items() if key != "sinks"})
    units = with_units(replace(gpu.caps, kind="discrete"))
    assert found.reason(dims, units) is None
    runs = found.launch_list(dims, units).dispatches[0]
    assert runs.kernel.name == f"attention_{route.removesuffix('s')}"
    if SHAPE not in gpu.caps.matrix_shapes:
        runs = replace(runs, kernel=replace(runs.kernel, unroll=False))
    launch_list = reach.with_runs(runs, dims, replace(gpu.caps, kind="discrete"))  # other rows as the device can
    program = lower(found, dims, units, {**operands, **filled, "image_rows": records}, launch_list=launch_list)
    if route == "matrix":
        program = runnable(program, gpu)
    raw = gpu.run(program)["out"]
    assert_close(raw.view(np.float32).reshape(wanted.shape), wanted, "attention f16", f"{route}, a window of {window}")


@pytest.mark.long
def test_a_cache_without_pages(gpu: Device) -> None:
    dims, operands, expected = operands_of((4, 2, 64), 37, (), keys=48)
    assert_close(attend(gpu, dims, operands), expected["out"], "attention f16", "without pages")


TILES = [Tile(32, 4, 1, 16), Tile(32, 2, 2, 16), Tile(32, 1, 1, 32), Tile(32, 2, 2, 32), Tile(64, 2, 1, 16)]


@pytest.mark.parametrize(("tile", "shape"), every_pair(TILES, [SHAPE, SMALL], len(TILES)), ids=str)
def test_tiles_and_shapes(tile: Tile, shape: MatrixShape, gpu: Device) -> None:
    """Every way to share a tile among subgroups; tiles that are narrower than a head go through memory in rounds."""
    dims, operands, expected = operands_of((4, 1, 64), 9, ((0, 120, 9),), context="single_pass", paged=True)
    assert tile.fits(dims, shape, 32)
    assert_close(attend(gpu, dims, operands, tile, shape), expected["out"], "attention f16", f"{tile} {shape}")


def test_loops_written_out(gpu: Device) -> None:
    dims, operands, expected = operands_of((4, 1, 32), 9, ((0, 60, 9),), context="single_pass", paged=True)
    assert_close(attend(gpu, dims, operands, unroll=True), expected["out"], "attention f16", "written out")


@pytest.mark.parametrize("spread", [8.0, 1e7])
def test_scores_that_grow(spread: float, gpu: Device) -> None:
    """Later keys weigh more, so that sums are rescaled; and queries that f16 cannot hold become no infinity."""
    dims, operands, _ = operands_of((4, 1, 32), 9, ((0, 250, 9),), context="single_pass", paged=True)
    keys = operands["k_cache"]
    order = np.empty(len(keys) // PAGE, np.int64)
    order[operands["page_table"][1:]] = np.arange(len(operands["page_table"]) - 1)
    keys *= (0.25 * 2.0 ** order.repeat(PAGE)).astype(np.float16)[:, None, None]
    operands["q"] = (operands["q"] * spread).astype(np.float32)
    wanted = reference.attention(operands["q"], keys, operands["v_cache"], operands["batch"], operands["page_table"])
    found = attend(gpu, dims, operands)
    assert np.isfinite(found).all()
    assert_close(found, wanted, "attention f16, one key", f"queries of {spread}")


def test_a_row_does_not_depend_on_the_rest_of_its_batch(gpu: Device) -> None:
    """Bit for bit, in another place of another tile, beside other rows; and padding rows write nothing."""
    stretches: tuple[Stretch, ...] = ((0, 600, 1), (1, 120, 12), (2, 127, 1), (3, 0, 1), (4, 513, 9), (5, 20, 3))
    dims, operands, expected = operands_of((4, 2, 32), 27, stretches, context="split", paged=True)
    together = attend(gpu, dims, operands)
    assert_close(together, expected["out"], "attention f16", "together")
    others = [24, 25, *range(3, 13), 0, *range(15, 23), 14]
    moved = attend(
        gpu, dims_of((4, 2, 32), 60, context="split", paged=True, cache="f16"), rows_of(operands, others, 60)
    )
    np.testing.assert_array_equal(moved[: len(others)], together[others])
    assert not moved[len(others) :].any()


def test_a_fork_shares_pages(gpu: Device) -> None:
    """Two sequences with the same first page and runs of their own after it."""
    dims, operands, _ = operands_of((4, 1, 64), 20, ((0, 120, 10), (1, 120, 10)), context="single_pass", paged=True)
    batch, table = operands["batch"], operands["page_table"]
    first, second = (int(batch[row, 3] & ~np.uint32(RUN)) for row in (1, 11))
    table[second] = table[first]
    operands["k_cache"][np.isnan(operands["k_cache"])] = 0
    operands["v_cache"][np.isnan(operands["v_cache"])] = 0
    wanted = reference.attention(operands["q"], operands["k_cache"], operands["v_cache"], batch, table)
    assert_close(attend(gpu, dims, operands), wanted, "attention f16", "fork")


def test_where_it_applies() -> None:
    units = with_units(GPU)
    dims = dims_of((32, 8, 64), 512, context="single_pass", paged=True, cache="f16")
    names = [dispatch.kernel.name for dispatch in ROUTE.launch_list(dims, units).dispatches]
    assert names == ["attention_matrix", "attention_grouped"]
    assert choose("attention", dims, units, None, "fast").name == "matrix"
    assert choose("attention", dims, units, None, "exact").name == "flash", "it rounds"
    assert choose("attention", dims, GPU, None, "fast").name == "flash"
    for width, group, tile in (
        *((64, 4, (64, 2, 4, 32)), (128, 4, (32, 4, 2, 16)), (256, 4, (32, 2, 2, 16)), (80, 1, (32, 2, 1, 16))),
    ):
        dims_of_heads = dims_of((8 * group, 8, width), 512, context="single_pass", paged=True, cache="f16")
        first = ROUTE.launch_list(dims_of_heads, units).dispatches[0].constants
        assert (first["KEYS"], first["ROW_GROUPS"], first["COLUMN_GROUPS"], 16 * first["ROW_TILES"]) == tile
    for wrong, words in (
        ({"tokens": 4}, "tokens is 4"),
        ({"runs": False}, "there are none"),
        ({"cache": "f32"}, "the cache is f32"),
        ({"D": 20}, "heads of 20 values"),
    ):
        assert words in (ROUTE.reason({**dims, **wrong}, units) or ""), wrong
    assert "one size" in (ROUTE.reason(dims, replace(units, subgroup_min=8)) or "")
    assert "no matrix units" in (ROUTE.reason(dims, replace(units, matrix_shapes=())) or "")
    others = replace(units, matrix_shapes=(MatrixShape("i8", "i32", 16, 16, 32),))
    assert "i8 → i32 16×16×32" in (ROUTE.reason(dims, others) or "")


@pytest.fixture(scope="module")
def unchecked(pytestconfig: pytest.Config) -> Device:
    return unchecked_device(pytestconfig.getoption("--device"))


@pytest.mark.full
def test_no_index_is_outside(unchecked: Device) -> None:
    """With right records and with wrong ones. In loops on every device: indices of matrices are seen only there."""
    stretches: tuple[Stretch, ...] = ((0, 3, 11), (1, 120, 9), (2, 60, 1), (1, 129, 2))
    dims, operands, expected = operands_of((3, 1, 16), 25, stretches, context="single_pass", paged=True)
    operands["page_table"] = np.pad(operands["page_table"], (0, -len(operands["page_table"]) % 4))
    caps, rng, launch_list = with_units(unchecked.caps), np.random.default_rng(1), launches(unchecked, dims)

    def outside(**wrong: Any) -> Any:
        program = lower(ROUTE, dims, caps, {**operands, **wrong}, launch_list=launch_list)
        return run_guarded(unchecked, in_loops(program))

    found, names = outside()
    assert names == []
    assert_close(found["out"].view(np.float32).reshape(25, 3, 16), expected["out"], "attention f16", "guarded")
    for word in (1, 2, 3):
        batch = operands["batch"].copy()
        batch[1:, word] = rng.integers(1 << 9, 1 << 32, 25)
        batch[1:, 3] |= RUN
        assert outside(batch=batch)[1] == [], f"word {word}"
    batch = make_batch(np.arange(25) + (1 << 31), np.arange(25))  # one long segment far outside the pool
    assert outside(batch=batch)[1] == []
    table = rng.integers(0, 1 << 32, len(operands["page_table"])).astype(np.uint32)
    assert outside(page_table=table)[1] == []
