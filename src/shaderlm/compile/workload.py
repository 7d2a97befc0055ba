"""Times workloads: a few routed ops that run one after the other, over rotating inputs, in turns with others.

What `bench kernels` compares and the roofs of `profile` are measured here. Knows no models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

from ..gpu import Device, DeviceCaps, Program
from ..graph import resolve
from ..kernels import choose
from .execute import lower
from .timing import Clock, Filler, Operands, Sets, inputs_of, sets_for, time_sets

SAMPLE_SECONDS = 0.02  # queued work per sample
SAMPLES = 5
COPY_BYTES = 256 << 20
SHORT_COPY_BYTES = 4 << 20
SOFTWARE_WARNING = (
    "This is a software adapter: it computes on the CPU. The numbers are right, but their times and ratios say "
    "nothing about GPUs."
)


@dataclass(frozen=True)
class RoutedOp:
    """One op of a workload. `alias` renames buffers, so that ops can hand results on."""

    op: str
    route: str
    dims: Mapping[str, Any]
    alias: Mapping[str, str] = field(default_factory=dict)
    only: str = ""  # time just the dispatches of kernels whose name starts so


Workload = tuple[RoutedOp, ...]


def time_in_turns(clock: Clock, workloads: Sequence[Workload], fill: Filler) -> list[float]:
    """Median seconds per call of workloads, sampled in turns."""
    with ExitStack() as buffers:
        bound = [_bind(clock.device, workload, fill, buffers) for workload in workloads]
        return time_sets(clock, bound, SAMPLE_SECONDS, SAMPLES)


def copy_bandwidth(clock: Clock, fill: Filler) -> float:
    """Bytes read and written per second by the copy kernel on buffers far larger than a cache."""
    caps = clock.device.caps
    count = (SHORT_COPY_BYTES if caps.policy.short_measurements else min(caps.max_operand, COPY_BYTES)) // 16 * 4
    (seconds,) = time_in_turns(clock, [(RoutedOp("copy", "vec4", resolve("copy", {"count": count})),)], fill)
    return 2 * 4 * count / seconds


def program_of(routed: RoutedOp, caps: DeviceCaps) -> Program:
    """What is timed of an op on a device. A RouteError where its route does not apply."""
    program = lower(choose(routed.op, routed.dims, caps, routed.route), routed.dims, caps, {})
    steps = tuple(step for step in program.steps if step.label.startswith(routed.only))
    used = {slot.buffer for step in steps for slot in step.slots}
    return replace(program, steps=steps, buffers={n: c for n, c in program.buffers.items() if n in used})


def _bind(device: Device, workload: Workload, fill: Filler, buffers: ExitStack) -> Sets:
    """The programs of a workload over several sets of inputs, which live as long as `buffers`."""
    programs: list[tuple[RoutedOp, Program, frozenset[str]]] = []
    streamed = 0
    for routed in workload:
        program = program_of(routed, device.caps)
        inputs = inputs_of(routed.op, program) - set(routed.alias)
        streamed += sum(size for n in inputs if isinstance(size := program.buffers[n], int))
        programs.append((routed, program, inputs))
    operands = buffers.enter_context(closing(Operands(device, fill, sets_for(device, streamed))))
    bound = []
    for i, (routed, program, inputs) in enumerate(programs):
        keys = {name: routed.alias.get(name, f"{i}.{name}") for name in program.buffers}
        bound.append(operands.bind(program, routed.dims, inputs, keys))
    return [list(each) for each in zip(*bound, strict=True)]
