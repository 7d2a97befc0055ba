"""Attention over token batches: which kernels serve which rows, rows that do not depend on others, wrong records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shaderlm.compile import lower
from shaderlm.gpu import WEBGPU_DEFAULT, Device, DeviceCaps, open_device
from shaderlm.graph import batch as records
from shaderlm.graph import reference, resolve
from shaderlm.graph.batch import NONE, PAGE, RUN, context_class, make_batch
from shaderlm.graph.fuse import fuse
from shaderlm.graph.graph import Builder, Graph
from shaderlm.kernels import choose, routes_of, shader_of
from shaderlm.kernels.wgsl import read

from .attention_operands import MAKERS, Stretch, paged_batch
from .compare import assert_close
from .index_guard import run_guarded, unchecked_device
from .sweeps import with_all
from .test_properties import runs

GPU = replace(WEBGPU_DEFAULT, kind="discrete", subgroups=True, max_invocations=1024, max_workgroup_memory=48 << 10)
PLAIN = replace(WEBGPU_DEFAULT, kind="discrete")
SOFTWARE = replace(GPU, kind="software")
Heads = tuple[int, int, int]


def dims_of(heads: Heads, tokens: int, **more: Any) -> dict[str, Any]:
    return resolve("attention", {"Hq": heads[0], "Hkv": heads[1], "D": heads[2], "tokens": tokens, **more})


def flash() -> Any:
    return next(route for route in routes_of("attention") if route.name == "flash")


def attend(on: Device, dims: dict[str, Any], operands: dict[str, Any], caps: DeviceCaps | None = None) -> Any:
    """[tokens, Hq, D] by the route that models take."""
    raw = on.run(lower(flash(), dims, caps or on.caps, operands))["out"]
    return raw.view(np.float32).reshape(dims["tokens"], dims["Hq"], -1)[..., : dims["D"]]


# Which kernels serve which rows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "head", "tokens", "context", "wanted"),
    [
        (GPU, 64, 1, "single_pass", ["single_pass"]),
        (GPU, 64, 1, "split", ["split", "merge"]),
        (GPU, 128, 1, "long_split", ["split", "merge"]),
        (GPU, 64, 7, "single_pass", ["single_pass"]),
        (GPU, 64, 8, "single_pass", ["tile", "single_pass"]),
        (GPU, 64, 4, "split", ["single_pass", "split", "merge"]),
        (GPU, 64, 64, "long_split", ["tile", "single_pass", "split", "merge"]),
        (GPU, 512, 64, "single_pass", ["single_pass"]),
        (PLAIN, 64, 1, "single_pass", ["split_tree", "merge"]),
        (PLAIN, 128, 64, "split", ["tile", "split_tree", "merge"]),
        (SOFTWARE, 64, 1, "long_split", ["single_pass"]),
        (SOFTWARE, 64, 64, "split", ["single_pass"]),
    ],
)
def test_launch_lists(caps: DeviceCaps, head: int, tokens: int, context: str, wanted: list[str]) -> None:
    dims = dims_of((8, 2, head), tokens, context=context, paged=True)
    assert choose("attention", dims, caps, None).name == "flash"
    found = flash().launch_list(dims, caps).dispatches
    assert [dispatch.kernel.name for dispatch in found] == [f"attention_{name}" for name in wanted]
    skipped = {dispatch.params["skipped"] for dispatch in found if "skipped" in dispatch.params}
    assert skipped == {RUN if "tile" in wanted else 0}, "rows of runs are left to attention_tile, if it is there"


def sources(dims: dict[str, Any], caps: DeviceCaps) -> set[str]:
    return {shader_of(dispatch).source for dispatch in flash().launch_list(dims, caps).dispatches}


@pytest.mark.parametrize("caps", [GPU, PLAIN, SOFTWARE], ids=["gpu", "plain", "software"])
@pytest.mark.parametrize("context", records.CONTEXTS)
def test_no_number_of_many_rows_is_in_the_source(caps: DeviceCaps, context: str) -> None:
    first = sources(dims_of((32, 8, 64), 64, context=context, paged=True), caps)
    for tokens in (32, 100, 512):
        assert sources(dims_of((32, 8, 64), tokens, context=context, paged=True), caps) == first


@pytest.mark.parametrize("caps", [GPU, PLAIN], ids=["gpu", "plain"])
def test_scratch_of_many_rows_is_bounded(caps: DeviceCaps) -> None:
    launch_list = flash().launch_list(dims_of((32, 8, 128), 512, context="long_split", paged=True), caps)
    assert launch_list.buffers["partial"] <= 64 << 20
    passes = [dispatch.params for dispatch in launch_list.dispatches if dispatch.kernel.name == "attention_merge"]
    assert [one["first"] for one in passes] == list(range(0, 512, int(passes[0]["rows"])))
    assert flash().reason(dims_of((32, 8, 128), 512, context="long_split", paged=True), caps) is None


def test_constants_of_kernels_are_those_of_the_batch() -> None:
    text = read("shared/batch")
    for name, value in (("PAGE", f"{PAGE}u"), ("NONE", "0xFFFFFFFFu"), ("RUN", "0x80000000u"), ("LAST", "0x80000000u")):
        assert f"const {name}: u32 = {value};" in text
        assert int(value.rstrip("u"), 0) == getattr(records, name)
    assert f"const SHORT_ROW: u32 = {records.SPLIT_KEYS}u;" in read("attention/chunks")
    assert f"const KEYS: u32 = {records.SINGLE_PASS_TILE}u;" in read("attention/attention_single_pass")


def test_routes_in_three_passes_must_know_the_keys() -> None:
    for name, paged, keys, words in (("coalesced", True, 9, "without pages"), ("strided", False, 0, "number of keys")):
        route = next(route for route in routes_of("attention") if route.name == name)
        assert words in (route.reason(dims_of((4, 2, 8), 2, paged=paged, keys=keys), GPU) or "")


# A row of a batch is the row alone -----------------------------------------------------------------------------

HEADS = (4, 2, 8)
BATCH: tuple[Stretch, ...] = ((0, 600, 1), (1, 120, 12), (2, 127, 1), (3, 0, 1), (4, 321, 1), (5, 20, 3))


def rows_of(operands: dict[str, Any], rows: Iterable[int], tokens: int) -> dict[str, Any]:
    """A batch of some rows of another, in the same pool."""
    chosen = list(rows)
    old = operands["batch"][1:][chosen]
    new = make_batch(old[:, 1], old[:, 2], old[:, 3] & ~np.uint32(RUN), tokens=tokens)
    q = np.zeros((tokens, *operands["q"].shape[1:]), np.float32)
    q[: len(chosen)] = operands["q"][chosen]
    return {**operands, "batch": new, "q": q}


@pytest.mark.parametrize("subgroups", [True, False])
def test_a_row_does_not_depend_on_the_rest_of_its_batch(subgroups: bool, gpu: Device, plain_device: Device) -> None:
    """Bit for bit in other batches, where it is in another place; and closely alone, in a kernel for one row."""
    on = gpu if subgroups else plain_device
    caps = replace(on.caps, kind="discrete")
    tokens = sum(rows for *_, rows in BATCH)
    dims = dims_of(HEADS, tokens, context="split", paged=True)
    operands, expected = MAKERS["attention"](np.random.default_rng(5), {**dims, "stretches": BATCH})
    together = attend(on, dims, operands, caps)
    assert_close(together, expected["out"], "attention", "together")
    others = [15, 16, *range(3, 13), 0, 14, 17]  # without rows 1, 2 and 13, the run in another place
    moved = attend(on, dims_of(HEADS, 40, context="split", paged=True), rows_of(operands, others, 40), caps)
    np.testing.assert_array_equal(moved[: len(others)], together[others])
    assert not moved[len(others) :].any(), "padding rows write nothing"
    for row in (0, 5, 13, 14, 15):
        keys = int(operands["batch"][1 + row, 1]) + 1
        alone = dims_of(HEADS, 1, context=context_class(keys, 8), paged=True)
        found = attend(on, alone, rows_of(operands, [row], 1), caps)[0]
        assert_close(found, together[row], "pointwise", f"row {row} alone")


@pytest.mark.full
@pytest.mark.parametrize("subgroups", [with_all(True), False])
def test_more_rows_than_the_scratch_has_room_for(subgroups: bool, pytestconfig: pytest.Config) -> None:
    """A binding of 64 KiB holds the partial sums of 16 rows: they are made in passes."""
    small = open_device(pytestconfig.getoption("--device"), limits={"max_binding": 1 << 16})
    # Without a known size of subgroups, rows are split from 321 keys on.
    caps = replace(small.caps, kind="discrete", subgroups=subgroups, subgroup_max=0)
    dims = dims_of((8, 1, 4), 45, context="split", paged=True)
    stretches = tuple((0, position, 1) for position in (*range(319, 328, 2), *range(1, 140, 4)))
    operands, expected = MAKERS["attention"](np.random.default_rng(6), {**dims, "stretches": stretches})
    merges = [each for each in flash().launch_list(dims, caps).dispatches if each.kernel.name == "attention_merge"]
    assert [merge.params["first"] for merge in merges] == [0, 15, 30]
    assert_close(attend(small, dims, operands, caps), expected["out"], "attention", "in passes")


# Random schedules ----------------------------------------------------------------------------------------------


def by_row(q: Any, k: Any, v: Any, batch: Any, page_table: Any, scale: float) -> Any:
    """The formula a second time, row by row and head by head, in float64."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for t in range(int(batch[0, 0])):
        _, position, _, pages = (int(word) for word in batch[1 + t])
        keys = np.arange(position + 1)
        rows = page_table[(pages & ~RUN) + keys // PAGE].astype(np.int64) * PAGE + keys % PAGE
        for h in range(q.shape[1]):
            scores = k[rows, h // group].astype(np.float64) @ q[t, h].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[rows, h // group].astype(np.float64) / weights.sum()
    return out


STRETCHES = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.one_of(st.integers(0, 140), st.sampled_from([126, 127, 128, 255, 319, 320, 600])),
        st.one_of(st.just(1), st.integers(1, 20)),
    ),
    min_size=1,
    max_size=6,
)


@runs(8)
@given(stretches=STRETCHES, padding=st.integers(0, 3), seed=st.integers(0, 99))
def test_any_batch(gpu: Device, stretches: list[Stretch], padding: int, seed: int) -> None:
    tokens = max(8, sum(rows for *_, rows in stretches) + padding)
    dims = dims_of((3, 1, 8), tokens, context="split", paged=True)
    operands, expected = MAKERS["attention"](np.random.default_rng(seed), {**dims, "stretches": tuple(stretches)})
    caches = operands["k_cache"], operands["v_cache"]
    written_again = by_row(operands["q"], *caches, operands["batch"], operands["page_table"], 8**-0.5)
    assert_close(expected["out"], written_again, "pointwise", "the reference")
    assert_close(attend(gpu, dims, operands), written_again, "attention", f"{stretches}")


def test_float32_of_the_interpreter() -> None:
    """Inside `single` the formula computes in float32, and pages that follow each other are read as a slice."""
    rng = np.random.default_rng(2)
    batch, table, pages = paged_batch(rng, ((0, 200, 9), (1, 4, 1)), 12)
    caches = rng.standard_normal((2, pages * PAGE, 1, 4)).astype(np.float32)
    q = rng.standard_normal((12, 2, 4)).astype(np.float32)
    exact = reference.attention(q, caches[0], caches[1], batch, table)
    with reference.single():
        found = reference.attention(q, caches[0], caches[1], batch, table)
    assert found.dtype == np.float32
    assert_close(found, exact, "pointwise", "float32")
    assert reference.pool_rows(300, np.array([9, 2, 3, 4]), 1) == np.s_[2 * PAGE : 2 * PAGE + 300]


# The fusion ----------------------------------------------------------------------------------------------------


def layer(rope_batch: str = "batch", table: str = "table") -> Graph:
    """Queries and keys rotated, keys and values written, attention; keys are rotated by this batch and table."""
    b = Builder()
    for name in {"batch", rope_batch}:
        b.tensor(name, 3, 4, role="input", format="u32")
    for name in {"table", table}:
        b.tensor(name, 1, 4, 2, role="table")
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        b.tensor(name, 2, heads, 8, role="input")
    for name, heads in (("turned_q", 4), ("turned_k", 2), ("out", 4)):
        b.tensor(name, 2, heads, 8)
    caches = {name: b.tensor(name, 1, 2, 8, role="state") for name in ("k_cache", "v_cache")}
    sizes = {"tokens": 2, "D": 8}
    b.add("rope", {**sizes, "H": 4}, {"x": "q", "batch": "batch", "table": "table"}, "l", out="turned_q")
    b.add("rope", {**sizes, "H": 2}, {"x": "k", "batch": rope_batch, "table": table}, "l", out="turned_k")
    b.add("kv_write", {**sizes, "Hkv": 2}, {"k": "turned_k", "v": "v", "batch": "batch", **caches}, "l", **caches)
    b.add("attention", {**sizes, "Hq": 4, "Hkv": 2}, {"q": "turned_q", "batch": "batch", **caches}, "l", out="out")
    return b.graph("out")


def test_rope_and_kv_write_of_one_batch_become_one() -> None:
    graph, rejected = fuse(layer(), ["rope_kv_write"])
    assert ([node.op for node in graph.nodes], rejected) == (["rope_kv_write", "attention"], ())
    node = graph.nodes[0]
    assert (node.inputs["batch"], node.inputs["table"]) == ("batch", "table")
    assert (node.dims["tokens"], node.dims["Hq"], node.dims["Hkv"]) == (2, 4, 2)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rope_batch": "other"}, "batch differs: batch and other"),
        ({"table": "other"}, "table differs: other and table"),
    ],
)
def test_rows_of_different_batches_are_not_fused(wrong: dict[str, str], reason: str) -> None:
    graph, rejected = fuse(layer(**wrong), ["rope_kv_write"])
    assert len(graph.nodes) == 4
    assert reason == rejected[0].reason


# Wrong records -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unchecked(pytestconfig: pytest.Config) -> Device:
    return unchecked_device(pytestconfig.getoption("--device"))


WRONG = {"position": 1, "slot": 2, "pages": 3}  # words of a record
SHAPES: list[tuple[str, dict[str, Any], tuple[Stretch, ...]]] = [
    # heads that do not fill their lanes, a pool of few pages, positions before and after the end of a tile
    ("attention", {"tokens": 1, "Hq": 5, "Hkv": 1, "D": 260, "cache": "f16", "keys": 2}, ()),
    ("attention", {"tokens": 1, "Hq": 26, "Hkv": 2, "D": 36, "keys": 259, "context": "split"}, ()),
    ("attention", {"tokens": 1, "Hq": 2, "Hkv": 2, "D": 8, "context": "long_split", "paged": True}, ((0, 130, 1),)),
    ("attention", {"tokens": 20, "Hq": 3, "Hkv": 1, "D": 12, "context": "split", "paged": True},
     ((0, 3, 11), (1, 120, 1), (2, 600, 1), (1, 122, 2))),
    ("kv_write", {"tokens": 9, "Hkv": 3, "D": 12}, ()),
    ("kv_write", {"tokens": 1, "Hkv": 1, "D": 4, "cache": "f16"}, ()),
    ("rope", {"tokens": 9, "H": 3, "D": 12}, ()),
    ("rope_kv_write", {"tokens": 9, "Hq": 4, "Hkv": 2, "D": 12, "rotary": 8, "cache": "f16"}, ()),
    ("rope_kv_write", {"tokens": 1, "Hq": 4, "Hkv": 2, "D": 8, "interleaved": True}, ()),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("subgroups", [True, with_all(False)])
@pytest.mark.parametrize(("op", "sizes", "stretches"), SHAPES, ids=lambda value: str(value)[:40])
def test_no_index_is_outside(
    op: str, sizes: dict[str, Any], stretches: tuple[Stretch, ...], subgroups: bool, unchecked: Device
) -> None:
    """Also where the result would not tell: what is read too early is left out again."""
    dims = resolve(op, sizes)
    caps = replace(unchecked.caps, subgroups=subgroups)
    rng = np.random.default_rng(1)
    operands, expected = MAKERS[op](rng, {**dims, "stretches": stretches} if stretches else dims)
    if "page_table" in operands:  # whole quads: what pads a buffer counts as its end
        operands["page_table"] = np.pad(operands["page_table"], (0, -len(operands["page_table"]) % 4))
    route = routes_of(op)[0]
    assert route.reason(dims, caps) is None
    found, outside = run_guarded(unchecked, lower(route, dims, caps, operands))
    assert outside == []
    if "out" in expected:
        wanted = expected["out"]
        actual = found["out"].view(np.float32).reshape(*wanted.shape[:-1], -1)[..., : wanted.shape[-1]]
        assert_close(actual, wanted, "attention f16" if dims.get("cache") == "f16" else "attention", f"{op} {sizes}")
    for wrong, word in WRONG.items():
        batch = operands["batch"].copy()
        batch[1:, word] = rng.integers(1 << 9, 1 << 32, dims["tokens"])
        _, outside = run_guarded(unchecked, lower(route, dims, caps, {**operands, "batch": batch}))
        assert outside == [], f"wrong {wrong}"
    batch = operands["batch"].copy()
    batch[0] = NONE
    _, outside = run_guarded(unchecked, lower(route, dims, caps, {**operands, "batch": batch}))
    assert outside == [], "wrong number of rows"
    if "page_table" in operands:
        table = rng.integers(0, 1 << 32, len(operands["page_table"])).astype(np.uint32)
        _, outside = run_guarded(unchecked, lower(route, dims, caps, {**operands, "page_table": table}))
        assert outside == [], "wrong page table"


@pytest.mark.parametrize("op", ["kv_write", "rope_kv_write"])
def test_a_slot_outside_the_pool_takes_nothing(op: str, unchecked: Device) -> None:
    """Not even the last row of the pool, where an index that is only kept in range would go."""
    dims = resolve(op, {"tokens": 5, "Hkv": 2, "D": 8} | ({"Hq": 2} if op == "rope_kv_write" else {}))
    operands, _ = MAKERS[op](np.random.default_rng(1), dims)
    pool = len(operands["k_cache"])
    operands["batch"] = make_batch(np.arange(5), [pool, pool + 1, NONE, 1 << 31, NONE - 1])
    found = unchecked.run(lower(routes_of(op)[0], dims, unchecked.caps, operands))
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(found[name].view(np.float32), operands[name].reshape(-1))
