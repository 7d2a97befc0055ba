"""Routes chosen by measurement: who wins, what is kept, which files are ignored, and that results stay right."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.synthetic import config_of, parse
from shaderlm.compile import lower, timing, tuner
from shaderlm.compile.plan_text import describe, describe_choices
from shaderlm.compile.steps import Head
from shaderlm.compile.tuner import QUICK, THOROUGH, Tuner, shapes_of, tuned
from shaderlm.compile.tuning import Entry, Tuning, key_of, read, save
from shaderlm.engine.loading import load_with
from shaderlm.engine.planning import LARGE_GPU, tunable_nodes
from shaderlm.gpu import Device
from shaderlm.graph import resolve
from shaderlm.graph.graph import Builder, Graph
from shaderlm.graph.ops import label
from shaderlm.kernels import Option, option, options
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.runner import MAX_OUTPUTS

from .architectures import SMOLLM2, model
from .cases import Case, make, result, tolerance
from .compare import assert_close
from .test_plan import UNITS, plan_of
from .timed_devices import TIMED_GPU, TimedDevice
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny f32")

DIMS = resolve("linear", {"tokens": 1, "K": 2048, "N": 8192, "format": "q4_0"})
KEY = "linear tokens=1 K=2048 N=8192 format=q4_0 bias=False"
BUILT_IN, *REST = [each.name for each in options("linear", DIMS, TIMED_GPU, "fast")]
OTHER = next(name for name in REST if name.startswith("gemv/"))
FOUND = Entry(OTHER, BUILT_IN, {OTHER: 4.0, BUILT_IN: 5.0}, True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was said so far."""
    with caplog.at_level(logging.INFO, "shaderlm"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "caps", [replace(LARGE_GPU, subgroup_min=32, subgroup_max=32), UNITS], ids=["wgpu", "Dawn with matrix units"]
)
def test_every_bucket_of_rows_has_candidates(caps: Any) -> None:
    """Products of layers for all buckets of a step, those of the head for as many rows as may give logits."""
    kind, config = config_of(*parse("synthetic:llama-3.1-8b:q4_0"))
    nodes = tunable_nodes(kind, config, caps, "fast")
    buckets = [1 << i for i in range(10)]
    for K, N, most in ((4096, 6144, 512), (4096, 28672, 512), (14336, 4096, 512), (4096, 128256, MAX_OUTPUTS)):
        found = [node for node in nodes if (node.dims["K"], node.dims["N"]) == (K, N)]
        assert sorted(node.dims["tokens"] for node in found) == [rows for rows in buckets if rows <= most], (K, N)
        for node in found:
            assert len(options(node.op, node.dims, caps, "fast")) > 2, key_of(node.op, node.dims)


# Candidates ----------------------------------------------------------------------------------------------


def test_the_first_option_is_the_built_in_choice_and_none_is_there_twice() -> None:
    for precision, first in (("fast", "gemv_int16"), ("exact", "gemv")):
        found = options("linear", DIMS, LARGE_GPU, precision)
        assert found[0].name == first
        assert len({each.name for each in found}) == len(found) > 10
        assert all(a.launch_list != b.launch_list for i, a in enumerate(found) for b in found[:i])
        assert any(each.route.name == "gemv_int16" for each in found) == (precision == "fast")
        for each in found:
            assert option("linear", each.name, DIMS, LARGE_GPU, precision) == each


@pytest.mark.parametrize(
    ("name", "precision", "words"),
    [
        ("gemm", "fast", "linear has no route 'gemm'"),
        ("gemv/7x7x7", "fast", "gemv has no launch configuration '7x7x7'"),
        ("gemv_int16", "exact", "gemv_int16 rounds its inputs, which was not asked for"),
    ],
)
def test_why_an_option_cannot_be_taken(name: str, precision: str, words: str) -> None:
    assert option("linear", name, DIMS, LARGE_GPU, precision) == words
    prompt = option("linear", "gemv", {**DIMS, "tokens": 2}, LARGE_GPU, "fast")
    assert prompt == "gemv does not apply: tokens must be 1, tokens is 2"


def test_a_shape_in_words_has_what_shapes_the_work() -> None:
    """Attributes that are off are left out, and so is what no kernel depends on: eps, and whether rows are counted."""
    sizes = {"tokens": 1, "K": 64, "N": 128, "Hq": 4, "Hkv": 2, "D": 16}
    how = {"prologue": "rms_norm", "epilogue": "rope_kv_write"}
    keys = {key_of("linear", resolve("linear", {**sizes, **how, "eps": eps})) for eps in (1e-5, 1e-6)}
    key = "linear tokens=1 K=64 N=128 format=f32 bias=False prologue=rms_norm epilogue=rope_kv_write "
    assert keys == {key + "Hq=4 Hkv=2 D=16 rotary=16 cache=f32"}
    plain = {"tokens": 1, "K": 2048, "N": 8192, "format": "q4_0"}
    assert {key_of("linear", resolve("linear", {**plain, "batched": batched})) for batched in (False, True)} == {KEY}
    assert key_of("linear", resolve("linear", {**plain, "epilogue": "add"})) == f"{KEY} epilogue=add"


# Many lanes per row and few, one row and four, with rows left over; all of them with --all.
_SHAPES: dict[str, dict[str, Any]] = {
    "linear": {"K": 96, "N": 1027, "format": "q4_0", "bias": True},
    "linear+add": {"K": 96, "N": 523, "format": "q8_0", "bias": False},
    "linear+silu_mul": {"K": 96, "N": 1030, "format": "q4_1", "bias": True},
    "rms_norm+linear": {"K": 1056, "N": 531, "format": "q4_0", "bias": False},
    "rms_norm+linear+silu_mul": {"K": 96, "N": 1030, "format": "q8_0", "bias": True},
    "rms_norm+linear+rope_kv_write": {"K": 1056, "N": 540, "Hq": 13, "Hkv": 1, "D": 36, "format": "q4_0"},
}


def _case(name: str) -> Case:
    """The shape with the prologue and the epilogue that its name says."""
    before, _, after = name.partition("linear")
    how = {"prologue": before.rstrip("+") or "none", "epilogue": after.lstrip("+") or "none"}
    return Case("linear", (("tokens", 1), *_SHAPES[name].items(), *how.items()))


def _candidates(name: str, caps: Any) -> list[Option]:
    return [each for each in options("linear", _case(name).dims, caps, "fast") if each.config]


def _few(name: str, caps: Any) -> list[str]:
    """The last config of each of the routes: compiling takes a software adapter a second each."""
    return list({each.route.name: each.name for each in _candidates(name, caps)}.values())


def _check_candidates(name: str, gpu: Device, names: list[str]) -> None:
    case = _case(name)
    assert label("linear", case.dims) == name
    assert names
    operands, expected = make(case)
    for config in names:
        found = option("linear", config, case.dims, gpu.caps, "fast")
        assert isinstance(found, Option), found
        raw = gpu.run(lower(found.route, case.dims, gpu.caps, operands, launch_list=found.launch_list))
        for output, wanted in expected.items():
            assert wanted is not None
            actual = result(case, output, raw[output], wanted)
            assert_close(actual, wanted, tolerance(case, found.route, output), f"{name}/{config} {output}")


@pytest.mark.parametrize("name", [name for name in _SHAPES if name not in ("linear+add", "rms_norm+linear+silu_mul")])
def test_candidates_match_the_reference(name: str, gpu: Device) -> None:
    _check_candidates(name, gpu, _few(name, gpu.caps))


@pytest.mark.long
@pytest.mark.parametrize("name", _SHAPES)
def test_all_candidates_match_the_reference(name: str, gpu: Device) -> None:
    _check_candidates(name, gpu, [each.name for each in _candidates(name, gpu.caps)])


# Who wins ------------------------------------------------------------------------------------------------


def _tune(device: TimedDevice, effort: Any = THOROUGH, seconds: float | None = None) -> Entry | None:
    made = Tuner(device.device, "fast", effort, seconds)
    try:
        return made.tune("linear", DIMS)
    finally:
        made.close()


@pytest.mark.parametrize(("others", "winner"), [(0.98, BUILT_IN), (0.96, OTHER)])
def test_a_winner_must_beat_the_built_in_choice_by_3_percent(others: float, winner: str) -> None:
    times = {BUILT_IN: 1e-5, OTHER: others * 1e-5}
    device = TimedDevice("linear", DIMS, lambda name: times.get(name, 1.2e-5))
    found = _tune(device)
    assert found is not None
    assert (found.winner, found.built_in, found.thorough) == (winner, BUILT_IN, True)
    assert set(found.microseconds) == {each.name for each in options("linear", DIMS, TIMED_GPU, "fast")}
    assert found.microseconds[OTHER] == pytest.approx(10 * others)
    assert device.made == 0, "all buffers are given back"


def test_hopeless_candidates_are_looked_at_once() -> None:
    device = TimedDevice("linear", DIMS, lambda name: 1e-5 if name in (BUILT_IN, OTHER) else 1.6e-5)
    assert _tune(device) is not None
    assert device.timed.count(OTHER) == 1 + THOROUGH.rounds
    assert device.timed.count("tile_shared") == 1


def test_what_a_driver_cannot_compile_is_left_out() -> None:
    device = TimedDevice("linear", DIMS, lambda name: 1e-5)
    device.broken = {OTHER, "tile_shared"}
    found = _tune(device)
    assert found is not None
    assert set(found.microseconds) == {BUILT_IN, *REST} - device.broken
    device.broken = {BUILT_IN}
    assert _tune(device) is None, "without the built-in choice there is nothing to compare with"


def test_a_clock_that_stands_still_is_not_believed() -> None:
    assert _tune(TimedDevice("linear", DIMS, lambda name: 0.0)) is None


def _ticking(monkeypatch: pytest.MonkeyPatch, device: TimedDevice, seconds: float) -> Callable[[], float]:
    """The time passes only while something is compiled: so many seconds per batch."""
    now = [0.0]
    compiled = device.compile

    def compile_slowly(steps: Any) -> None:
        compiled(steps)
        now[0] += seconds

    monkeypatch.setattr(device, "compile", compile_slowly)
    monkeypatch.setattr(tuner, "_now", lambda: now[0])
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # four candidates at a time
    return lambda: now[0]


def test_the_budget_ends_the_search_within_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TimedDevice("linear", DIMS, lambda name: 1e-5)
    now = _ticking(monkeypatch, device, 0.9)
    found = _tune(device, QUICK, 2.0)
    assert now() == pytest.approx(1.8)
    assert found is not None
    assert len(found.microseconds) == 8
    assert not found.thorough


# At a load -----------------------------------------------------------------------------------------------


def _graph(*widths: int) -> Graph:
    builder = Builder()
    builder.tensor("x", 1, 2048, role="input")
    for i, width in enumerate(widths):
        builder.tensor(f"w{i}", width, 2048, role="weight", format="q4_0")
        builder.tensor(f"y{i}", 1, width)
        dims = {"tokens": 1, "K": 2048, "N": width, "format": "q4_0"}
        builder.add("linear", dims, {"x": "x", "weight": f"w{i}"}, "layer", out=f"y{i}")
    return builder.graph(*(f"y{i}" for i in range(len(widths))))


def test_shapes_with_most_bytes_come_first_and_each_once() -> None:
    found = shapes_of([_graph(4096, 2048, 8192, 2048), _graph(2048, 2048, 2048)], LARGE_GPU, "fast")
    assert [node.dims["N"] for node in found] == [2048, 8192, 4096]


def test_many_rows_are_timed_where_a_route_has_several_configurations() -> None:
    builder = Builder()
    builder.tensor("x", 64, 2048, role="input")
    builder.tensor("w", 4096, 2048, role="weight", format="q4_0")
    builder.tensor("y", 64, 4096)
    dims = {"tokens": 64, "K": 2048, "N": 4096, "format": "q4_0"}
    builder.add("linear", dims, {"x": "x", "weight": "w"}, "layer", out="y")
    graph = builder.graph("y")
    assert shapes_of([graph], LARGE_GPU, "exact") == [], "tile_shared has one configuration"
    assert [node.dims["tokens"] for node in shapes_of([graph], UNITS, "fast")] == [64]
    found = options("linear", graph.nodes[0].dims, UNITS, "fast")
    assert found[0].name == "matrix"
    assert sum(option.route.name == "matrix" for option in found) > 4


def test_a_load_times_what_is_new_and_keeps_it(monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    monkeypatch.setattr(tuner, "BUDGET_SECONDS", 60.0)  # of a real clock, and machines may be busy
    device = TimedDevice("linear", DIMS, lambda name: 1e-5 if name == OTHER else 2e-5)
    found = tuned(device.device, [_graph(8192)], "fast", True)
    assert found.entries["fast", KEY].winner == OTHER
    assert read(TIMED_GPU).entries["fast", KEY].winner == OTHER
    device.timed.clear()
    assert tuned(device.device, [_graph(8192)], "fast", True).entries["fast", KEY].winner == OTHER
    assert device.timed == []
    device.know("linear", DIMS, "exact")
    assert ("exact", KEY) in tuned(device.device, [_graph(8192)], "exact", True).entries
    assert set(read(TIMED_GPU).entries) == {("fast", KEY), ("exact", KEY)}
    assert lines() == []


def test_a_plain_load_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "BUDGET_SECONDS", 60.0)
    device = TimedDevice("linear", DIMS, lambda name: 1e-5 if name == OTHER else 2e-5)
    assert tuned(device.device, [_graph(8192)], "fast", measure=False).entries == {}
    assert device.timed == []


def test_what_does_not_fit_the_budget_is_tried_at_the_next_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "BUDGET_SECONDS", 2.0)
    device = TimedDevice("linear", DIMS, lambda name: 1e-5)
    device.know("linear", {**DIMS, "N": 4096}, "fast")
    now = _ticking(monkeypatch, device, 1.0)
    graph = _graph(8192, 4096)
    assert {key.split("N=")[1][:4] for _, key in tuned(device.device, [graph], "fast", True).entries} == {"8192"}
    assert now() <= 2.0
    assert {key.split("N=")[1][:4] for _, key in tuned(device.device, [graph], "fast", True).entries} == {
        "8192",
        "4096",
    }
    assert now() <= 4.0


def test_software_adapters_are_not_timed_but_their_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "BUDGET_SECONDS", 2.0)
    device = TimedDevice("linear", DIMS, lambda name: 1e-5)
    device.caps = replace(TIMED_GPU, kind="software")
    save(device.caps, {("fast", KEY): FOUND})
    assert set(tuned(device.device, [_graph(8192, 4096)], "fast", True).entries) == {("fast", KEY)}
    assert device.timed == []


def test_a_load_survives_what_a_driver_says(monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    monkeypatch.setattr(tuner, "BUDGET_SECONDS", 2.0)
    device = TimedDevice("linear", DIMS, lambda name: 1 / 0)
    assert tuned(device.device, [_graph(8192)], "fast", True).entries == {}
    assert lines() == ["kernels could not be timed, the built-in order is taken: division by zero"]
    assert device.made == 0


def test_a_real_device_is_timed(device: Device, timeless_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its timestamps and by the host's clock; few candidates: compiling takes a software adapter a second each."""
    dims = resolve("linear", {"tokens": 1, "K": 64, "N": 267})
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1 << 16)
    for chosen, count in ((device, 2), (timeless_device, 1)):
        few = [each for each in options("linear", dims, device.caps, "exact") if not each.config][:count]
        names = [each.name for each in few]
        monkeypatch.setattr(tuner, "options", lambda *given, few=few: few)
        made = Tuner(chosen, "exact", QUICK)
        try:
            found = made.tune("linear", dims)
        finally:
            made.close()
        assert found is not None
        assert (list(found.microseconds), found.built_in) == (names, names[0])


def test_a_load_takes_the_winners_and_says_the_same(tmp_path: Path, device: Device) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind="f32", layers=1)
    dims = resolve("linear", {"tokens": 1, "K": 64, "N": 267})
    first, other = [each.name for each in options("linear", dims, device.caps, "fast") if not each.config][:2]
    save(device.caps, {("fast", key_of("linear", dims)): Entry(other, first, {other: 1.0, first: 2.0}, True)})
    routes, logits = [], []
    for tune in (False, True):
        with load_with(path, device=device, tune=tune, cache="f32", fusions=()) as loaded:
            assert isinstance(loaded.runner, GpuRunner)
            products = [each for each in loaded.runner.plan(Head(1, 1, "logits")).launches if each.op == "linear"]
            routes += [launch.route for launch in products]
            logits.append(loaded.logits([5]))
    assert routes == [first, other]
    assert np.abs(logits[1] - logits[0]).max() < 1e-4


# Plans ---------------------------------------------------------------------------------------------------


def _smollm2(tuned_: Tuning | None, precision: str = "fast") -> Any:
    made, config = model(SMOLLM2, kind="q4_0")
    return plan_of(made, config, LARGE_GPU, 1, (), precision=precision, tuning=tuned_)


def _shape(n: int) -> tuple[str, str, str]:
    """A matmul of SmolLM2 in words, its built-in choice, and one of its candidates."""
    dims = resolve("linear", {"tokens": 1, "K": 576, "N": n, "format": "q4_0"})
    first, *rest = [each.name for each in options("linear", dims, LARGE_GPU, "fast")]
    return key_of("linear", dims), first, next(name for name in rest if "/" in name)


def test_winners_are_used_by_plans_and_shown() -> None:
    key, first, config = _shape(1536)
    times = {config: 4.0, first: 5.0, "rows": 4.2}
    known = Tuning({("fast", key): Entry(config, first, times, False)}, "FILE")
    plan = _smollm2(known)
    taken = {f"{each.route}/{each.config}" for each in plan.launches if each.dims.get("N") == 1536}
    assert taken == {config}
    assert {each.config for each in plan.launches if each.dims.get("N") != 1536} == {""}
    assert config in describe(plan)
    assert describe(_smollm2(known, "exact")) == describe(_smollm2(None, "exact")), "entries are per precision"
    said = describe_choices(plan, known, "fast").splitlines()
    assert said[0] == "why these routes in a decode step (fast; FILE):"
    at = said.index(key)
    assert said[at + 1] == (
        f"  {config}, 4.00 µs: 20.0 % less than the built-in {first}; 4.8 % less than the next, rows "
        "(timed in short, at a load)"
    )
    assert said[at + 2 : at + 5] == [f"    {times[name]:10.2f} µs  {name}" for name in (config, "rows", first)]
    assert sum(line.endswith("built-in order: not tuned") for line in said) == 4


def test_a_built_in_choice_that_stays_is_explained() -> None:
    key, first, config = _shape(1536)
    known = Tuning({("fast", key): Entry(first, first, {config: 4.9, first: 5.0}, True)}, "FILE")
    assert describe(_smollm2(known)) == describe(_smollm2(None))
    said = describe_choices(_smollm2(known), known, "fast")
    assert (
        f"  {first}, 5.00 µs: the built-in choice, which no other beats by 3 %; {config} takes 2.0 % less (timed"
        in said
    )


def test_a_configuration_that_there_is_not_is_ignored_with_one_line(lines: Any) -> None:
    shapes = {n: _shape(n) for n in (192, 1536)}
    wrong = {
        ("fast", key): Entry("gemv/7x7x7", first, {"gemv/7x7x7": 4.0, first: 5.0}, True)
        for key, first, _ in shapes.values()
    }
    known = Tuning(wrong, "FILE")
    assert describe(_smollm2(known)) == describe(_smollm2(None))
    assert lines() == [f"tuning of {shapes[192][0]} is ignored: gemv has no launch configuration '7x7x7'"]
    said = describe_choices(_smollm2(known), known, "fast")
    assert f"  {shapes[192][1]}, built-in order: gemv/7x7x7 won, but cannot be taken here" in said
