"""Where a step's time goes: on the GPU by dispatch, on the host by what it does, and idle in between.

A phase is measured three times after a warm-up: by the host's clock alone (wall time, and the host's share), with two
timestamps per submission (GPU busy and idle), and with a timestamp after every dispatch. A timestamp takes time itself
(5 µs on an H200, twice what a small dispatch takes): its cost is measured on dispatches that do nothing and taken off
each, and what remains is scaled so that the dispatches add up to the GPU time of the run without them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ..compile.roofline import uses_matrix_units
from ..errors import InputError
from ..gpu import Program
from ..gpu.tracer import WALL, Grain, Submission
from ..graph.ops import label
from ..runtime.gpu_runner import GpuRunner
from ..runtime.pages import KvSequence
from ..runtime.runner import Runner, Tokens
from ..runtime.sampler_settings import GREEDY

Host = list[tuple[str, float, float]]  # what, from, to
SHOWN_STEPS = 4  # of the timeline


@dataclass(frozen=True)
class Timed:
    """One dispatch of a step: the mean over the steps, from the end of the one before to its own end."""

    layer: str
    op: str
    route: str
    kernel: str
    workgroups: int
    operands: tuple[str, ...]
    us: float
    bytes: int
    flops: int
    matrix_units: bool  # multiplies by them: their peak is its roof


@dataclass(frozen=True)
class Phase:
    """Reading a prompt, or writing tokens. Microseconds per step; None where there was no time or no clock for it."""

    name: Literal["prefill", "decode"]
    rows: int  # tokens per step
    depth: int
    steps: int
    wall_us: float
    traced_wall_us: float | None  # wall time of the run in which GPU time was taken
    gpu_us: float | None
    gap_us: float | None
    timestamped_us: float | None  # GPU time with a timestamp after each dispatch
    scale: float  # of what remained of them after the timestamps' cost was taken off, to add up to gpu_us
    host_us: dict[str, float]  # of the thread that asks for steps
    ahead_us: dict[str, float]  # of other threads, which record steps ahead
    dispatches: tuple[Timed, ...]
    timeline: tuple[dict[str, Any], ...] = field(repr=False)

    @property
    def host_us_per_dispatch(self) -> float | None:
        """What the host spends on a dispatch in the thread that asks for steps, unless it waits for the GPU."""
        busy = sum(us for name, us in self.host_us.items() if name != "wait")
        return busy / len(self.dispatches) if self.host_us and self.dispatches else None


@dataclass(frozen=True)
class Event:
    """One span of a trace, in microseconds since the phase began."""

    track: Literal["host", "GPU"]
    name: str
    start: float
    duration: float
    details: dict[str, Any]


@dataclass
class _Step:
    """What the host did in one step, by its clock in nanoseconds, and the submissions it made."""

    begin: int
    submissions: list[Submission]
    waits: list[tuple[int, int]]
    end: int

    def host(self) -> Host:
        """Parts in order; what lies between the named ones is preparation."""
        named = [(name, *span) for s in self.submissions for name, span in s.host.items()]
        named += [("wait", *span) for span in self.waits]
        parts: Host = []
        at = self.begin
        for name, begin, end in sorted(named, key=lambda part: part[1]):
            if begin > at:
                parts.append(("prepare", at, begin))
            parts.append((name, begin, end))
            at = end
        return [*parts, ("prepare", at, self.end)] if self.end > at else parts


@dataclass
class _Run:
    """Steps one after the other, and whether Ctrl-C cut them short."""

    steps: list[_Step]
    interrupted: bool
    # Each submission of a step, and the one before it, whoever made that: idle time is counted from its end.
    pairs: list[tuple[Submission, Submission]] = field(default_factory=list)

    @property
    def wall_us(self) -> float:
        return sum(step.end - step.begin for step in self.steps) / 1e3 / len(self.steps)


def check(context: int, prompt: int, generated: int, depth: int) -> None:
    """Everything must fit the context. Writing tokens begins with one that is already there."""
    needed = max(depth + prompt, max(1, depth) + generated if generated else 0)
    if needed > context:
        raise InputError(f"{needed:,} positions are needed, the context holds {context:,}")


def profile(
    model: GpuRunner,
    prompt: int,
    generated: int,
    depth: int,
    repetitions: int,
    timestamp_us: float,
    say: Callable[[str], None],
    parallel: int = 1,
) -> Iterator[tuple[Phase, list[Event], bool]]:
    """Each phase as it is measured, with its trace, and whether it was interrupted; the last one then.

    One sequence reads the prompt; `parallel` sequences decode together.
    """
    check(model.config.context, prompt, generated, depth)
    if parallel > model.max_outputs:
        raise InputError(f"{parallel} sequences, and a step samples at most {model.max_outputs}")
    sequences: list[KvSequence] = []
    try:
        sequences += (model.add() for _ in range(parallel if generated else 1))
        prefill = partial(_run_prefill, model, sequences[0], depth, prompt, repetitions)
        decode = partial(_run_decode, model, sequences, depth, generated)
        if depth:
            say("filling the cache")
            for sequence in sequences:
                model.feed(sequence, _random(model, depth))
        for work, count in (
            (_PhaseWork("prefill", model, prompt, depth, prefill), prompt),
            (_PhaseWork("decode", model, parallel, depth, decode), generated),
        ):
            if count:
                measured = _measure(work, timestamp_us, say)
                if measured is not None:
                    yield measured
                if measured is None or measured[2]:
                    return
    finally:
        for sequence in sequences:
            model.free(sequence)


def _random(model: Runner, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, model.config.vocabulary, count).tolist()
    return ids


@dataclass(frozen=True)
class _PhaseWork:
    """What a phase does: `run` adds its steps to a list."""

    name: Literal["prefill", "decode"]
    model: GpuRunner
    rows: int
    depth: int
    run: Callable[[list[_Step]], None]


def _run(work: _PhaseWork) -> _Run:
    steps: list[_Step] = []
    try:
        work.run(steps)
    except KeyboardInterrupt:
        return _Run(steps, True)
    return _Run(steps, False)


def _run_prefill(
    model: Runner, sequence: KvSequence, depth: int, prompt: int, repetitions: int, steps: list[_Step]
) -> None:
    """A prompt again and again at the same depth, each waited for."""
    ids = _random(model, prompt)

    _rewind(model, sequence, depth)
    model.feed(sequence, ids[:1], "token").wait()  # from here on the GPU waits for the first step
    for _ in range(repetitions):
        begin = _rewind(model, sequence, depth)
        result = model.feed(sequence, ids, "token")
        waiting = time.perf_counter_ns()
        result.wait()
        end = time.perf_counter_ns()
        steps.append(_Step(begin, [], [(waiting, end)], end))


def _rewind(model: Runner, sequence: KvSequence, depth: int) -> int:
    """Back to so many tokens; when the next step begins. Tokens of states, which cannot be cut back, run before it."""
    begin = time.perf_counter_ns()
    left = model.truncate(sequence, depth)
    if left < depth:
        model.feed(sequence, _random(model, depth - left)).wait()
        begin = time.perf_counter_ns()
    return begin


def _run_decode(model: Runner, sequences: Sequence[KvSequence], depth: int, count: int, steps: list[_Step]) -> None:
    """Tokens of each sequence one after the other, as many steps under way as in `generate`.

    The last wait belongs to the last step. A step before the first makes whatever is made once: the pool of command
    buffers, for each kind of tracing.
    """
    for sequence in sequences:
        _rewind(model, sequence, max(0, depth - 1))
        model.feed(sequence, [1], "token").wait()
    pending = deque[Tokens]()
    with closing(model.decode_batch(sequences, [GREEDY] * len(sequences))) as batch:
        batch.step().wait()
        for sequence in sequences:
            _rewind(model, sequence, sequence.length - 1)
        for _ in range(count):
            begin = time.perf_counter_ns()
            pending.append(batch.step())
            waiting = end = time.perf_counter_ns()
            if len(pending) > model.steps_ahead:
                pending.popleft().wait()
                end = time.perf_counter_ns()
            steps.append(_Step(begin, [], [(waiting, end)], end))
        while pending:
            pending.popleft().wait()
        steps[-1].end = time.perf_counter_ns()
        steps[-1].waits.append((end, steps[-1].end))


def _measure(
    work: _PhaseWork, timestamp_us: float, say: Callable[[str], None]
) -> tuple[Phase, list[Event], bool] | None:
    """None if Ctrl-C left nothing to report."""
    device = work.model.device
    say(f"{work.name}: warming up")
    warm = time.perf_counter() + device.caps.policy.warm_up_seconds
    while True:
        if _run(work).interrupted:
            return None
        if time.perf_counter() > warm:
            break
    runs: list[_Run] = []
    grains: dict[Grain, str] = {"host": "wall time", "submission": "GPU time", "dispatch": "dispatches"}
    for grain, words in grains.items():
        say(f"{work.name}: {words}")
        with device.traced(grain) as tracer:
            runs.append(_run(work))
        _assign(runs[-1], tracer.collect())
        if runs[-1].interrupted:
            break
    plain, coarse, fine = ([run if run.steps else None for run in runs] + [None] * 3)[:3]
    if plain is None:
        return None
    busy, idle = _busy_and_idle(coarse) if coarse and device.clock != WALL else (None, None)
    dispatches = _dispatches(work, fine) if fine else ()
    timestamped = sum(timed.us for timed in dispatches) if dispatches else None
    dispatches, scale = _without_timestamps(dispatches, timestamp_us, busy)
    phase = Phase(
        name=work.name,
        rows=work.rows,
        depth=work.depth,
        steps=len(plain.steps),
        wall_us=plain.wall_us,
        traced_wall_us=coarse.wall_us if coarse else None,
        gpu_us=busy,
        gap_us=idle,
        timestamped_us=timestamped,
        scale=scale,
        host_us=_host(plain),
        ahead_us=_ahead(plain),
        dispatches=dispatches,
        timeline=_timeline(coarse, device.clock) if coarse else (),
    )
    return phase, _events(fine, dispatches, device.clock) if fine else [], runs[-1].interrupted


def _without_timestamps(
    dispatches: tuple[Timed, ...], timestamp_us: float, busy: float | None
) -> tuple[tuple[Timed, ...], float]:
    """Dispatches as they are without timestamps, and by how much they were scaled for that."""
    if busy is None or not dispatches:
        return dispatches, 1.0
    # Something must remain of a dispatch that happened to be shorter than a timestamp takes.
    remaining = [max(timed.us - timestamp_us, timed.us / 20) for timed in dispatches]
    scale = busy / (sum(remaining) or 1)
    return tuple(replace(timed, us=us * scale) for timed, us in zip(dispatches, remaining, strict=True)), scale


def _assign(run: _Run, seen: Sequence[Submission]) -> None:
    """Submissions to the step in which they were made; those that led up to a step belong to none."""
    previous = None
    for submission in seen:
        begin = next(iter(submission.host.values()))[0]
        owner = next((step for step in run.steps if step.begin <= begin <= step.end), None)
        if owner is not None:
            assert previous is not None, "a run begins with a submission that no step owns"
            owner.submissions.append(submission)
            run.pairs.append((previous, submission))
        previous = submission


def _busy_and_idle(run: _Run) -> tuple[float, float]:
    """Microseconds per step within submissions, and from the end of each to the begin of the next."""
    ends = np.array([(*before.ends, *own.ends) for before, own in run.pairs])
    busy, idle = ends[:, 3] - ends[:, 2], ends[:, 2] - ends[:, 1]
    return float(busy.sum()) / 1e3 / len(run.steps), float(idle.sum()) / 1e3 / len(run.steps)


def _host(run: _Run) -> dict[str, float]:
    """Microseconds per step, of everything that a step consists of: it is recorded, or taken from what is recorded."""
    total = dict.fromkeys(("prepare", "take", "encode", "finish", "submit", "wait"), 0.0)
    seen = {"prepare", "wait"}
    for step in run.steps:
        for name, begin, end in step.host():
            total[name] += (end - begin) / 1e3 / len(run.steps)
            seen.add(name)
    return {name: us for name, us in total.items() if name in seen}


def _ahead(run: _Run) -> dict[str, float]:
    total: dict[str, float] = {}
    for submission in (s for step in run.steps for s in step.submissions):
        for name, (begin, end) in submission.ahead.items():
            total[name] = total.get(name, 0.0) + (end - begin) / 1e3 / len(run.steps)
    return total


def _programs(step: _Step) -> list[Program]:
    return [bound.program for submission in step.submissions for bound in submission.programs]


def _alike(run: _Run) -> list[_Step]:
    """The steps that run what the middle one runs: a longer context may take other kernels."""
    programs = _programs(run.steps[len(run.steps) // 2])
    return [step for step in run.steps if _programs(step) == programs]


def _dispatches(work: _PhaseWork, run: _Run) -> tuple[Timed, ...]:
    steps = _alike(run)
    times = np.array([np.concatenate([np.diff(s.ends) for s in step.submissions]) for step in steps])
    means = iter((times.mean(0) / 1e3).tolist())
    position = work.depth + (len(run.steps) // 2 if work.name == "decode" else 0)
    dispatches = []
    for program in _programs(steps[0]):
        plan, rows, launches = work.model.launches(program)
        for launch in launches:
            nbytes, operations = launch.work(position)
            dispatches.append(
                Timed(
                    layer=launch.layer,
                    op=label(launch.op, launch.dims),
                    route=launch.route,
                    kernel=launch.step.label,
                    workgroups=math.prod(launch.step.grid),
                    operands=tuple(dict.fromkeys(launch.buffers)),
                    us=next(means),
                    bytes=nbytes,
                    flops=operations,
                    matrix_units=uses_matrix_units(launch.step),
                )
            )
        position += rows if plan == "prefill" else 0
    return tuple(dispatches)


def _offset(run: _Run, clock: str) -> float:
    """What to add to the GPU's clock to get the host's: no submission ran before it was submitted."""
    if clock == WALL:
        return 0.0
    submissions = [s for step in run.steps for s in step.submissions if s.ends.size]
    return max((s.host["submit"][0] - float(s.ends[0]) for s in submissions), default=0.0)


def _timeline(run: _Run, clock: str) -> tuple[dict[str, Any], ...]:
    """Some steps from the middle of the run."""
    first = max(0, (len(run.steps) - SHOWN_STEPS) // 2)
    shown = run.steps[first : first + SHOWN_STEPS]
    offset, zero = _offset(run, clock), shown[0].begin

    def us(nanoseconds: float) -> float:
        return (nanoseconds - zero) / 1e3

    timeline = []
    for step in shown:
        ends = [s.ends + offset for s in step.submissions if s.ends.size]
        gpu = [us(float(ends[0][0])), us(float(ends[-1][-1]))] if ends else None
        timeline.append({"host": [[name, us(begin), us(end)] for name, begin, end in step.host()], "gpu": gpu})
    return tuple(timeline)


def _events(run: _Run, dispatches: Sequence[Timed], clock: str) -> list[Event]:
    offset, zero = _offset(run, clock), run.steps[0].begin
    events = []
    for step in _alike(run):
        for name, begin, end in step.host():
            events.append(Event("host", name, (begin - zero) / 1e3, (end - begin) / 1e3, {}))
        ends = [(s.ends + offset - zero) / 1e3 for s in step.submissions]
        spans = [span for times in ends for span in zip(times[:-1].tolist(), times[1:].tolist(), strict=True)]
        for timed, (begin, end) in zip(dispatches, spans, strict=True):
            details = {key: getattr(timed, key) for key in ("layer", "op", "route", "workgroups", "bytes", "flops")}
            events.append(Event("GPU", timed.kernel, begin, end - begin, details))
    return events
