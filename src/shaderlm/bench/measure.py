"""Times what `bench kernels` compares: pieces of work that consist of several routed ops, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..bench.comparisons import Comparison, Part
from ..compile import lower
from ..compile.timing import (
    Clock,
    Filler,
    Operands,
    Sets,
    calls_for,
    inputs_of,
    queue_of,
    sample_in_turns,
    sets_for,
)
from ..errors import DeviceError, RouteError
from ..gpu import Device, Program
from ..graph import resolve
from ..kernels import choose

SAMPLE_SECONDS = 0.02  # queued work per sample
COPY_BYTES = 256 << 20
SAMPLES = 5
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


def _bound(device: Device, parts: tuple[Part, ...], fill: Filler) -> tuple[Sets, Operands]:
    """The programs of a piece of work over several sets of inputs, and their buffers."""
    programs: list[tuple[Part, Program, frozenset[str]]] = []
    streamed = 0
    for part in parts:
        route = choose(part.op, part.dims, device.caps, part.route)
        program = lower(route, part.dims, device.caps, {})
        if part.only:
            kept = tuple(step for step in program.steps if step.label.startswith(part.only))
            program = replace(program, steps=kept)
        used = {slot.buffer for step in program.steps for slot in step.slots}
        program = replace(program, buffers={n: c for n, c in program.buffers.items() if n in used})
        inputs = inputs_of(part.op, program) - set(part.alias)
        streamed += sum(size for n in inputs if isinstance(size := program.buffers[n], int))
        programs.append((part, program, inputs))
    operands = Operands(device, fill, sets_for(device, streamed))
    try:
        bound = []
        for i, (part, program, inputs) in enumerate(programs):
            keys = {name: part.alias.get(name, f"{i}.{name}") for name in program.buffers}
            bound.append(operands.bind(program, part.dims, inputs, keys))
    except BaseException:
        operands.close()
        raise
    return [list(each) for each in zip(*bound, strict=True)], operands


def time_in_turns(clock: Clock, works: Sequence[tuple[Part, ...]], fill: Filler) -> list[float]:
    """Median seconds per call of pieces of work, sampled in turns."""
    software = clock.device.caps.software
    loaded: list[tuple[Sets, int]] = []
    owned: list[Operands] = []
    try:
        for parts in works:
            sets, operands = _bound(clock.device, parts, fill)
            owned.append(operands)
            guess = clock(queue_of(sets, 2)) / 2  # also touches everything
            if not software:
                guess = clock(queue_of(sets, 4)) / 4
            loaded.append((sets, 2 if software else calls_for(sets, guess, SAMPLE_SECONDS, 2)))
        return sample_in_turns(clock, loaded, 3 if software else SAMPLES)
    finally:
        for operands in owned:
            operands.close()


def copy_bandwidth(clock: Clock, fill: Filler) -> float:
    """Bytes read and written per second by the copy kernel on buffers far larger than a cache."""
    caps = clock.device.caps
    count = (4 << 20 if caps.software else min(caps.max_operand, COPY_BYTES)) // 16 * 4
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
    clock = Clock(device)
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
