"""What a route is: when it applies, how its operands lie in memory, and which dispatches it makes.

Knows WGSL composition and device caps; knows nothing of wgpu or of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from ..gpu.caps import DeviceCaps, Implementation
from .wgsl import Constant, Kernel, Shader, compose, declared_buffers

Array = NDArray[Any]
Dims = Mapping[str, Any]
Packer = Callable[[Array, Dims, DeviceCaps], Mapping[str, Array]]


@dataclass(frozen=True)
class Dispatch:
    """One launch. `bind` maps names in the WGSL to buffers of the launch_list where the two differ.

    `specialised` says that the parameters are constants of the source: for those that are the same in every step, on
    devices where compiling is quick. A compiler that knows how often a loop runs unrolls it. Operands that
    are `unbound` have no binding. A dispatch is `idle` if it has nothing to do when all rows are a run of one sequence.
    """

    kernel: Kernel
    workgroups: int
    params: Mapping[str, int | float]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    bind: Mapping[str, str] = field(default_factory=dict)
    specialised: bool = False
    unbound: tuple[str, ...] = ()
    idle: bool = False


def covering(
    kernel: Kernel,
    threads: int,
    params: Mapping[str, int | float],
    constants: Mapping[str, Constant] | None = None,
    bind: Mapping[str, str] | None = None,
) -> Dispatch:
    """A launch of at least this many threads, in workgroups of the size that the kernel has."""
    size = compose(kernel, constants).workgroup_size
    return Dispatch(kernel, ceil_div(threads, size), params, constants or {}, bind or {})


@dataclass(frozen=True)
class LaunchList:
    """The dispatches of a route for one shape, and the bytes of every buffer that they touch."""

    dispatches: tuple[Dispatch, ...]
    buffers: Mapping[str, int]


@dataclass(frozen=True)
class WeightPart:
    """What one buffer of a weight holds: rows `first` … `end` of the matrix, and which part of each.

    part: "words" or "scales" of rows in a block format, in the order that `layout` describes, or "vector": f32 values.
    """

    first: int
    end: int
    part: str
    layout: Mapping[str, Any]


Candidates = Mapping[str, Callable[[], LaunchList]]


@dataclass(frozen=True)
class Route:
    """A way to compute an op. `unsupported_reason` answers None where it applies, else the reason in words.

    `pack` brings host arrays into the layout the kernels read, one function per operand (default: as they
    are); it may split an operand into several buffers. A route that is not `exact` rounds its operands and is taken
    only when it is named, or where the caller puts speed first. Where `prefer` says so, a route goes before those
    declared first. `weight_parts` says which rows of a weight each buffer holds and in which layout. `candidates` names
    other launch configurations of a shape, which compute the same: what `launch_list` takes is right on average, and a
    device may be asked which one is fastest.
    """

    op: str
    name: str
    launch_list: Callable[[Dims, DeviceCaps], LaunchList]
    unsupported_reason: Callable[[Dims, DeviceCaps], str | None] = lambda dims, caps: None
    pack: Mapping[str, Packer] = field(default_factory=dict)
    exact: bool = True
    prefer: Callable[[Dims, DeviceCaps], bool] = lambda dims, caps: False
    weight_parts: Callable[[Dims, DeviceCaps], Mapping[str, WeightPart]] | None = None
    candidates: Callable[[Dims, DeviceCaps], Candidates] = lambda dims, caps: {}

    def offered(self, precision: str, caps: DeviceCaps) -> bool:
        """Is it taken without being named?"""
        return self.exact or (precision == "fast" and caps.policy.round_inputs)

    def reason(self, dims: Dims, caps: DeviceCaps) -> str | None:
        """Why this route does not apply here; None if it does. Nothing is allocated to find out."""
        return self.unsupported_reason(dims, caps) or over_limits(self.launch_list(dims, caps), caps)


def shader_of(dispatch: Dispatch, target: Implementation = "wgpu") -> Shader:
    """The composed shader of a dispatch, as a WebGPU implementation gets it."""
    params = dispatch.params if dispatch.specialised else None
    return compose(dispatch.kernel, dispatch.constants, target, params, dispatch.unbound)


def buffers_of(dispatch: Dispatch) -> list[str]:
    """The buffers of the launch list that a dispatch binds. Nothing is composed to find out."""
    names = declared_buffers(dispatch.kernel)
    return [dispatch.bind.get(name, name) for name in names if name not in dispatch.unbound]


def over_limits(launch_list: LaunchList, caps: DeviceCaps) -> str | None:
    """The first limit of the device that a launch_list breaks, in words."""
    for dispatch in launch_list.dispatches:
        label = dispatch.kernel.name
        missing = sorted(need for need in dispatch.kernel.needs if not getattr(caps, need))
        if missing:
            return f"{label} needs {' and '.join(missing)}, which this device does not have"
        # Without the sizes of this shape, which change none of what is limited: others have composed it already.
        shader = compose(dispatch.kernel, dispatch.constants, caps.implementation, unbound=dispatch.unbound)
        if shader.workgroup_size > caps.max_invocations:
            return f"{label} has {shader.workgroup_size} threads per workgroup, the limit is {caps.max_invocations}"
        storage = sum(access != "uniform" for _, access in shader.bindings)
        if storage > caps.max_storage_buffers:
            return f"{label} binds {storage} storage buffers, the limit is {caps.max_storage_buffers}"
        if shader.workgroup_memory > caps.max_workgroup_memory:
            return (
                f"{label} needs {shader.workgroup_memory:,} bytes of workgroup memory, "
                f"the limit is {caps.max_workgroup_memory:,}"
            )
        if fold(dispatch.workgroups, caps.max_workgroups) is None:
            return f"{label} needs {dispatch.workgroups:,} workgroups, the limit is {caps.max_workgroups:,}²"
    limit = caps.max_operand
    for name, nbytes in launch_list.buffers.items():
        if nbytes > limit:
            return f"{name} takes {nbytes:,} bytes, one binding holds {limit:,}; give it fewer rows at a time"
    return None


MEASURED_PROCESSORS = 132  # of an H200, where counts of workgroups were measured


def processors(caps: DeviceCaps) -> int:
    """Of a device; where that is not known, of the one on which counts of workgroups were measured."""
    return caps.processors or MEASURED_PROCESSORS


def filling(workgroups: int, caps: DeviceCaps) -> int:
    """Workgroups, threads or tiles that keep a device as busy as so many keep an H200."""
    return max(1, round(workgroups * processors(caps) / MEASURED_PROCESSORS))


def as_measured(rows: int, caps: DeviceCaps) -> int:
    """Rows of a weight that are as many for each processor of an H200 as so many are on a device."""
    return max(1, rows * MEASURED_PROCESSORS // processors(caps))


def fold(workgroups: int, limit: int) -> tuple[int, int, int] | None:
    """A grid of at least this many workgroups with no side above the limit; kernels skip the surplus."""
    if workgroups <= limit:
        return (workgroups, 1, 1)
    rows = -(-workgroups // limit)
    return None if rows > limit else (-(-workgroups // rows), rows, 1)


def ceil_div(a: int, b: int) -> int:
    """How many pieces of b cover a."""
    return -(-a // b)


def row_ranges(rows: int, row_bytes: int, caps: DeviceCaps, multiple: int = 1) -> list[tuple[int, int]]:
    """Split the rows of a weight so that each range fits one binding; at least one row each.

    Ranges start at multiples of `multiple` rows wherever that many fit.
    """
    fitting = caps.max_operand // row_bytes
    per_range = max(1, fitting // multiple * multiple or fitting)
    return [(first, min(first + per_range, rows)) for first in range(0, rows, per_range)]


def part(name: str, i: int) -> str:
    """Buffer name of the i-th row range of an operand."""
    return f"{name}.{i}"


def f32(count: int) -> int:
    """Bytes of `count` f32 or u32 values."""
    return 4 * count


def reduction(caps: DeviceCaps) -> tuple[str, frozenset[str]]:
    """The shared file that sums over a workgroup on this device, and what it needs."""
    if caps.subgroups:
        return "shared/reduce_subgroup", frozenset({"subgroups"})
    return "shared/reduce_tree", frozenset()


def row_count(dims: Dims) -> str:
    """The file that counts the rows of x: those of the shape, or those that a step really has."""
    return f"shared/row_count_{'batch' if dims.get('batched') else 'fixed'}"


def batch_bytes(tokens: int) -> int:
    """Bytes of a token batch: a record of four words per row, and one before them."""
    return 16 * (1 + tokens)


def batch_if_read(dims: Dims) -> dict[str, int]:
    """The batch's buffer, where the op reads it."""
    return {"batch": batch_bytes(dims["tokens"])} if dims.get("batched") else {}


def is_specialised(rows: int, caps: DeviceCaps) -> bool:
    """Do shaders have these rows, and all sizes, as constants? Those of more rows are shared by all row counts.

    A step of a few rows takes little time, and a model has always the same shapes. H200: two sequences of llama-3.2-1b
    2,256 → 2,578 tok/s, sixteen of smollm2-135m 9,481 → 11,467 (wgpu).
    """
    return rows <= 16 and caps.policy.specialise_constants
