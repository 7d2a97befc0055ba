"""Attention with a window, capped scores and sinks, in every kernel that a route of it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.gpu import Device, DeviceCaps
from shaderlm.kernels import Dispatch, LaunchList, routes_of, shader_of
from shaderlm.kernels.attention.attention import (
    grouped,
    single_pass,
    split_dispatches,
    split_octets,
    split_quads,
    split_tree,
    tile,
)

from .attention_operands import MAKERS, Stretch
from .compare import assert_close
from .index_guard import run_guarded, unchecked_device
from .sweeps import every_pair, with_all
from .test_attention import GPU, PLAIN, attend, dims_of, flash, rows_of

# Rows of every length against the window, of which two see keys of several pages and some see all that there are.
ROWS: tuple[Stretch, ...] = ((0, 0, 1), (1, 39, 1), (2, 40, 1), (3, 127, 1), (4, 168, 1), (5, 300, 1))
RUN_ROWS: tuple[Stretch, ...] = ((0, 0, 12), (1, 120, 25), (2, 3, 1), (3, 290, 9))
# Window, cap of scores, sinks: each alone, and all. A window of 200 is of several chunks and pages.
HOW = [(40, 0.0, False), (200, 0.0, False), (0, 2.0, False), (0, 0.0, True), (70, 1.5, True)]

Dispatches = tuple[tuple[Dispatch, ...], dict[str, int]]


def _octets(dims: dict[str, Any], caps: DeviceCaps) -> Dispatches:
    found = split_octets(dims, caps.subgroup_max, 128)
    assert found is not None
    return split_dispatches(dims, caps, found)


def _grouped(dims: dict[str, Any], caps: DeviceCaps) -> Dispatches:
    found = grouped(dims, caps, 32)
    assert found is not None
    return (found,), {}


KERNELS: dict[str, Callable[[dict[str, Any], DeviceCaps], Dispatches]] = {
    "single_pass": lambda dims, caps: ((single_pass(dims, caps),), {}),
    "grouped": _grouped,
    "split": lambda dims, caps: split_dispatches(dims, caps, split_quads(dims, 128)),
    "split_octets": _octets,
    "split_tree": lambda dims, caps: split_dispatches(dims, caps, split_tree(dims)),
    "tile": lambda dims, caps: ((tile(dims, caps, 16, 32),), {}),
}


def run(on: Device, kernel: str, dims: dict[str, Any], operands: dict[str, Any], guarded: bool = False) -> Any:
    size = on.caps.subgroup_max
    caps = replace(on.caps, kind="discrete", subgroup_min=size, subgroup_max=size)
    dispatches, scratch = KERNELS[kernel](dims, caps)
    buffers = {**flash().launch_list({**dims, "context": "single_pass"}, caps).buffers, **scratch}
    program = lower(flash(), dims, caps, operands, LaunchList(dispatches, buffers))
    if guarded:
        return run_guarded(on, program)[1]
    return on.run(program)["out"].view(np.float32).reshape(dims["tokens"], dims["Hq"], -1)[..., : dims["D"]]


@pytest.mark.parametrize(("kernel", "scored"), every_pair([*KERNELS], HOW, len(HOW)), ids=str)
def test_kernels(kernel: str, scored: tuple[int, float, bool], gpu: Device) -> None:
    """Keys before a window are NaN: they are not read, or count for nothing."""
    window, softcap, sinks = scored
    stretches = RUN_ROWS if kernel == "tile" else ROWS
    cache, tokens = "f16" if kernel == "split_octets" else "f32", sum(rows for *_, rows in stretches) + 1
    how = {"window": window, "softcap": softcap, "sinks": sinks}
    dims = dims_of((3, 1, 32), tokens, context="split", paged=True, cache=cache, **how)
    operands, expected = MAKERS["attention"](np.random.default_rng(3), {**dims, "stretches": stretches})
    found = run(gpu, kernel, dims, operands)
    if kernel == "tile":  # takes runs alone
        left = np.r_[37, len(found) - 1]
        assert not found[left].any()
        found, expected["out"] = np.delete(found, left, 0), np.delete(expected["out"], left, 0)
    assert_close(found, expected["out"], "attention f16" if cache == "f16" else "attention", f"{kernel} {how}")


@pytest.mark.parametrize("keys", [60, 100, 101, 700])
@pytest.mark.parametrize("kernel", ["single_pass", "split", "split_tree"])
def test_one_sequence_without_pages(kernel: str, keys: int, gpu: Device) -> None:
    """A window may begin anywhere in the pool. What was asked for before the record was known may be used or not."""
    dims = dims_of((2, 1, 8), 1, context="split", keys=keys, window=100, sinks=True)
    operands, expected = MAKERS["attention"](np.random.default_rng(4), dims)
    assert_close(run(gpu, kernel, dims, operands), expected["out"], "attention", kernel)


@pytest.mark.parametrize("window", [2100, with_all(1000)])
def test_long_rows(window: int, gpu: Device) -> None:
    """Chunks of 128 keys, which begin with a page, and of 64, by how much of a row its window leaves."""
    rows: tuple[Stretch, ...] = ((0, 2500, 1), (1, 2111, 1), (2, 40, 1))
    dims = dims_of((2, 1, 4), 3, context="long_split", paged=True, window=window)
    operands, expected = MAKERS["attention"](np.random.default_rng(5), {**dims, "stretches": rows})
    caps = replace(gpu.caps, subgroup_max=0)
    assert_close(attend(gpu, dims, operands, caps), expected["out"], "attention", f"window {window}")


def test_a_row_does_not_depend_on_the_rest_of_its_batch(gpu: Device) -> None:
    """Bit for bit: what a row of a run sees begins in another tile than what the rows before it see."""
    how = {"context": "split", "paged": True, "window": 40, "softcap": 5.0, "sinks": True}
    dims = dims_of((2, 1, 8), 48, **how)
    operands, expected = MAKERS["attention"](np.random.default_rng(6), {**dims, "stretches": RUN_ROWS})
    together = attend(gpu, dims, operands)
    assert_close(together, expected["out"], "attention", "together")
    others = [37, *range(20, 37), *range(38, 46), *range(2, 11)]
    moved = attend(gpu, dims_of((2, 1, 8), 36, **how), rows_of(operands, others, 36))
    np.testing.assert_array_equal(moved[: len(others)], together[others])


@pytest.mark.full
@pytest.mark.parametrize(
    "kernel", ["single_pass", with_all("split_octets"), with_all("split_tree"), "tile", with_all("grouped")]
)
def test_no_index_is_outside(kernel: str, unchecked: Device) -> None:
    """With right records and with wrong ones."""
    cache = "f16" if kernel == "split_octets" else "f32"
    dims = dims_of((2, 1, 32), 10, context="split", paged=True, cache=cache, window=70, sinks=True)
    operands, _ = MAKERS["attention"](np.random.default_rng(7), {**dims, "stretches": ((0, 120, 9), (1, 200, 1))})
    operands["page_table"] = np.pad(operands["page_table"], (0, -len(operands["page_table"]) % 4))
    wrong = operands["batch"].copy()
    wrong[1:, 1] = np.random.default_rng(8).integers(1 << 9, 1 << 32, 10)
    for batch in (operands["batch"], wrong):
        assert run(unchecked, kernel, dims, {**operands, "batch": batch}, guarded=True) == []


@pytest.fixture(scope="module")
def unchecked(pytestconfig: pytest.Config) -> Device:
    return unchecked_device(pytestconfig.getoption("--device"))


def test_a_window_decides_the_context_class() -> None:
    """A row with a short window is a short row, whatever its position is."""
    for caps, wanted in ((GPU, ["single_pass"]), (PLAIN, ["split_tree", "merge"])):
        dims = dims_of((8, 2, 64), 1, context="long_split", paged=True, window=128)
        found = [dispatch.kernel.name for dispatch in flash().launch_list(dims, caps).dispatches]
        assert found == [f"attention_{name}" for name in wanted]


def test_shaders_without_them_have_no_binding_and_no_constant_of_them() -> None:
    plain = flash().launch_list(dims_of((8, 2, 64), 64, context="split", paged=True), GPU)
    assert "sinks" not in plain.buffers
    for dispatch in plain.dispatches:
        assert not {"WINDOW", "SOFTCAP"} & set(dispatch.constants)
        assert "sinks" not in dict(shader_of(dispatch).bindings)


@pytest.mark.parametrize("name", ["window", "softcap", "sinks"])
def test_routes_in_three_passes_refuse_them(name: str) -> None:
    for route in routes_of("attention"):
        if route.name in ("coalesced", "strided"):
            dims = dims_of((4, 2, 8), 2, keys=9, **{name: True if name == "sinks" else 4})
            assert f"no {name}" in (route.reason(dims, GPU) or "")
