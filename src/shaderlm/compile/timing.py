"""Times programs on a device: inputs that rotate, a GPU that is kept warm, medians. Knows no models and no routes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..gpu import Array, BoundProgram, Copy, Device, Program
from ..graph import OPS, resolve
from ..graph.batch import contiguous_batch
from ..graph.cost import CACHES
from ..graph.sampling import OUTPUT
from ..kernels import Dims, choose
from .execute import lower

ROTATE_BYTES = 256 << 20  # more than any GPU's cache, so that weights come from memory
MAX_SETS = 64  # small operands, which are in a cache in a model too, rotate through less
COPIED_BYTES = 1 << 20  # from here on, contents come from the first set instead of from the host again
# A GPU clocks low when idle (an H200: 345 instead of 1,980 MHz) and takes its time to rise: each sample follows
# on copies that keep the GPU busy this long, in the same submission.
WARM_UP_SECONDS = 0.03
WARM_UP_BYTES = 64 << 20  # copied at a time
FIRST_SECONDS = 0.36  # of that before the first sample
SAMPLED = (0.8, 40, 0.95, 0.05)  # temperature, top_k, top_p and min_p: every limit has work to do
SHORT_ROUNDS = 3  # of samples on a software adapter
MAX_DISPATCHES = 3000  # per sample: recording one costs the host about 10 µs

Sets = list[list[BoundProgram]]  # programs that run one after the other, over each set of operands


class Filler:
    """Random contents for buffers: bits for weights, usual settings for samplers, small finite numbers elsewhere."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(7)

    @cached_property
    def _random_bytes(self) -> Array:
        return self._generator.integers(0, 256, 1 << 24, np.uint8)

    @cached_property
    def _floats(self) -> Array:
        return self._generator.standard_normal(1 << 20, np.float32).view(np.uint8)

    @cached_property
    def _small_f16(self) -> Array:
        return (self._generator.random(1 << 20, np.float32) * 0.01 + 0.001).astype(np.float16).view(np.uint8)

    def __call__(self, name: str, nbytes: int, dims: Dims) -> Array:
        """Contents for a buffer of this name."""
        kind = name.split(".")[0]
        if kind == "batch":
            rows = nbytes // 16 - 1
            return contiguous_batch(max(0, dims.get("keys", 0) - rows), rows).reshape(-1).view(np.uint8)
        if kind == "outputs":
            records = [(row, row, *SAMPLED, row, 0) for row in range(nbytes // OUTPUT.itemsize)]
            return np.array(records, OUTPUT).view(np.uint8)
        if kind == "ids" and "experts" in dims:  # every row chooses different experts
            experts = np.tile(np.arange(dims["experts"], dtype=np.uint32), (dims["tokens"], 1))
            chosen = self._generator.permuted(experts, axis=1)[:, : dims["used"]]
            return np.ascontiguousarray(chosen).reshape(-1).view(np.uint8)
        if kind == "weight" and "K" in dims:
            return np.resize(self._random_bytes, nbytes)
        is_f16 = (
            dims.get("scales", "f16") == "f16" if kind == "scales" else kind in CACHES and dims.get("cache") == "f16"
        )
        return np.resize(self._small_f16 if is_f16 else self._floats, nbytes)


def inputs_of(op: str, program: Program) -> frozenset[str]:
    """The buffers of a program that hold inputs of its op; scales belong to the weight."""
    known = {*OPS[op].inputs, "scales"}
    return frozenset(name for name in program.buffers if name.split(".")[0] in known)


def sets_for(device: Device, streamed: int, most: int = MAX_SETS) -> int:
    """How many sets of operands of this many bytes are more than a cache holds."""
    return 2 if device.caps.policy.short_measurements else min(most, max(2, -(-ROTATE_BYTES // max(1, streamed))))


class Operands:
    """Buffers for programs: inputs once per set, everything else once. Close them to give the memory back.

    Results are shared between the sets: each call then waits for the one before, as in a model.
    """

    def __init__(self, device: Device, fill: Filler, count: int) -> None:
        self._device, self._fill, self._count = device, fill, count
        self._buffers: dict[tuple[int, str], Any] = {}

    def bind(
        self, program: Program, dims: Dims, inputs: frozenset[str], keys: Mapping[str, str] | None = None
    ) -> list[BoundProgram]:
        """The program over each set. Programs share buffers that have the same key (default: the buffer's name)."""
        programs = []
        for i in range(self._count):
            buffers = {}
            for name, contents in program.buffers.items():
                key = keys.get(name, name) if keys else name
                buffers[name] = self._buffer(i if name in inputs else 0, key, name, contents, dims)
            programs.append(self._device.bind(program, buffers))
        return programs

    def _buffer(self, i: int, key: str, name: str, contents: Array | int, dims: Dims) -> Any:
        if (i, key) not in self._buffers:
            nbytes = contents if isinstance(contents, int) else contents.nbytes
            if i and nbytes >= COPIED_BYTES:
                native = self._device.buffer(nbytes)
                self._device.copy(Copy(self._buffers[0, key], native, native.size))
            else:
                data = self._fill(name, contents, dims) if isinstance(contents, int) else contents
                native = self._device.buffer(data if nbytes else 16)
            self._buffers[i, key] = native
        return self._buffers[i, key]

    def close(self) -> None:
        """Free all buffers."""
        for native in self._buffers.values():
            native.destroy()
        self._buffers.clear()


class Clock:
    """Times queues of programs on a GPU that is kept warm. Close it to give its buffers back."""

    def __init__(
        self, device: Device, warm_up_seconds: float = WARM_UP_SECONDS, first_seconds: float = FIRST_SECONDS
    ) -> None:
        self.device = device
        self._time = device.time if device.caps.timestamps else device.time_wall
        self._warm_up_seconds = warm_up_seconds
        self._each = 1.0  # seconds of a copy, not known yet
        self._copy: BoundProgram | None = None
        self._warm_up: list[BoundProgram] = []
        if device.caps.policy.warm_up_seconds:
            dims = resolve("copy", {"count": min(WARM_UP_BYTES, device.caps.max_operand) // 4})
            self._copy = device.bind(lower(choose("copy", dims, device.caps, "vec4"), dims, device.caps, {}))
            self.warm(first_seconds)

    def warm(self, seconds: float) -> None:
        """Keep the GPU busy for about so long; the clocks have fallen if it was idle."""
        if self._copy is None:
            return
        each = self._each
        for _ in range(max(1, round(seconds / WARM_UP_SECONDS))):  # the copies get faster as the clocks rise
            count = int(min(MAX_DISPATCHES, 1 + min(seconds, WARM_UP_SECONDS) / each))
            each = max(1e-7, self._time([self._copy] * 2, [self._copy] * count) / 2)
        self._each = each
        self._warm_up = [self._copy] * int(min(MAX_DISPATCHES, 1 + self._warm_up_seconds / each))

    def __call__(self, queue: Sequence[BoundProgram]) -> float:
        """Seconds for the queue."""
        return self._time(queue, self._warm_up)

    def close(self) -> None:
        """Free the copies' buffers."""
        if self._copy is not None:
            self._copy.release()


def queue_of(sets: Sets, calls: int) -> list[BoundProgram]:
    """So many calls, each over the next set."""
    return [loaded for i in range(calls) for loaded in sets[i % len(sets)]]


def calls_for(sets: Sets, each: float, seconds: float, least: int) -> int:
    """How many calls of this many seconds each fill a sample."""
    steps = sum(len(loaded.program.steps) for loaded in sets[0])
    return max(least, int(min(MAX_DISPATCHES / steps, seconds / max(each, 1e-7))))


def sample_in_turns(clock: Clock, works: Sequence[tuple[Sets, int]], rounds: int) -> list[float]:
    """Median seconds per call of works (sets, calls per sample), sampled in turns so that all see the same clocks."""
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for (sets, calls), of_work in zip(works, samples, strict=True):
            of_work.append(clock(queue_of(sets, calls)) / calls)
    return [statistics.median(of_work) for of_work in samples]


def time_sets(clock: Clock, works: Sequence[Sets], seconds: float, rounds: int) -> list[float]:
    """Median seconds per call of works, in turns; a sample has calls for `seconds`. Both shorter in software."""
    if clock.device.caps.policy.short_measurements:
        for sets in works:
            clock(queue_of(sets, 2))  # touches everything
        return sample_in_turns(clock, [(sets, 2) for sets in works], SHORT_ROUNDS)
    sampled = []
    for sets in works:
        clock(queue_of(sets, 2))  # touches everything
        sampled.append((sets, calls_for(sets, clock(queue_of(sets, 4)) / 4, seconds, 2)))
    return sample_in_turns(clock, sampled, rounds)
