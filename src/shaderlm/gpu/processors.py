"""How many processors a GPU has: WebGPU does not tell. A processor runs workgroups: NVIDIA's SM, AMD's CU, Intel's Xe
core, a core of Apple's GPUs.

Those of a GPU that `processor_table` does not name are counted once, by timing: workgroups that keep a processor busy
take as long as one of them, as long as each has a processor of its own. The count is kept on disk; where it cannot be
kept, nothing is counted, so that no start pays for it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DeviceError, KernelError, ModelError
from . import probe_cache
from .program import Program, RunsPrograms, Slot, Step

if TYPE_CHECKING:
    from .caps import DeviceCaps

_log = logging.getLogger("shaderlm")

# Eight sums of each thread, which do not wait for each other: 256 threads leave a processor no time for others.
_SOURCE = """
@group(0) @binding(0) var<storage, read> rounds: array<u32>;
@group(0) @binding(1) var<storage, read_write> sums: array<f32>;
@compute @workgroup_size({threads})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    let factor = vec4<f32>(1.0 - f32(lane) * 0.001);
    let more = vec4<f32>(0.5);
    var a = vec4<f32>(1.0, 2.0, 3.0, 4.0);
    var b = vec4<f32>(5.0, 6.0, 7.0, 8.0);
    let count = rounds[0];
    for (var i = 0u; i < count; i = i + 1u) {{
{body}    }}
    if (lane == 0u) {{
        sums[group.x] = a.x + b.x;
    }}
}}
"""
_BODY = "        a = fma(a, factor, more);\n        b = fma(b, factor, more);\n" * 8  # more than the loop takes
_THREADS = 256
_MOST = 1024  # processors: no GPU has more
_LEAST_SECONDS = 0.005  # of one workgroup: far more than a submission and a read-back take
_MOST_ROUNDS = 1 << 24
FORMAT = 1
_PROBE = "processors"


def with_counted_processors(device: RunsPrograms, whole: bool = True) -> DeviceCaps:
    """A device's capabilities with its processors: from the table, from disk, or counted now and kept.

    Not counted where it is not the `whole` device: where features are off, or limits lowered.
    """
    caps = device.caps
    if caps.software:
        return caps
    count = known_processors(caps)
    if count is None and whole:
        try:
            count = _counted(device)
        except (OSError, ModelError, DeviceError, KernelError) as problem:
            _log.info("the processors of %s were not counted (%s)", caps.name, problem)
    return replace(caps, processors=count or 0)


def _counted(device: RunsPrograms) -> int:
    """Count them and keep the count. If it cannot be kept, there is none; one that fails is not tried again."""
    probe_cache.write(device.caps, _PROBE, FORMAT, 0)
    try:
        count = probe(device)
    except BaseException as problem:
        if not isinstance(problem, Exception):  # Ctrl-C: the next start counts
            probe_cache.remove(device.caps, _PROBE)
        raise
    probe_cache.write(device.caps, _PROBE, FORMAT, count)
    return count


def known_processors(caps: DeviceCaps) -> int | None:
    """From the table, or as they were counted with this driver; 0 if that failed, None if it was not tried."""
    if caps.processors or caps.software:
        return caps.processors
    count = probe_cache.read(caps, _PROBE, FORMAT)
    return count if type(count) is int and 0 <= count <= _MOST else None


def probe(device: RunsPrograms) -> int:
    """Count the processors of a device, by the wall clock; 0 if times say nothing. Takes two or three seconds."""
    _seconds(device, 1, 1)  # compiles
    rounds = _rounds(device)
    end = time.perf_counter() + device.caps.policy.warm_up_seconds
    while time.perf_counter() < end:  # clocks are low after idling
        _seconds(device, _MOST, max(1, rounds >> 7))
    rounds = _rounds(device)
    first, second = (count_by(lambda workgroups: _least_seconds(device, workgroups, rounds)) for _ in range(2))
    return first if abs(first - second) <= 0.1 * first else 0  # something else ran beside it


def _rounds(device: RunsPrograms) -> int:
    """For which one workgroup takes long enough."""
    rounds = 1 << 6
    while _least_seconds(device, 1, rounds) < _LEAST_SECONDS and rounds < _MOST_ROUNDS:
        rounds *= 2
    return rounds


def count_by(seconds: Callable[[int], float]) -> int:
    """The most workgroups that take less than one and a half times as long as one; 0 if any number does."""
    limit = 1.5 * seconds(1)
    fitting, over = 1, 2
    while seconds(over) < limit:
        fitting, over = over, 2 * over
        if over > 2 * _MOST:
            return 0
    while over - fitting > 1:
        middle = (fitting + over) // 2
        if seconds(middle) < limit:
            fitting = middle
        else:
            over = middle
    return fitting if fitting <= _MOST else 0


def _least_seconds(device: RunsPrograms, workgroups: int, rounds: int) -> float:
    return min(_seconds(device, workgroups, rounds) for _ in range(3))


def _seconds(device: RunsPrograms, workgroups: int, rounds: int) -> float:
    began = time.perf_counter()
    device.run(program(workgroups, rounds, min(_THREADS, device.caps.max_invocations)))
    return time.perf_counter() - began


def program(workgroups: int, rounds: int, threads: int = _THREADS) -> Program:
    """So many workgroups that compute for so many rounds, and a sum of each."""
    slots = (Slot("rounds", "read-only-storage"), Slot("sums", "storage"))
    step = Step("processors", _SOURCE.format(threads=threads, body=_BODY), slots, (workgroups, 1, 1))
    return Program({"rounds": np.array([rounds], np.uint32), "sums": 4 * workgroups}, (step,), ("sums",))
