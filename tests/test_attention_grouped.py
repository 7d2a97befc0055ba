"""Many rows, each of a sequence of its own: attention_grouped against the formula, and where it is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.gpu import Device, Program
from shaderlm.kernels import LaunchList
from shaderlm.kernels.attention.attention import GROUPED_KEYS, grouped

from .attention_operands import MAKERS, Stretch
from .compare import assert_close
from .index_guard import run_guarded, unchecked_device
from .sweeps import every_pair, with_all
from .test_attention import GPU, SOFTWARE, Heads, dims_of, flash, rows_of

ROWS: tuple[Stretch, ...] = ((0, 0, 1), (1, 15, 1), (2, 130, 1), (3, 63, 1), (4, 64, 1))
TOKENS = 7  # two rows of padding
NVIDIA = replace(GPU, subgroup_min=32, subgroup_max=32)


def program_of(on: Device, dims: dict[str, Any], operands: dict[str, Any], lanes: int, subgroup: int = 0) -> Program:
    """All rows by attention_grouped, in workgroups of so many lanes, with the device's subgroups or those of a size."""
    size = subgroup or on.caps.subgroup_max
    caps = replace(on.caps, kind="discrete", subgroup_min=size, subgroup_max=size)
    dispatch = grouped(dims, caps, max(lanes, size))
    assert dispatch is not None
    buffers = flash().launch_list({**dims, "context": "single_pass"}, caps).buffers
    return lower(flash(), dims, caps, operands, LaunchList((dispatch,), buffers))


def out_of(on: Device, program: Program, dims: dict[str, Any]) -> Any:
    return on.run(program)["out"].view(np.float32).reshape(dims["tokens"], dims["Hq"], -1)[..., : dims["D"]]


# Groups of one to seven heads; heads that fill their lanes and others; octets, and quads where D is no multiple of 8.
SHAPES: list[tuple[Heads, str, bool]] = [
    ((4, 1, 32), "f16", False),
    ((3, 1, 12), "f16", True),
    ((14, 2, 8), "f32", False),
    ((2, 2, 6), "f16", True),
]


@pytest.mark.parametrize(("heads", "cache", "runs"), SHAPES, ids=str)
def test_rows(heads: Heads, cache: str, runs: bool, gpu: Device) -> None:
    dims = dims_of(heads, TOKENS, context="single_pass", paged=True, cache=cache, runs=runs)
    operands, expected = MAKERS["attention"](np.random.default_rng(8), {**dims, "stretches": ROWS})
    found = out_of(gpu, program_of(gpu, dims, operands, 32), dims)
    assert_close(found, expected["out"], "attention", f"{heads} {cache}")
    assert not found[len(ROWS) :].any(), "padding rows write nothing"


SHUFFLES = """
var<workgroup> shuffled: array<f32, WG>;
var<private> own_lane: u32;
fn shuffled_from(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    shuffled[own_lane] = value;
    workgroupBarrier();
    return shuffled[own_lane / SUBGROUP * SUBGROUP + lane];
}
fn shuffled_xor(value: f32, offset: u32) -> f32 { return shuffled_from(value, (own_lane % SUBGROUP) ^ offset); }
"""


def with_shuffles(program: Program) -> Program:
    """Subgroups of any size, by workgroup memory: an adapter has one size only."""

    def changed(source: str) -> str:
        text = source.replace("subgroupShuffleXor(", "shuffled_xor(").replace("subgroupShuffle(", "shuffled_from(")
        return text.replace("    let index = group.x", "    own_lane = lane;\n    let index = group.x", 1) + SHUFFLES

    return replace(program, steps=tuple(replace(step, source=changed(step.source)) for step in program.steps))


@pytest.mark.parametrize(
    ("heads", "cache", "subgroup"),
    [
        with_all((4, 1, 64), "f16", 32),
        ((4, 2, 16), "f32", 32),
        with_all((3, 1, 128), "f16", 32),
        ((1, 1, 36), "f16", 8),
    ],
    ids=str,
)
def test_subgroups_of_other_sizes(heads: Heads, cache: str, subgroup: int, gpu: Device) -> None:
    """Four, eight and two keys of a subgroup at once; and one, where heads do not fill its lanes."""
    dims = dims_of(heads, TOKENS, context="single_pass", paged=True, cache=cache, runs=False)
    operands, expected = MAKERS["attention"](np.random.default_rng(8), {**dims, "stretches": ROWS})
    found = out_of(gpu, with_shuffles(program_of(gpu, dims, operands, 64, subgroup)), dims)
    assert_close(found, expected["out"], "attention", f"{heads} {cache}, subgroups of {subgroup}")


def test_a_row_is_the_same_in_every_batch(gpu: Device) -> None:
    """Bit for bit: elsewhere among other rows, beside a run, and where longer rows may be, if lanes are as many."""
    caps = replace(gpu.caps, kind="discrete")
    stretches: tuple[Stretch, ...] = ((0, 130, 1), (1, 100, 1), (2, 0, 1), (3, 40, 1), (4, 20, 9))

    def attend(dims: dict[str, Any], operands: dict[str, Any]) -> Any:
        return out_of(gpu, lower(flash(), dims, caps, operands), dims)

    def dims(tokens: int, **more: Any) -> dict[str, Any]:
        return dims_of((4, 2, 8), tokens, paged=True, **more)

    mixed = dims(13, context="single_pass")
    operands, _ = MAKERS["attention"](np.random.default_rng(9), {**mixed, "stretches": stretches})
    together, lanes = attend(mixed, operands), dict[str, Any]()
    for context in ("single_pass", "long_split"):
        decode = dims(12, context=context, runs=False)
        dispatch = flash().launch_list(decode, caps).dispatches[0]
        assert dispatch.kernel.name == "attention_grouped"
        found = attend(decode, rows_of(operands, [3, 0, 2, 1], 12))
        assert_close(found[:4], together[[3, 0, 2, 1]], "attention", context)
        if lanes.setdefault("WG", dispatch.constants["WG"]) == dispatch.constants["WG"]:
            np.testing.assert_array_equal(found[:4], together[[3, 0, 2, 1]], err_msg=context)
        elsewhere = attend(decode, rows_of(operands, [1, 3], 12))
        np.testing.assert_array_equal(elsewhere[:2], found[[3, 0]], err_msg=context)
        assert not found[4:].any(), "padding rows write nothing"


def test_where_it_is_taken() -> None:
    def names(caps: Any, tokens: int = 64, context: str = "split", D: int = 64, **more: Any) -> list[str]:
        dims = dims_of((32, 8, D), tokens, context=context, paged=True, **{"cache": "f16", "runs": False, **more})
        return [each.kernel.name.removeprefix("attention_") for each in flash().launch_list(dims, caps).dispatches]

    for context in ("single_pass", "split"):
        assert names(NVIDIA, context=context) == ["grouped"]
        assert names(NVIDIA, context=context, runs=True) == ["tile", "grouped"]
        assert names(NVIDIA, context=context, tokens=16) == ["grouped"]
    assert names(NVIDIA, context="long_split") == ["grouped", "split_octets", "merge"]
    assert names(NVIDIA, tokens=2, context="single_pass") == ["grouped"]
    assert names(NVIDIA, tokens=2) == names(NVIDIA, tokens=8) == ["split_octets", "merge"], "few rows, as one"
    assert names(NVIDIA, cache="f32") == names(NVIDIA, D=256) == names(NVIDIA, D=80) == ["grouped"]
    assert "grouped" not in names(NVIDIA, D=1024), "a head takes too many registers"
    assert "grouped" not in names(replace(NVIDIA, subgroup_min=8)), "subgroups of several sizes"
    assert "grouped" not in names(GPU), "subgroups of unknown size"
    assert names(replace(SOFTWARE, subgroup_min=4, subgroup_max=4)) == ["single_pass"]


def test_lanes_and_splits_of_batches() -> None:
    """Lanes where workgroups are few, many workgroups where they fill a GPU; fewer splits the more rows there are."""

    def first(tokens: int, context: str = "single_pass", D: int = 64) -> Any:
        dims = dims_of((32, 8, D), tokens, context=context, paged=True, cache="f16", runs=False)
        return flash().launch_list(dims, NVIDIA).dispatches[0]

    assert [first(tokens).constants["WG"] for tokens in (2, 16, 32, 64)] == [256, 256, 256, 128]
    assert [first(tokens, D=128).constants["WG"] for tokens in (2, 16, 32, 64)] == [512, 512, 256, 128]
    assert [first(tokens, "split").constants["WG"] for tokens in (16, 32, 64)] == [512, 256, 256]
    assert [first(tokens, "long_split").params["splits"] for tokens in (1, 2, 4, 8)] == [64, 32, 16, 8]
    assert first(8, "split").params["splits"] == 32
    assert first(64, D=256).constants["WG"] == 128
    assert first(16, D=256).constants["WG"] == 256, "the memory of workgroups has no room for more"


def test_rows_of_a_class_have_one_kernel() -> None:
    """Which one serves a row depends on its length alone: one ends where the other begins."""
    dims = dims_of((32, 8, 64), 64, context="long_split", paged=True, cache="f16", runs=False)
    short, *after = flash().launch_list(dims, NVIDIA).dispatches
    assert short.params["max_keys"] == GROUPED_KEYS
    assert {each.params["min_keys"] for each in after} == {GROUPED_KEYS + 1}
    alone = flash().launch_list({**dims, "context": "single_pass"}, NVIDIA).dispatches
    assert [each.params["max_keys"] for each in alone] == [0xFFFF_FFFF]


@pytest.fixture(scope="module")
def unchecked(pytestconfig: pytest.Config) -> Device:
    return unchecked_device(pytestconfig.getoption("--device"))


@pytest.mark.full
@pytest.mark.parametrize(("paged", "runs"), every_pair([True, False], [False, True]))
def test_no_index_is_outside(paged: bool, runs: bool, unchecked: Device) -> None:
    """With right records and with wrong ones; blocks at the end of the pool are read no further than it goes."""
    dims = dims_of((5, 1, 12), 6, context="single_pass", paged=paged, keys=0 if paged else 700, runs=runs)
    stretches: tuple[Stretch, ...] = ((0, 130, 1), (1, 60, 1), (2, 70, 2)) if paged else ((0, 600, 1), (0, 698, 2))
    operands, _ = MAKERS["attention"](np.random.default_rng(1), {**dims, "stretches": stretches})
    rng = np.random.default_rng(1)
    wrong: list[dict[str, Any]] = [{}]
    for word in (1, 3):
        batch = operands["batch"].copy()
        batch[1:, word] = rng.integers(1 << 9, 1 << 32, 6)
        wrong.append({"batch": batch})
    batch = operands["batch"].copy()
    batch[0] = 0xFFFF_FFFF
    wrong.append({"batch": batch})
    if paged:  # whole quads: what pads a buffer counts as its end
        operands["page_table"] = np.pad(operands["page_table"], (0, -len(operands["page_table"]) % 4))
        wrong.append({"page_table": rng.integers(0, 1 << 32, len(operands["page_table"])).astype(np.uint32)})
    for given in wrong:
        program = program_of(unchecked, dims, {**operands, **given}, 16)
        assert run_guarded(unchecked, program)[1] == [], f"{sorted(given)}"
