"""A plan: all that a step runs, complete by itself. Frozen and printable; `plan_json` writes it out and reads it.

It names its buffers and says what each holds: a runner needs the plan and the checkpoint's tensors, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ..errors import DeviceError
from ..gpu import DeviceCaps, Program, Step
from ..graph import OPS
from ..graph.fuse import RejectedFusion
from ..graph.graph import TensorSlice

# weight: from the checkpoint. table: computed by a formula. state: the cache, kept from step to step; recurrent: so are
# the states of recurrent layers. input and output: written and read by the runner. scratch: between dispatches. params:
# the numbers of a dispatch.
Role = Literal["weight", "table", "state", "recurrent", "input", "output", "scratch", "params"]

NONE = "none"  # stands for an operand that is not there (no bias)


@dataclass(frozen=True)
class WeightSource:
    """Where the bytes of a weight come from: rows of tensors of the checkpoint, stacked, or the
    first half of the tensors and the second row by row in turns.

    A vector is f32, and whole where `rows` is None. Of a matrix, a buffer has the words or the scales of some rows, in
    the layout that its kernels read.
    """

    tensors: tuple[TensorSlice, ...]
    interleaved: bool = False
    format: str = ""  # of the tensors; "" of a vector that is whole
    columns: int = 1
    rows: tuple[int, int] | None = None  # first, end
    part: str = "vector"  # "words" or "scales", of a matrix
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a plan, and what it holds, by its role.

    A state or a table has as many rows as the runner likes: `nbytes` is one row. What is recurrent has a row for each
    sequence.
    """

    role: Role
    nbytes: int
    weight: WeightSource | None = None
    words: tuple[int, ...] = ()  # of parameters
    table: Mapping[str, Any] = field(default_factory=dict)  # its formula, and the parameters of that
    format: str = ""  # of a state


@dataclass(frozen=True)
class Launch:
    """One dispatch of a plan, with what people want to know of it."""

    layer: str
    op: str
    route: str
    step: Step
    buffers: tuple[str, ...]  # names in the graph (scratch in brackets), in binding order, without parameters
    dims: Mapping[str, Any]
    operands: tuple[tuple[str, int], ...]  # every buffer but the parameters: operand ("" for scratch), bytes to count
    share: float  # of the op's arithmetic: an op may take several dispatches
    config: str = ""  # launch configuration, where it was measured to be the fastest
    workgroup_size: int = 0  # threads

    @property
    def candidate(self) -> str:
        """The route, and its configuration if it has one."""
        return f"{self.route}/{self.config}" if self.config else self.route

    def work(self, position: int) -> tuple[int, int]:
        """(bytes, flops) that this dispatch has to do when the first row has this position."""
        op = OPS[self.op]
        touched = sum(nbytes * op.part(name, self.dims, position) for name, nbytes in self.operands)
        return round(touched), round(self.share * op.flops(self.dims, position))


@dataclass(frozen=True)
class Needs:
    """What a device must have to run a plan: features by name, limits as numbers (the names of `DeviceCaps`)."""

    features: tuple[str, ...]
    limits: Mapping[str, int]

    def unsupported_reason(self, caps: DeviceCaps) -> str | None:
        """The first thing that a device does not have, in words."""
        for name in self.features:
            if not getattr(caps, name):
                return f"the plan needs the feature {name}, which {caps.name} does not have"
        for name, least in self.limits.items():
            if getattr(caps, name) < least:
                return f"the plan needs {name} of {least:,}; {caps.name} has {getattr(caps, name):,}"
        return None


@dataclass(frozen=True)
class Plan:
    """What runs for one step of `tokens` rows. `target`: the WebGPU implementation that shaders are composed for."""

    name: str
    tokens: int
    target: str
    needs: Needs
    buffers: Mapping[str, BufferSpec]
    launches: tuple[Launch, ...]
    outputs: tuple[str, ...]
    rejected: tuple[RejectedFusion, ...] = ()

    @cached_property
    def program(self) -> Program:
        """The dispatches alone, for a device."""
        return Program(dict.fromkeys(self.buffers, 0), tuple(launch.step for launch in self.launches), self.outputs)

    def of_role(self, role: Role) -> dict[str, BufferSpec]:
        """The buffers of one role."""
        return {name: spec for name, spec in self.buffers.items() if spec.role == role}

    def check(self, caps: DeviceCaps) -> None:
        """Refuse a device that cannot run this plan."""
        reason = self.needs.unsupported_reason(caps)
        if reason:
            raise DeviceError(f"the plan {self.name!r} cannot run here: {reason}")


def concat(name: str, plans: Iterable[Plan]) -> Plan:
    """Plans that run one after the other, as one. Scratch buffers of the same name are shared."""
    parts = list(plans)
    first = parts[0]
    buffers: dict[str, BufferSpec] = {}
    words: dict[tuple[int, ...], str] = {}
    launches: list[Launch] = []
    for plan in parts:
        renamed: dict[str, str] = {}
        for key, spec in plan.buffers.items():
            if spec.role == "params":
                renamed[key] = words.setdefault(spec.words, f"params.{len(words)}")
            target = renamed.get(key, key)
            before = buffers.get(target)
            made_here = before is not None and before.role == "output" and spec.role == "input"
            if before is None or (not made_here and spec.nbytes > before.nbytes):
                buffers[target] = spec
        launches += [_renamed(launch, renamed) for launch in plan.launches]
    limits = {key: max(plan.needs.limits[key] for plan in parts) for key in first.needs.limits}
    features = tuple(sorted({feature for plan in parts for feature in plan.needs.features}))
    outputs = tuple(dict.fromkeys(output for plan in parts for output in plan.outputs))
    rejected = tuple(each for plan in parts for each in plan.rejected)
    needs = Needs(features, limits)
    return Plan(name, first.tokens, first.target, needs, buffers, tuple(launches), outputs, rejected)


def _renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    slots = tuple(replace(slot, buffer=names.get(slot.buffer, slot.buffer)) for slot in launch.step.slots)
    return replace(launch, step=replace(launch.step, slots=slots))
