"""Times pieces of work on a device: rotating buffers, queued long enough for the clocks to rise, medians."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import DeviceError, RouteError
from ..gpu import Array, Device, Loaded, Program
from ..graph import OPS, resolve
from ..kernels import choose
from ..runtime import lower
from .comparisons import Comparison, Part

ROTATE_BYTES = 256 << 20  # more than any GPU's cache, so that weights come from memory
MOST_SETS = 64  # small operands, which are in a cache in a model too, rotate through less
SAMPLE_SECONDS = 0.02  # queued work per sample
# A GPU clocks low when idle (an H200: 345 instead of 1,980 MHz) and takes its time to rise: each sample follows
# on copies that keep the GPU busy this long, in the same submission.
HEAT_SECONDS = 0.03
HEAT_BYTES = 64 << 20  # copied at a time
FIRST_HEATS = 12  # rounds of that before the first sample
COPY_BYTES = 256 << 20
SAMPLES = 5
MOST_DISPATCHES = 3000  # per sample: recording one costs the host about 10 µs
# A software adapter is only asked for what it can do in about a second.
SOFTWARE_FLOPS = 200_000_000
SOFTWARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Row:
    """A measured comparison; times in seconds per call."""

    comparison: Comparison
    before: float
    after: float
    copy_bandwidth: float  # bytes per second

    @property
    def ratio(self) -> float:
        """How many times faster the new route is."""
        return self.before / self.after

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the new route, counting each byte once."""
        return self.comparison.nbytes / self.after

    @property
    def rate(self) -> float:
        """FLOP per second of the new route."""
        return self.comparison.flops / self.after


def too_large(comparison: Comparison) -> bool:
    """Beyond what a software adapter does in reasonable time."""
    return comparison.flops > SOFTWARE_FLOPS or comparison.nbytes > SOFTWARE_BYTES


class Filler:
    """Random contents for buffers: bits for weights, small finite numbers for everything else."""

    def __init__(self) -> None:
        generator = np.random.default_rng(7)
        self._bits = generator.integers(0, 256, 1 << 24, np.uint8)
        self._floats = generator.standard_normal(1 << 22).astype(np.float32)
        self._halves = (generator.random(1 << 22) * 0.01 + 0.001).astype(np.float16)

    def __call__(self, name: str, nbytes: int, dims: Any) -> Array:
        """Contents for a buffer of this name."""
        kind = name.split(".")[0]
        if kind == "positions":
            return np.arange(nbytes // 4, dtype=np.uint32) + np.uint32(dims["pos"])
        if kind == "weight" and "M" in dims:
            pool = self._bits
        elif kind == "scales" and dims.get("scales") == "f16":
            pool = self._halves.view(np.uint8)
        else:
            pool = self._floats.view(np.uint8)
        return np.resize(pool, nbytes)


def _load(device: Device, parts: tuple[Part, ...], fill: Filler) -> tuple[list[list[Loaded]], list[Any]]:
    """Sets of loaded programs over different inputs and the same results, and all their buffers.

    Results are shared between the sets: each call then waits for the one before, as in a model.
    """
    programs: list[tuple[Part, Program, set[str]]] = []
    streamed = 0
    for part in parts:
        route = choose(part.op, part.dims, device.facts, part.route)
        program = lower(route, part.dims, device.facts, {})
        if part.only:
            kept = tuple(step for step in program.steps if step.label.startswith(part.only))
            program = replace(program, steps=kept)
        used = {slot.buffer for step in program.steps for slot in step.slots}
        program = replace(program, buffers={n: c for n, c in program.buffers.items() if n in used})
        inputs = {n for n in used if n.split(".")[0] in OPS[part.op].inputs and n not in part.alias}
        streamed += sum(size for n in inputs if isinstance(size := program.buffers[n], int))
        programs.append((part, program, inputs))
    count = 2 if device.facts.software else min(MOST_SETS, max(2, -(-ROTATE_BYTES // max(1, streamed))))
    shared: dict[str, Any] = {}
    owned: list[Any] = []
    sets = []
    for _ in range(count):
        loaded = []
        for i, (part, program, inputs) in enumerate(programs):
            buffers = {}
            for name, contents in program.buffers.items():
                key = part.alias.get(name, f"{i}.{name}")
                if name in inputs or key not in shared:
                    data = contents if not isinstance(contents, int) else fill(name, contents, part.dims)
                    native = device.buffer(data if data.nbytes else 16)
                    owned.append(native)
                    if name not in inputs:
                        shared[key] = native
                buffers[name] = native if name in inputs else shared[key]
            loaded.append(device.load(program, buffers))
        sets.append(loaded)
    return sets, owned


class Clock:
    """Times queues of programs on a GPU that is kept warm. Close it to give its buffers back."""

    def __init__(self, device: Device, fill: Filler) -> None:
        self.device = device
        self._time = device.time if device.facts.timestamps else device.time_wall
        self._heat: list[Loaded] = []
        self._owned: list[Any] = []
        if not device.facts.software:
            part = Part("copy", "vec4", resolve("copy", {"count": HEAT_BYTES // 4}))
            sets, self._owned = _load(device, (part,), fill)
            for _ in range(FIRST_HEATS):  # the copies get faster as the clocks rise
                seconds = self._time(sets[0] * 2, self._heat) / 2
                self._heat = sets[0] * int(min(MOST_DISPATCHES, 1 + HEAT_SECONDS / max(seconds, 1e-7)))

    def __call__(self, queue: list[Loaded]) -> float:
        """Seconds for the queue."""
        return self._time(queue, self._heat)

    def close(self) -> None:
        """Free the copies' buffers."""
        for native in self._owned:
            native.destroy()


def _queue(sets: list[list[Loaded]], calls: int) -> list[Loaded]:
    return [loaded for i in range(calls) for loaded in sets[i % len(sets)]]


def time_in_turns(clock: Clock, works: Sequence[tuple[Part, ...]], fill: Filler) -> list[float]:
    """Median seconds per call of pieces of work, sampled in turns so that all see the same clocks."""
    device = clock.device
    loaded: list[tuple[list[list[Loaded]], int]] = []
    owned: list[Any] = []
    try:
        for parts in works:
            sets, buffers = _load(device, parts, fill)
            owned += buffers
            guess = clock(_queue(sets, 2)) / 2  # also compiles and touches everything
            guess = clock(_queue(sets, 4)) / 4 if not device.facts.software else guess
            steps = sum(len(program.steps) for program in sets[0])
            calls = int(min(MOST_DISPATCHES / steps, max(2, SAMPLE_SECONDS / max(guess, 1e-7))))
            loaded.append((sets, 2 if device.facts.software else max(2, calls)))
        samples: list[list[float]] = [[] for _ in works]
        for _ in range(3 if device.facts.software else SAMPLES):
            for (sets, calls), kept in zip(loaded, samples, strict=True):
                kept.append(clock(_queue(sets, calls)) / calls)
        return [statistics.median(kept) for kept in samples]
    finally:
        for native in owned:
            native.destroy()


def copy_bandwidth(clock: Clock, fill: Filler) -> float:
    """Bytes read and written per second by the copy kernel on buffers far larger than a cache."""
    facts = clock.device.facts
    count = (4 << 20 if facts.software else min(facts.max_operand, COPY_BYTES)) // 16 * 4
    part = (Part("copy", "vec4", resolve("copy", {"count": count})),)
    (seconds,) = time_in_turns(clock, [part], fill)
    return 2 * 4 * count / seconds


@dataclass(frozen=True)
class LeftOut:
    """A comparison that this device cannot make, and why."""

    comparison: Comparison
    reason: str


def measure(device: Device, chosen: list[Comparison]) -> Iterator[Row | LeftOut]:
    """Each comparison as it is measured; one that does not fit the device is left out with its reason."""
    fill = Filler()
    clock = Clock(device, fill)
    try:
        bandwidth = copy_bandwidth(clock, fill)
        for comparison in chosen:
            try:
                before, after = time_in_turns(clock, [comparison.before, comparison.after], fill)
            except (RouteError, DeviceError) as problem:
                yield LeftOut(comparison, str(problem))
            else:
                yield Row(comparison, before, after, bandwidth)
    finally:
        clock.close()
