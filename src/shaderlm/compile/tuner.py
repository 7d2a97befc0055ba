"""Measures which route and config is the fastest for each matmul of a step: thoroughly, or within a budget."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from ..errors import KernelError
from ..gpu import Device, DeviceCaps, Program
from ..graph import OPS, resolve
from ..graph.graph import Graph, Node
from ..kernels import Dims, LaunchList, Option, choose, options
from .execute import lower
from .timing import Clock, Filler, Operands, Sets, calls_for, inputs_of, queue_of, sample_in_turns, sets_for
from .tuning import Entry, Tuning, key_of, read, save

BUDGET_SECONDS = 2.0  # of a load that measures, with compiling
LEAST_GAIN = 0.03  # below that the built-in choice stays: noise must not change plans
HOPELESS = 1.5  # times the best at a first look
_SAMPLING_SECONDS = 0.1  # set aside for the last rounds of a shape
_TUNED = ("linear", "linear_experts")
_log = logging.getLogger("shaderlm")
_now = time.perf_counter


@dataclass(frozen=True)
class Effort:
    """How long is looked: seconds of queued work per candidate, at first and per sample of those that are left."""

    look_seconds: float
    sample_seconds: float
    rounds: int
    finalists: int
    sets: int
    first_seconds: float  # the GPU is warmed up for so long at the beginning,
    warm_seconds: float  # so long before the candidates of a shape, which took their time to compile,
    warm_up_seconds: float  # and so long before each sample


THOROUGH = Effort(0.002, 0.005, 9, 12, 64, 0.36, 0.1, 0.004)
QUICK = Effort(0.0008, 0.0015, 3, 4, 32, 0.1, 0.015, 0.001)


def product_of(node: Node) -> Node:
    """The product of a fused op, which runs by itself in longer contexts; others as they are."""
    if node.op != "rms_norm_rope_attention_linear":
        return node
    dims = {name: node.dims[name] for name in ("tokens", "K", "N", "format", "bias", "epilogue")}
    return Node("linear", resolve("linear", dims), node.inputs, node.outputs, node.layer)


def tunable(node: Node, caps: DeviceCaps, precision: str) -> bool:
    """A matmul of one row, what a decode step spends its time with; of many, if a route has several configs for it."""
    if node.op not in _TUNED:
        return False
    dims = node.dims
    return dims["tokens"] == 1 or any(option.config for option in options(node.op, dims, caps, precision))


def shapes_of(graphs: Sequence[Graph], caps: DeviceCaps, precision: str) -> list[Node]:
    """One node of each shape that is worth tuning, those first whose weights are the most bytes of a step."""
    nodes = [product_of(node) for graph in graphs for node in graph.nodes]
    keyed = [(key_of(node.op, node.dims), node) for node in nodes if node.op in _TUNED]
    counts = Counter(key for key, _ in keyed)
    first = dict(reversed(keyed))

    def nbytes(node: Node) -> int:
        launch_list = choose(node.op, node.dims, caps, None, precision).launch_list(node.dims, caps)
        return _weight_bytes(node.op, node.dims, launch_list)

    shapes = [(key, node) for key, node in first.items() if tunable(node, caps, precision)]
    return [node for _, node in sorted(shapes, key=lambda each: -counts[each[0]] * nbytes(each[1]))]


def _weight_bytes(op: str, dims: Dims, launch_list: LaunchList) -> int:
    """What is read of the weight: of experts, those that are chosen."""
    whole = sum(size for name, size in launch_list.buffers.items() if _is_weight(name))
    return int(whole * OPS[op].part("weight", dims, 0))


def _is_weight(buffer: str) -> bool:
    return buffer.startswith(("weight", "scales"))


class Tuner:
    """Times the candidates of shapes on a device. Close it to give its memory back."""

    def __init__(self, device: Device, precision: str, effort: Effort = THOROUGH, seconds: float | None = None) -> None:
        self._device, self._precision, self._effort = device, precision, effort
        self._end = None if seconds is None else _now() + seconds
        self._longest = 0.0  # of a batch so far
        self._fill = Filler()
        self._clock = Clock(device, effort.warm_up_seconds, effort.first_seconds)

    def tune(self, op: str, dims: Dims) -> Entry | None:
        """The entry of a shape, or None if there was no time for it."""
        if self._late():
            return None
        candidates = options(op, dims, self._device.caps, self._precision)
        built_in, streamed = candidates[0].name, _weight_bytes(op, dims, candidates[0].launch_list)
        count = sets_for(self._device, streamed, self._effort.sets)
        with closing(Operands(self._device, self._fill, count)) as operands:
            bound, looks, calls = self._look(op, dims, candidates, operands)
            if built_in not in looks or not all(seconds > 0 for seconds in looks.values()):
                return None  # no time, or a clock that cannot be trusted
            best = min(looks.values())
            fast = sorted((name for name in looks if looks[name] <= HOPELESS * best), key=lambda name: looks[name])
            finalists = list(dict.fromkeys([built_in, *fast[: self._effort.finalists]]))
            times = sample_in_turns(self._clock, [(bound[name], calls) for name in finalists], self._effort.rounds)
        if not all(seconds > 0 for seconds in times):
            return None
        final = dict(zip(finalists, times, strict=True))
        winner = min(finalists, key=lambda name: final[name])
        if final[winner] > (1 - LEAST_GAIN) * final[built_in]:
            winner = built_in
        microseconds = {name: seconds * 1e6 for name, seconds in (looks | final).items()}
        return Entry(winner, built_in, microseconds, self._effort is THOROUGH)

    def close(self) -> None:
        """Free all buffers."""
        self._clock.close()

    def _look(
        self, op: str, dims: Dims, candidates: Sequence[Option], operands: Operands
    ) -> tuple[dict[str, Sets], dict[str, float], int]:
        """Each candidate over all operands, seconds per call at a first look, and the calls of a sample."""
        device, effort = self._device, self._effort
        bound: dict[str, Sets] = {}
        looks: dict[str, float] = {}
        calls, sampled = 1, 1
        least = 1 if device.caps.policy.short_measurements else 2
        for batch in self._batches(candidates):
            programs = self._compiled({option.name: _program(option, dims, device.caps) for option in batch})
            self._clock.warm(effort.warm_seconds)
            for name, program in programs.items():
                inputs = inputs_of(op, program)
                keys = {buffer: f"{name} {buffer}" for buffer in program.buffers if buffer not in inputs}
                # Each set chooses other experts of one weight.
                rotated = frozenset(key for key in inputs if op != "linear_experts" or not _is_weight(key))
                bound[name] = sets = [[loaded] for loaded in operands.bind(program, dims, rotated, keys)]
                if not looks:  # the built-in choice says how many calls make a sample
                    self._clock(queue_of(sets, least))  # also touches everything
                    guess = self._clock(queue_of(sets, 2 * least)) / (2 * least)
                    calls = calls_for(sets, guess, effort.look_seconds, least)
                    sampled = calls_for(sets, guess, effort.sample_seconds, least)
                looks[name] = self._clock(queue_of(sets, calls)) / calls
        return bound, looks, sampled

    def _compiled(self, programs: dict[str, Program]) -> dict[str, Program]:
        """Those that this driver compiles: a config may be more than it can do."""
        try:
            self._device.compile(step for program in programs.values() for step in program.steps)
            return programs
        except KernelError:
            compiled = {}
            for name, program in programs.items():
                with suppress(KernelError):
                    self._device.compile(program.steps)
                    compiled[name] = program
            return compiled

    def _late(self) -> bool:
        """Would another batch take longer than there is time?"""
        return self._end is not None and _now() + self._longest + _SAMPLING_SECONDS > self._end

    def _batches(self, candidates: Sequence[Option]) -> Iterator[Sequence[Option]]:
        """Candidates to compile together: all at once, or as many as there is time for."""
        if self._end is None:
            yield candidates
            return
        size = max(4, 2 * (os.cpu_count() or 1))
        for first in range(0, len(candidates), size):
            if self._late():
                return
            started = _now()
            yield candidates[first : first + size]
            self._longest = max(self._longest, _now() - started)


def _program(option: Option, dims: Dims, caps: DeviceCaps) -> Program:
    return lower(option.route, dims, caps, {}, launch_list=option.launch_list)


def tune_shapes(
    device: Device, nodes: Iterable[Node], precision: str, effort: Effort = THOROUGH, seconds: float | None = None
) -> Iterator[tuple[Node, Entry | None]]:
    """The entry of each shape as it is found; None where the time did not suffice."""
    with closing(Tuner(device, precision, effort, seconds)) as tuner:
        for node in nodes:
            yield node, tuner.tune(node.op, node.dims)


def tuned(device: Device, graphs: Sequence[Graph], precision: str, measure: bool) -> Tuning:
    """What is known for the shapes of a decode step. With `measure`, the rest is measured as far as the budget goes.

    It is kept. Nothing is measured where the device's policy says so. Whatever goes wrong, the built-in order is there.
    """
    tuning = read(device.caps)
    if not measure or not device.caps.policy.tune or BUDGET_SECONDS <= 0:
        return tuning
    started = _now()
    entries: dict[tuple[str, str], Entry] = {}
    try:
        shapes = shapes_of(graphs, device.caps, precision)
        missing = [node for node in shapes if tuning.entry(node.op, node.dims, precision) is None]
        if not missing:
            return tuning
        for node, entry in tune_shapes(device, missing, precision, QUICK, BUDGET_SECONDS - (_now() - started)):
            if entry is not None:
                entries[precision, key_of(node.op, node.dims)] = entry
    except Exception as problem:  # drivers have errors of their own; a model can be run without this
        _log.warning("kernels could not be timed, the built-in order is taken: %s", problem)
    if entries:
        save(device.caps, entries)
        tuning.entries.update(entries)
    return tuning
