"""`shaderlm profile`: what is timed and that it adds up, tracing, files, comparisons, mistakes and Ctrl-C."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shaderlm.cli.profile import _notes
from shaderlm.compile import roofline
from shaderlm.compile.roofline import Roofline, measure_roofline, uses_matrix_units
from shaderlm.compile.steps import Head
from shaderlm.compile.workload import RoutedOp, program_of
from shaderlm.engine import load
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import InputError
from shaderlm.gpu import Device, MatrixShape, open_device
from shaderlm.gpu.tracer import BY_PASS, IN_PASS, MAX_QUERIES, WALL
from shaderlm.graph.ops import label
from shaderlm.models.config import StepSpec
from shaderlm.profile.files import trace
from shaderlm.profile.measure import Event, Phase, _run_decode, _run_prefill, profile
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.pages import KvSequence

from .fake_runner import FakeRunner, hashed
from .gpu_programs import adding, program
from .session import Session
from .sweeps import with_all
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0, profiles")

PROMPT, GENERATED = 16, 48
CONTEXT = 128
ROOFS = Roofline(2e9, 1e10, 30.0, 0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context=CONTEXT)


@dataclass
class Taken:
    """A model on a device with one of the clocks, and a profile of it."""

    model: GpuRunner
    phases: dict[str, Phase]
    events: dict[str, list[Event]]


def measured(model: GpuRunner, prompt: int, generated: int, repetitions: int = 3) -> list[tuple[Phase, list[Event]]]:
    found = list(profile(model, prompt, generated, 0, repetitions, 0.0, lambda text: None))
    assert not any(interrupted for _, _, interrupted in found)
    return [(phase, events) for phase, events, _ in found]


@pytest.fixture(scope="module")
def clocked(device: Device, timeless_device: Device, pytestconfig: pytest.Config) -> dict[str, Device]:
    by_pass = open_device(pytestconfig.getoption("--device"), without=("pass_timestamps",))
    return {IN_PASS: device, BY_PASS: by_pass, WALL: timeless_device}


@pytest.fixture(scope="module", params=[IN_PASS, with_all(BY_PASS), WALL])
def taken(request: pytest.FixtureRequest, clocked: dict[str, Device], tiny: Path) -> Iterator[Taken]:
    opened = clocked[request.param]
    with load(tiny, device=opened) as bound:
        model: Any = bound.runner
        found = measured(model, PROMPT, GENERATED)
        yield Taken(model, {p.name: p for p, _ in found}, {p.name: events for p, events in found})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roofs are taken for granted."""
    monkeypatch.setattr("shaderlm.compile.roofline.measure_roofline", lambda device: ROOFS)


# Dispatches and sums ------------------------------------------------------------------------------------------


def planned(model: GpuRunner, key: StepSpec | Head) -> list[tuple[str, str, str, str]]:
    launches = model.plan(key).launches
    return [(each.layer, label(each.op, each.dims), each.route, each.step.label) for each in launches]


def prefill(model: GpuRunner, tokens: int, *, last: bool = True) -> list[tuple[str, str, str, str]]:
    head = planned(model, Head(1, tokens, "greedy")) if last else []
    return planned(model, StepSpec(tokens, cache=model.cache, paged=True)) + head


def decode(model: GpuRunner) -> list[tuple[str, str, str, str]]:
    return planned(model, StepSpec(1, cache=model.cache)) + planned(model, Head(1, 1, "greedy", paged=False))


def names(phase: Phase) -> list[tuple[str, str, str, str]]:
    return [(timed.layer, timed.op, timed.route, timed.kernel) for timed in phase.dispatches]


def test_the_clocks(device: Device, taken: Taken) -> None:
    known = device.caps
    best = IN_PASS if known.pass_timestamps else BY_PASS if known.timestamps else WALL
    wanted = {IN_PASS: best, BY_PASS: BY_PASS if known.timestamps else WALL, WALL: WALL}
    without = tuple(name for name in ("pass_timestamps", "timestamps") if not getattr(taken.model.device.caps, name))
    assert taken.model.device.clock == wanted[WALL if "timestamps" in without else BY_PASS if without else IN_PASS]
    said = " ".join(_notes(taken.model, PROMPT, ()))
    assert "in a plan for 32" in " ".join(_notes(taken.model, 20, ()))
    assert "in a plan for" not in said
    assert ("no timestamps" in said) == (taken.model.device.clock == WALL)
    assert ("for whole passes only" in said) == (taken.model.device.clock == BY_PASS)


def test_every_dispatch_is_timed_in_order(taken: Taken) -> None:
    assert names(taken.phases["prefill"]) == prefill(taken.model, PROMPT)
    assert names(taken.phases["decode"]) == decode(taken.model)


def test_a_prompt_in_chunks(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three submissions; the later chunks see the keys of the ones before."""
    model = taken.model
    monkeypatch.setattr(model, "max_tokens", 8)
    ((phase, _),) = measured(model, 20, 0)
    chunks = [prefill(model, 8, last=False)] * 2 + [prefill(model, 4)]
    assert names(phase) == [row for chunk in chunks for row in chunk]
    attended = sum(timed.flops for timed in phase.dispatches if timed.op == "attention")
    heads, width, layers = model.config.heads, model.config.head_width, model.config.layers
    assert attended == pytest.approx(layers * 4 * heads * width * (20 * 21 // 2), abs=len(phase.dispatches))


def test_sequences_that_decode_together(taken: Taken) -> None:
    model = taken.model
    ((phase, _, interrupted),) = profile(model, 0, 4, 8, 1, 0.0, lambda text: None, parallel=3)
    assert (phase.name, phase.rows, phase.steps, phase.depth, interrupted) == ("decode", 3, 4, 8, False)
    body, head = StepSpec(4, cache=model.cache, paged=True), Head(4, 4, "greedy")
    assert names(phase) == planned(model, body) + planned(model, head)
    many = model.max_outputs + 1
    with pytest.raises(InputError, match=f"{many} sequences, and a step samples at most {model.max_outputs}"):
        list(profile(model, 0, 4, 0, 1, 0.0, lambda text: None, parallel=many))


class Stateful(FakeRunner):
    """Nothing is left of a sequence that is cut back."""

    def truncate(self, sequence: KvSequence, length: int) -> int:
        return super().truncate(sequence, length if length == sequence.length else 0)


def test_a_model_with_states_is_timed_at_its_depth() -> None:
    model, steps = Stateful(hashed(50), 50), list[Any]()
    sequence = model.add()
    model.feed(sequence, [1] * 40)
    _run_prefill(model, sequence, 40, 10, 3, steps)
    assert (len(steps), sequence.length) == (3, 40 + 10)
    _run_decode(model, [sequence], 40, 4, steps)
    assert (len(steps), sequence.length) == (3 + 4, 40 + 4)


def test_times_add_up(taken: Taken) -> None:
    for phase in taken.phases.values():
        assert (phase.rows, phase.steps) == ((PROMPT, 3) if phase.name == "prefill" else (1, GENERATED))
        assert all(timed.us > 0 and timed.bytes >= 0 and timed.flops >= 0 for timed in phase.dispatches)
        ops = {(timed.layer, timed.op) for timed in phase.dispatches}  # of several dispatches one may have no work
        assert ops == {(timed.layer, timed.op) for timed in phase.dispatches if timed.bytes > 0}
        ahead = phase.name == "decode" and taken.model.device.caps.policy.record_ahead
        here = ["take"] if ahead else ["encode", "finish"]
        assert list(phase.host_us) == ["prepare", *here, "submit", "wait"]
        assert list(phase.ahead_us) == (["encode", "finish"] if ahead else [])
        assert min(phase.host_us.values()) >= 0
        assert phase.wall_us / 2 < sum(phase.host_us.values()) <= phase.wall_us * (1 + 1e-9)
        total = sum(timed.us for timed in phase.dispatches)
        if taken.model.device.clock == WALL:
            assert (phase.gpu_us, phase.gap_us, phase.scale) == (None, None, 1.0)
            assert total == pytest.approx(phase.timestamped_us)
        else:
            assert phase.gpu_us is not None
            assert phase.gap_us is not None
            assert total == pytest.approx(phase.gpu_us)
            assert phase.gap_us >= 0


def identity(phase: Phase) -> float:
    assert phase.gpu_us is not None
    assert phase.gap_us is not None
    assert phase.traced_wall_us is not None
    return (phase.gpu_us + phase.gap_us) / phase.traced_wall_us


@pytest.mark.parametrize("taken", [IN_PASS, with_all(BY_PASS)], indirect=True)
def test_busy_and_idle_are_the_wall_time(taken: Taken) -> None:
    """By two clocks. Another process may take the core between them: the best of three counts."""
    best: dict[str, float] = {}
    for _ in range(3):
        for phase, _ in measured(taken.model, PROMPT, GENERATED, 10):
            off = abs(identity(phase) - 1)
            best[phase.name] = min(off, best.get(phase.name, off))
        if max(best.values()) < 0.1:
            break
    assert best.keys() == {"prefill", "decode"}
    assert max(best.values()) < 0.1, best


@pytest.mark.parametrize("taken", [IN_PASS, with_all(BY_PASS)], indirect=True)
def test_waiting_for_the_host_is_idle_before_the_first_step_too(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes 20 ms before each of three prompts leaves the GPU idle for 60, not for 40 and a guess."""
    real = GpuRunner.truncate

    def late(self: GpuRunner, sequence: KvSequence, length: int) -> int:
        time.sleep(0.02)
        return real(self, sequence, length)

    monkeypatch.setattr(GpuRunner, "truncate", late)
    tries = (abs(identity(measured(taken.model, 2, 0)[0][0]) - 1) for _ in range(3))
    assert any(off < 0.1 for off in tries)


# Tracing -----------------------------------------------------------------------------------------------------


def tokens(model: GpuRunner) -> list[int]:
    session = Session(model)
    try:
        return [session.sample([5, 9, 40, 77]).wait(), *(session.advance().wait() for _ in range(6))]
    finally:
        session.close()


def test_tracing_changes_no_result(taken: Taken) -> None:
    plain = tokens(taken.model)
    assert len(set(plain)) > 1
    for grain in ("host", "submission", "dispatch"):
        with taken.model.device.traced(grain) as tracer:
            assert tokens(taken.model) == plain, grain
        assert len(tracer.collect()) == 7
        assert tracer.collect() == []


def test_more_timestamps_than_a_set_holds(taken: Taken) -> None:
    device = taken.model.device
    bound = device.bind(program(adding("many"), steps=4))
    try:
        with device.traced("dispatch") as tracer:
            for _ in range(5):
                device.submit([bound] * 250)
        seen = tracer.collect()
        assert device.read(bound.buffers["out"], 4).view(np.float32)[0] == 5000 > MAX_QUERIES
    finally:
        bound.release()
    assert [len(submission.ends) for submission in seen] == [1001] * 5
    every = np.concatenate([submission.ends for submission in seen])
    assert (np.diff(every) >= 0).all()
    assert every[-1] > every[0] >= 0


def test_a_tracer_ends_with_an_exception(taken: Taken) -> None:
    device = taken.model.device
    with pytest.raises(ZeroDivisionError), device.traced("dispatch"):
        raise ZeroDivisionError
    with device.traced("submission") as tracer:
        tokens(taken.model)
    tokens(taken.model)
    assert len(tracer.collect()) == 7, "what runs after a tracer is not seen by it"


# Roofs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [IN_PASS, WALL])
def test_roofs_are_measured(clock: str, clocked: dict[str, Device]) -> None:
    found = measure_roofline(clocked[clock])
    assert min(found.bytes_per_second, found.flops_per_second, found.dispatch_us) > 0
    assert found.timestamp_us >= 0
    assert found.timestamp_us == 0 or clock != WALL


def test_the_higher_roof_counts() -> None:
    roofs = Roofline(1e9, 4e9, 5.0, 1.0, 8e9)
    works = ((1000, 0, False), (0, 4000, False), (1000, 8000, False), (0, 8000, True), (1500, 8000, True))
    assert [roofs.floor_us(*work) for work in works] == pytest.approx([1.0, 1.0, 2.0, 1.0, 1.5])


@pytest.mark.parametrize("shape", [None, MatrixShape("f16", "f32", 16, 8, 16), MatrixShape("i8", "i32", 16, 16, 32)])
def test_the_roof_of_matrix_units(shape: MatrixShape | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured where kernels use them, with the shape that kernels take."""
    timed: list[RoutedOp] = []

    def time_in_turns(clock: Any, works: list[tuple[RoutedOp]], fill: Any) -> list[float]:
        timed.extend(work for (work,) in works)
        return [1e-6, 2.0, 0.25][: len(works)]

    monkeypatch.setattr(roofline, "Clock", lambda device: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda clock, fill: 1e9)
    monkeypatch.setattr(roofline, "time_in_turns", time_in_turns)
    caps = replace(LARGE_GPU, implementation="dawn", subgroup_min=32, subgroup_max=32)
    caps = replace(caps, matrix_shapes=(shape,) if shape else ())
    found = measure_roofline(cast("Device", SimpleNamespace(caps=caps, clock=WALL)))
    usual = roofline.FMA_VALUES * roofline.FMA_ROUNDS * 16
    assert (found.bytes_per_second, found.flops_per_second, found.dispatch_us) == (1e9, usual / 2.0, 1e-6 * 1e6)
    if shape is None or shape.component != "f16":
        assert [work.op for work in timed] == ["copy", "fma_chain"]
        assert found.matrix_flops_per_second is None
        return
    chain = timed[-1].dims
    assert (chain["rows"] % shape.m, chain["columns"] % shape.n, chain["K"]) == (0, 0, shape.k)
    products = chain["rows"] // shape.m * (chain["columns"] // shape.n) * chain["rounds"] * chain["count"]
    assert found.matrix_flops_per_second == products * 2 * shape.m * shape.n * shape.k / 0.25
    (step,) = program_of(timed[-1], caps).steps
    assert uses_matrix_units(step)
    assert not any(uses_matrix_units(step) for work in timed[:2] for step in program_of(work, caps).steps)


# Traces -------------------------------------------------------------------------------------------------------


def test_a_trace_is_in_order(taken: Taken) -> None:
    text = json.dumps(trace(list(taken.events.items())), allow_nan=False)
    every = json.loads(text)["traceEvents"]
    named = [(e["pid"], e.get("tid"), e["name"], e["args"]["name"]) for e in every if e["ph"] == "M"]
    for pid, name in enumerate(taken.events, 1):
        about = [(None, "process_name", name), (1, "thread_name", "host"), (2, "thread_name", "GPU")]
        assert [row[1:] for row in named if row[0] == pid] == about
        rows: dict[int, list[Any]] = {
            tid: [e for e in every if (e["pid"], e.get("tid")) == (pid, tid)] for tid in (1, 2)
        }
        for row in rows.values():
            row[:] = [event for event in row if event["ph"] == "X"]
            assert all(event["dur"] >= 0 for event in row)
            for one, other in itertools.pairwise(row):
                assert one["ts"] + one["dur"] <= other["ts"] + 0.002, "written to a nanosecond"
        phase = taken.phases[name]
        step = [event["name"] for event in rows[2]][: len(phase.dispatches)]
        assert step == [timed.kernel for timed in phase.dispatches]
        submits = [event for event in rows[1] if event["name"] == "submit"]
        owners = [submit for submit in submits for _ in step]
        for event, submit in zip(rows[2], owners, strict=True):
            assert event["ts"] >= submit["ts"] - 0.001
