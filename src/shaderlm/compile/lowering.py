"""Graph → routed and placed → `Plan`. One lowering for models, for single ops and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ModelError, RouteError
from ..gpu import DeviceCaps, Slot, Step
from ..graph.cost import CACHES
from ..graph.fuse import RejectedFusion
from ..graph.graph import Graph, Node, Tensor
from ..kernels import Dispatch, LaunchList, Option, Route, Shader, choose, first_of, fold, shader_of
from ..kernels.linear.few_columns import applies as few_columns
from ..kernels.route import WeightPart, buffers_of
from ..kernels.wgsl import bound_once
from .placement import Arena, arena_of
from .plan import NONE, BufferSpec, Launch, Needs, Plan, Role, WeightSource
from .routed import Routed, shares
from .split_sums import add_while_rounding
from .tuning import Tuning

_MAX_ROUTES = 512


class Lowering:
    """Routes and lowers nodes; equal nodes of different layers are worked out once.

    `views`: columns of one row are bound where they lie; else every binding is a whole buffer.
    """

    def __init__(
        self, caps: DeviceCaps, precision: str = "exact", tuning: Tuning | None = None, *, views: bool = True
    ) -> None:
        self.caps, self.precision, self.tuning, self.views = caps, precision, tuning, views
        self._routes: dict[Any, Routed] = {}
        self._reasons: dict[Any, str | None] = {}

    def route(self, node: Node) -> Routed:
        """The route that was measured to be the fastest for a node, else the first that applies."""
        key = (node.op, tuple(node.dims.items()))
        if key not in self._routes:
            fastest = self.tuning.option(node.op, node.dims, self.caps, self.precision) if self.tuning else None
            route, config, launch_list = fastest or self._first(node)
            while len(self._routes) >= _MAX_ROUTES:
                del self._routes[next(iter(self._routes))]
            self._routes[key] = self.routed(route, node.dims, launch_list, config)
        return self._routes[key]

    def routed(self, route: Route, dims: Mapping[str, Any], launch_list: LaunchList, config: str = "") -> Routed:
        """A route that was chosen for a shape."""
        parts = route.weight_parts(dims, self.caps) if route.weight_parts else {}
        return Routed(route, config, launch_list, shares(launch_list), parts)

    def _first(self, node: Node) -> Option:
        try:
            chosen = choose(node.op, node.dims, self.caps, None, self.precision)
        except RouteError as problem:
            raise ModelError(f"this device cannot run {node.op} of {node.layer}: {problem}") from problem
        return Option(chosen, "", chosen.launch_list(node.dims, self.caps))

    def unsupported_reason(self, node: Node) -> str | None:
        """Why no route runs a node here; None if one does."""
        key = (node.op, tuple(node.dims.items()))
        if key not in self._reasons:
            route = first_of(node.op, node.dims, self.caps, self.precision)
            if len(self._reasons) >= _MAX_ROUTES:
                self._reasons.clear()
            self._reasons[key] = route if isinstance(route, str) else None
        return self._reasons[key]

    def plan(
        self,
        name: str,
        graph: Graph,
        rejected: tuple[RejectedFusion, ...] = (),
        tokens: int = 1,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        routes: Sequence[Routed] | None = None,
    ) -> Plan:
        """Lower a whole graph. `tables` has the formulas of its tables by name; `routes` are those of the nodes, if
        they are chosen already."""
        if routes is None:
            check_shapes(graph)
            routes = [self.route(node) for node in graph.nodes]
        graph, routes = add_while_rounding(graph, routes, self.caps)
        views = _views(graph, self.caps.offset_alignment) if self.views else {}
        nodes = [
            (*_bound(node, views), routed)
            for node, routed in zip(graph.nodes, routes, strict=True)
            if views.keys().isdisjoint(node.outputs.values())
        ]
        arena = arena_of(graph, [(node, routed.launch_list.buffers) for node, _, routed in nodes])
        work = _Work(self.caps, graph, arena, tables or {})
        for i, (node, offsets, routed) in enumerate(nodes):
            for dispatch, share in zip(routed.launch_list.dispatches, routed.shares, strict=True):
                work.add(i, node, offsets, routed, dispatch, share)
        largest = max((spec.nbytes for spec in work.buffers.values()), default=0)
        needs = Needs(tuple(sorted(work.features)), {**work.limits, "max_binding": largest})
        buffers = dict(sorted(work.buffers.items()))
        return Plan(
            name, tokens, self.caps.implementation, needs, buffers, tuple(work.launches), graph.outputs, rejected
        )


class _Work:
    """A plan in the making."""

    def __init__(self, caps: DeviceCaps, graph: Graph, arena: Arena, tables: Mapping[str, Mapping[str, Any]]) -> None:
        self.caps, self.graph, self.arena, self.tables = caps, graph, arena, tables
        self.buffers: dict[str, BufferSpec] = {}
        self.launches: list[Launch] = []
        self.features: set[str] = set()
        names = ("max_invocations", "max_workgroup_memory", "max_storage_buffers", "max_workgroups")
        self.limits = dict.fromkeys(names, 0)
        self._params: dict[bytes, str] = {}

    def add(
        self, index: int, node: Node, offsets: Mapping[str, int], routed: Routed, dispatch: Dispatch, share: float
    ) -> None:
        """A dispatch of a node; `offsets` says where in their buffers some of its operands begin."""
        shader = shader_of(dispatch, self.caps.implementation)
        slots: dict[str, Slot] = {}
        shown: dict[str, str] = {}
        operands: list[tuple[str, int]] = []
        for binding, access in shader.bindings:
            if binding == "params":
                slots[binding] = Slot(self._parameters(shader, dispatch), access)
                continue
            key = dispatch.bind.get(binding, binding)
            nbytes = routed.launch_list.buffers[key]
            buffer = self._buffer(index, node, routed, key, nbytes)
            slots[binding] = Slot(buffer, access, offsets.get(_operand(node, key), 0))
            if buffer != NONE:
                tensor = self._tensor(node, key)
                operands.append((_operand(node, key), _counted(routed.launch_list, dispatch, key, tensor, nbytes)))
                if not key.startswith("scales"):
                    shown[binding] = tensor.name if tensor is not None else f"({key})"
        grid = fold(dispatch.workgroups, self.caps.max_workgroups)
        assert grid is not None, "Route.reason refuses grids that do not fold"
        # What is not there stays apart, so that one shader serves products with and without it.
        operand = {
            name: (slot.buffer, slot.offset, name if slot.buffer == NONE else shown.get(name))
            for name, slot in slots.items()
        }
        shader = bound_once(shader, tuple(operand.values()))
        self._count(shader, dispatch, max(grid))
        names = [binding for binding, _ in shader.bindings]
        step = Step(dispatch.kernel.name, shader.source, tuple(slots[name] for name in names), grid)
        about = (node.layer, node.op, routed.route.name, step, tuple(shown[name] for name in names if name in shown))
        threads = shader.workgroup_size
        self.launches.append(Launch(*about, node.dims, tuple(operands), share, routed.config, threads))

    def _parameters(self, shader: Shader, dispatch: Dispatch) -> str:
        packed = shader.pack_params(dispatch.params)
        name = self._params.setdefault(packed.tobytes(), f"params.{len(self._params)}")
        words = tuple(int(word) for word in packed.view("<u4"))
        self.buffers[name] = BufferSpec("params", packed.nbytes, words=words)
        return name

    def _tensor(self, node: Node, key: str) -> Tensor | None:
        """The tensor behind a buffer of a launch list; None for scratch."""
        base = _operand(node, key)
        name = node.inputs.get(base) or node.outputs.get(base)
        return self.graph.tensors[name] if name else None

    def _buffer(self, index: int, node: Node, routed: Routed, key: str, nbytes: int) -> str:
        tensor = self._tensor(node, key)
        if nbytes == 0:  # no bias; no scales
            name, spec = NONE, BufferSpec("scratch", 16)
        elif tensor is None:
            name = self.arena.scratch[index, key]
            spec = BufferSpec("scratch", self.arena.sizes[name])
        elif tensor.role == "weight":
            # Packed weights come as `weight.0`, `scales.0`, `weight.1`, …
            name = tensor.name if "." not in key else f"{tensor.name}/{key}"
            spec = BufferSpec("weight", nbytes, _source(tensor, routed.weight_parts, key))
        elif tensor.role == "table":
            table = self.tables.get(tensor.name, {})
            name, spec = tensor.name, BufferSpec(tensor.role, tensor.nbytes, table=table)
        elif tensor.role in ("state", "recurrent"):
            name, spec = tensor.name, BufferSpec(tensor.role, tensor.nbytes, format=tensor.format)
        elif tensor.role == "input" or tensor.name in self.graph.outputs:
            role: Role = "output" if tensor.name in self.graph.outputs else "input"
            name, spec = key if "." in key else tensor.name, BufferSpec(role, nbytes)
        else:
            name = self.arena.slots[tensor.name]
            spec = BufferSpec("scratch", self.arena.sizes[name])
        known = self.buffers.get(name)
        if known is None or spec.nbytes > known.nbytes:
            self.buffers[name] = spec
        return name

    def _count(self, shader: Shader, dispatch: Dispatch, side: int) -> None:
        self.features |= dispatch.kernel.needs
        sizes = {
            "max_invocations": shader.workgroup_size,
            "max_workgroup_memory": shader.workgroup_memory,
            "max_storage_buffers": sum(access != "uniform" for _, access in shader.bindings),
            "max_workgroups": side,
        }
        for name, value in sizes.items():
            self.limits[name] = max(self.limits[name], value)


def _views(graph: Graph, alignment: int) -> dict[str, tuple[str, int]]:
    """Slices that need no dispatch, by their results: what is bound instead, and from which byte on.

    Neighbouring columns of one row lie together. A binding begins at a multiple of `alignment`.
    """
    views: dict[str, tuple[str, int]] = {}
    for node in graph.nodes:
        if node.op == "slice" and (node.dims["tokens"], node.dims["step"]) == (1, 1):
            tensor, offset = views.get(node.inputs["x"], (node.inputs["x"], 0))
            offset += 4 * node.dims["first"]
            hidden = graph.tensors[tensor].role == "hidden" and not {tensor, node.out} & {*graph.outputs}
            if hidden and offset % alignment == 0:
                views[node.out] = (tensor, offset)
    return views


def _bound(node: Node, views: Mapping[str, tuple[str, int]]) -> tuple[Node, dict[str, int]]:
    """A node that reads what views are of, and the bytes where these operands begin."""
    read = {key: views[name] for key, name in node.inputs.items() if name in views}
    inputs = {**node.inputs, **{key: tensor for key, (tensor, _) in read.items()}}
    return replace(node, inputs=inputs), {key: offset for key, (_, offset) in read.items()}


def _counted(launch_list: LaunchList, dispatch: Dispatch, key: str, tensor: Tensor | None, nbytes: int) -> int:
    """The bytes of a buffer that count for a dispatch; of a state or a table, of one row.

    Dispatches that read the same cache do so for different rows of the step: each counts its share of it.
    """
    if dispatch.idle:
        return 0
    if tensor is not None and tensor.role in ("state", "recurrent", "table"):
        nbytes = tensor.nbytes
    if key not in CACHES:
        return nbytes
    readers = [each for each in launch_list.dispatches if not each.idle and key in buffers_of(each)]
    at = next(i for i, each in enumerate(readers) if each is dispatch)
    return nbytes * (at + 1) // len(readers) - nbytes * at // len(readers)


def check_shapes(graph: Graph) -> None:
    """Kernels read inputs in blocks of 32, save one for less: between nodes there is nobody to pad them."""
    for node in graph.nodes:
        padded = node.dims.get("K", 0) % 32 and not (node.op == "linear" and few_columns(node.dims))
        if node.op in ("linear", "linear_experts") and padded:
            raise ModelError(
                f"{node.layer}: a matrix has {node.dims['K']} columns; on a GPU they must be a multiple of 32. "
                'device="cpu" runs this model'
            )
        if node.op in ("attention", "kv_write") and node.dims["D"] % 4:
            raise ModelError(
                f"{node.layer}: heads have {node.dims['D']} values; on a GPU they must be a multiple of 4. "
                'device="cpu" runs this model'
            )


def _operand(node: Node, key: str) -> str:
    """The operand that a buffer belongs to, as the op calls it; "" for scratch. Scales belong to the weight."""
    base = key.split(".")[0]
    base = "weight" if base == "scales" and "scales" not in node.inputs else base
    return base if base in node.inputs or base in node.outputs else ""


def _source(tensor: Tensor, parts: Mapping[str, WeightPart], key: str) -> WeightSource:
    """Where a weight's bytes come from, in the layout that the route wants."""
    if key not in parts:
        return WeightSource(tensor.parts, tensor.interleaved)
    part, columns = parts[key], tensor.shape[-1] if len(tensor.shape) > 1 else 1
    layout = {key: list(value) if isinstance(value, tuple) else value for key, value in part.layout.items()}
    rows = (part.first, part.end)
    return WeightSource(tensor.parts, tensor.interleaved, tensor.format, columns, rows, part.part, layout)
