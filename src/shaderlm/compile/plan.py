"""Graph → routed and placed → `Plan`: the frozen, printable list of dispatches of one step.

A plan names its buffers and owns none: weights, caches, inputs and the arena belong to who runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ModelError, RouteError
from ..gpu import Array, DeviceCaps, Program, Slot, Step
from ..graph.cost import CACHES, flops, part
from ..graph.fuse import RejectedFusion
from ..graph.graph import Graph, Node, Tensor
from ..kernels import Dispatch, LaunchList, Option, Route, choose, first_of, fold, shader_of
from .placement import Arena, arena_of
from .tuning import Tuning

NONE = "none"  # stands for an operand that is not there (no bias)
_MOST_ROUTES = 512
_BYTES = {"f32": 4, "f16": 2}


@dataclass(frozen=True)
class Launch:
    """One dispatch of a plan, with what people want to know of it."""

    layer: str
    op: str
    route: str
    step: Step
    buffers: tuple[str, ...]  # names in the graph (scratch in brackets), in binding order, without parameters
    dims: Mapping[str, Any]
    operands: tuple[tuple[str, int], ...]  # every buffer but the parameters: operand ("" for scratch), bytes
    share: float  # of the op's arithmetic: an op may take several dispatches
    config: str = ""  # of the route, where it was measured to be the fastest

    def work(self, position: int) -> tuple[int, int]:
        """(bytes, flops) that this dispatch has to do when the first row stands at this position of the cache."""
        touched = sum(nbytes * part(self.op, name, self.dims, position) for name, nbytes in self.operands)
        return round(touched), round(self.share * flops(self.op, self.dims, position))


@dataclass(frozen=True)
class Plan:
    """What runs for one step. `program` has every buffer by name; sizes of those that the arena gives."""

    name: str
    rows: int
    capacity: int
    launches: tuple[Launch, ...]
    program: Program
    params: Mapping[str, Array]
    arena: Mapping[str, int]
    rejected: tuple[RejectedFusion, ...]


class Routed(NamedTuple):
    """A route for a shape, its config and launch_list, and the share of the op's arithmetic that each dispatch has."""

    route: Route
    config: str
    launch_list: LaunchList
    shares: tuple[float, ...]


class Lowering:
    """Routes and lowers nodes; equal nodes of different layers are worked out once."""

    def __init__(self, caps: DeviceCaps, precision: str = "exact", tuning: Tuning | None = None) -> None:
        self.caps, self.precision, self.tuning = caps, precision, tuning
        self._routes: dict[Any, Routed] = {}

    def route(self, node: Node) -> Routed:
        """The route that was measured to be the fastest for a node, else the first that applies."""
        key = (node.op, tuple(node.dims.items()))
        if key not in self._routes:
            taken = self.tuning.option(node.op, node.dims, self.caps, self.precision) if self.tuning else None
            route, config, launch_list = taken or self._first(node)
            while len(self._routes) >= _MOST_ROUTES:
                del self._routes[next(iter(self._routes))]
            self._routes[key] = Routed(route, config, launch_list, _shares(launch_list))
        return self._routes[key]

    def _first(self, node: Node) -> Option:
        try:
            chosen = choose(node.op, node.dims, self.caps, None, self.precision)
        except RouteError as problem:
            raise ModelError(f"this device cannot run {node.op} of {node.layer}: {problem}") from problem
        return Option(chosen, "", chosen.launch_list(node.dims, self.caps))

    def unsupported_reason(self, node: Node) -> str | None:
        """Why no route runs a node here; None if one does."""
        if (node.op, tuple(node.dims.items())) in self._routes:
            return None
        found = first_of(node.op, node.dims, self.caps, self.precision)
        return found if isinstance(found, str) else None

    def plan(self, name: str, graph: Graph, rejected: tuple[RejectedFusion, ...], rows: int, capacity: int) -> Plan:
        """Lower a whole graph."""
        _whole_blocks(graph)
        lowered = [(node, *self.route(node)) for node in graph.nodes]
        arena = arena_of(graph, [(node, launch_list.buffers) for node, _, _, launch_list, _ in lowered])
        params: dict[str, Array] = {}
        names: dict[bytes, str] = {}
        launches = []
        for i, (node, route, config, launch_list, shares) in enumerate(lowered):
            for dispatch, share in zip(launch_list.dispatches, shares, strict=True):
                shader = shader_of(dispatch)
                slots, shown, operands = [], [], []
                for binding, access in shader.bindings:
                    if binding == "params":
                        packed = shader.pack_params(dispatch.params)
                        buffer = names.setdefault(packed.tobytes(), f"params.{len(names)}")
                        params[buffer] = packed
                    else:
                        wanted = dispatch.bind.get(binding, binding)
                        buffer = _buffer(graph, node, wanted, launch_list.buffers[wanted], arena, i)
                        if buffer != NONE:
                            operands.append((_key(node, wanted), launch_list.buffers[wanted]))
                            if not wanted.startswith("scales"):
                                shown.append(_operand(node, wanted) or f"({wanted})")
                    slots.append(Slot(buffer, access))
                grid = fold(dispatch.workgroups, self.caps.max_workgroups)
                assert grid is not None, "Route.reason refuses grids that do not fold"
                step = Step(dispatch.kernel.name, shader.source, tuple(slots), grid)
                about = (node.layer, node.op, route.name, step, tuple(shown))
                launches.append(Launch(*about, node.dims, tuple(operands), share, config))
        used = {slot.buffer for launch in launches for slot in launch.step.slots}
        program = Program(dict.fromkeys(sorted(used), 0), tuple(launch.step for launch in launches), graph.outputs)
        return Plan(name, rows, capacity, tuple(launches), program, params, arena.sizes, rejected)


def _shares(launch_list: LaunchList) -> tuple[float, ...]:
    """An op's arithmetic is shared out by the bytes of matrices or caches that a dispatch reads; of all if none."""

    def streamed(dispatch: Dispatch) -> int:
        names = [name for name, _ in shader_of(dispatch).bindings if name != "params"]
        keys = [dispatch.bind.get(name, name) for name in names]
        return sum(launch_list.buffers[key] for key in keys if not large or key in large)

    large = {key for key in launch_list.buffers if key.split(".")[0] in ("weight", *CACHES)}
    sizes = [streamed(dispatch) for dispatch in launch_list.dispatches]
    return tuple(size / (sum(sizes) or 1) for size in sizes)


def _whole_blocks(graph: Graph) -> None:
    """Kernels read inputs in blocks of 32: between nodes there is nobody to pad them."""
    for node in graph.nodes:
        if node.op.startswith("linear") and node.dims["K"] % 32:
            raise ModelError(
                f"{node.layer}: a matrix has {node.dims['K']} columns; on a GPU they must be a multiple of 32. "
                "device='cpu' runs this model"
            )
        if node.op in ("attention", "kv_write") and node.dims["D"] % 4:
            raise ModelError(
                f"{node.layer}: heads have {node.dims['D']} values; on a GPU they must be a multiple of 4. "
                "device='cpu' runs this model"
            )


def weight_buffer(tensor: Tensor, key: str) -> str:
    """Name of one buffer of a weight: packed ones come as `weight.0`, `scales.0`, `weight.1`, …"""
    return tensor.name if "." not in key else f"{tensor.name}/{key}"


def _operand(node: Node, key: str) -> str | None:
    """The tensor behind a buffer of a launch_list; None for scratch."""
    base = _key(node, key)
    return node.inputs.get(base) or node.outputs.get(base)


def _key(node: Node, key: str) -> str:
    """The operand that a buffer belongs to, as the op calls it; "" for scratch. Scales belong to the weight."""
    base = key.split(".")[0]
    base = "weight" if base == "scales" else base
    return base if base in node.inputs or base in node.outputs else ""


def _buffer(graph: Graph, node: Node, key: str, nbytes: int, arena: Arena, index: int) -> str:
    name = _operand(node, key)
    if name is None:
        return NONE if nbytes == 0 else arena.scratch[index, key]
    tensor = graph.tensors[name]
    if tensor.role == "weight":
        # A format without scales has an empty buffer for them.
        return NONE if nbytes == 0 else weight_buffer(tensor, key)
    return name if name in graph.outputs or tensor.role != "hidden" else arena.slots[name]


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that is not a weight: values in f32, ids in u32, caches in their format."""
    return tensor.size * _BYTES[tensor.format]
