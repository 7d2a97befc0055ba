"""Rows that write tokens over a cache of f16: attention_split_octets against the formula, and where it is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.gpu import Device
from shaderlm.graph.batch import CONTEXTS
from shaderlm.kernels import LaunchList
from shaderlm.kernels.attention.attention import split_dispatches, split_octets, split_quads

from .attention_operands import MAKERS, Stretch
from .compare import assert_close
from .index_guard import run_guarded, unchecked_device
from .sweeps import every_pair, with_all
from .test_attention import GPU, Heads, dims_of, flash, rows_of


def launch_list_of(on: Device, dims: dict[str, Any], lanes: int) -> LaunchList:
    """All rows by attention_split_octets, with the subgroups that the device has."""
    caps = replace(on.caps, kind="discrete")
    split = split_octets(dims, caps.subgroup_max, lanes)
    assert split is not None
    dispatches, scratch = split_dispatches(dims, caps, split)
    return LaunchList(dispatches, {**flash().launch_list(dims, caps).buffers, **scratch})


def attend(on: Device, dims: dict[str, Any], operands: dict[str, Any], lanes: int) -> Any:
    caps = replace(on.caps, kind="discrete")
    program = lower(flash(), dims, caps, operands, launch_list=launch_list_of(on, dims, lanes))
    return on.run(program)["out"].view(np.float32).reshape(dims["tokens"], dims["Hq"], -1)


# Groups of one, three, four and five heads; one octet of a key in a lane and two; keys of no, one and many chunks.
CASES: list[Any] = [  # heads, tokens, context, stretches, lanes
    with_all((4, 1, 32), 1, "split", ((0, 600, 1),), 32),
    with_all((3, 1, 64), 1, "split", ((0, 63, 1),), 32),
    with_all((2, 2, 32), 1, "long_split", ((0, 2100, 1),), 64),
    ((5, 1, 32), 7, "split", ((0, 600, 1), (1, 20, 1), (2, 0, 1), (3, 512, 1), (4, 2047, 1)), 32),
    with_all((8, 2, 64), 3, "long_split", ((0, 8300, 1), (1, 2500, 1), (2, 1000, 1)), 32),
]


@pytest.mark.parametrize(("heads", "tokens", "context", "stretches", "lanes"), CASES, ids=str)
def test_rows(heads: Heads, tokens: int, context: str, stretches: tuple[Stretch, ...], lanes: int, gpu: Device) -> None:
    dims = dims_of(heads, tokens, context=context, paged=True, cache="f16")
    operands, expected = MAKERS["attention"](np.random.default_rng(8), {**dims, "stretches": stretches})
    lanes = max(lanes, gpu.caps.subgroup_max)
    assert_close(attend(gpu, dims, operands, lanes), expected["out"], "attention", f"{heads} {context}")


@pytest.mark.parametrize("cache", ["f16", with_all("f32")])
def test_splits_of_several_chunks(cache: str, gpu: Device) -> None:
    """Fewer splits than chunks, of rows with chunks of either size."""
    dims = dims_of((3, 1, 32), 4, context="long_split", paged=True, cache=cache)
    stretches: tuple[Stretch, ...] = ((0, 2100, 1), (1, 500, 1), (2, 63, 1))
    operands, expected = MAKERS["attention"](np.random.default_rng(8), {**dims, "stretches": stretches})
    caps = replace(gpu.caps, kind="discrete")
    lanes = max(64, caps.subgroup_max)
    split = split_octets(dims, caps.subgroup_max, lanes) if cache == "f16" else split_quads(dims, lanes)
    assert split is not None
    dispatches, scratch = split_dispatches(dims, caps, split, 3)
    buffers = flash().launch_list(dims, caps).buffers
    program = lower(flash(), dims, caps, operands, launch_list=LaunchList(dispatches, {**buffers, **scratch}))
    found = gpu.run(program)["out"].view(np.float32).reshape(4, 3, -1)
    assert_close(found, expected["out"], "attention", f"three splits, {cache}")


def test_a_row_is_the_same_in_every_batch(gpu: Device) -> None:
    """Bit for bit in the same kernel; closely in that of the other context class."""
    stretches: tuple[Stretch, ...] = ((0, 700, 1), (1, 2047, 1), (2, 99, 1), (3, 1500, 1))
    dims = dims_of((4, 2, 32), 4, context="split", paged=True, cache="f16")
    operands, _ = MAKERS["attention"](np.random.default_rng(9), {**dims, "stretches": stretches})
    lanes = max(32, gpu.caps.subgroup_max)
    found = attend(gpu, dims, operands, lanes)
    moved = attend(gpu, {**dims, "tokens": 9}, rows_of(operands, [3, 0, 1], 9), lanes)
    np.testing.assert_array_equal(moved[:3], found[[3, 0, 1]])
    assert not moved[3:].any(), "padding rows write nothing"
    assert_close(attend(gpu, {**dims, "context": "long_split"}, operands, 2 * lanes), found, "pointwise", "long_split")


@pytest.mark.parametrize("context", CONTEXTS[1:])
def test_where_it_is_taken(context: str) -> None:
    nvidia = replace(GPU, subgroup_min=32, subgroup_max=32)

    def first(caps: Any, **more: Any) -> str:
        dims = dims_of((32, 8, more.pop("D", 64)), 1, context=context, paged=True, **{"cache": "f16", **more})
        name: str = flash().launch_list(dims, caps).dispatches[0].kernel.name
        return name

    assert first(nvidia) == first(nvidia, D=128) == first(nvidia, D=256) == "attention_split_octets"
    assert first(nvidia, D=80) == "attention_split", "five pairs of octets do not divide among lanes"
    assert first(nvidia, cache="f32") == "attention_split"
    assert first(replace(nvidia, subgroup_min=8)) == "attention_split", "subgroups of several sizes"
    assert first(GPU) == "attention_split", "subgroups of unknown size"


@pytest.fixture(scope="module")
def unchecked(pytestconfig: pytest.Config) -> Device:
    return unchecked_device(pytestconfig.getoption("--device"))


@pytest.mark.full
@pytest.mark.parametrize(("paged", "context"), every_pair([True, False], CONTEXTS[1:]))
def test_no_index_is_outside(paged: bool, context: str, unchecked: Device) -> None:
    """With right records and with wrong ones; chunks at the end of the pool are read no further than it goes."""
    dims = dims_of((5, 1, 32), 6, context=context, paged=paged, cache="f16", keys=0 if paged else 700)
    stretches: tuple[Stretch, ...] = ((0, 130, 1), (1, 600, 1), (2, 70, 2)) if paged else ((0, 600, 1), (0, 698, 2))
    operands, _ = MAKERS["attention"](np.random.default_rng(1), {**dims, "stretches": stretches})
    lanes = max(32, unchecked.caps.subgroup_max) * (2 if context == "long_split" else 1)
    launch_list = launch_list_of(unchecked, dims, lanes)
    rng = np.random.default_rng(1)
    wrong: list[dict[str, Any]] = [{}]
    for word in (1, 3):
        batch = operands["batch"].copy()
        batch[1:, word] = rng.integers(1 << 9, 1 << 32, 6)
        wrong.append({"batch": batch})
    if paged:  # whole quads: what pads a buffer counts as its end
        operands["page_table"] = np.pad(operands["page_table"], (0, -len(operands["page_table"]) % 4))
        wrong.append({"page_table": rng.integers(0, 1 << 32, len(operands["page_table"])).astype(np.uint32)})
    for given in wrong:
        program = lower(flash(), dims, unchecked.caps, {**operands, **given}, launch_list=launch_list)
        assert run_guarded(unchecked, program)[1] == [], f"{sorted(given)}"
