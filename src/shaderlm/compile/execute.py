"""Runs one op: a graph of one node, lowered as a model's is, with operands packed as its route wants them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError, RouteError
from ..formats.blocks import nibbles_q4gsw
from ..formats.unpack import unpack
from ..gpu import Array, Device, DeviceCaps, Program
from ..graph import OPS
from ..graph.graph import Graph, Node, Tensor
from ..kernels import Dims, LaunchList, Route, choose
from .lowering import Lowering
from .plan import Plan

Operands = Mapping[str, Array | None]


def op_plan(route: Route, dims: Dims, caps: DeviceCaps, launch_list: LaunchList | None = None) -> Plan:
    """The plan of one op: its operands are inputs, its results outputs."""
    op = OPS[route.op]
    launches = launch_list or route.launch_list(dims, caps)
    there = {key.split(".")[0] for key, nbytes in launches.buffers.items() if nbytes}
    inputs = {key: key for key in op.inputs if key in there}
    outputs = {key: key for key in op.outputs if key in there}
    tensors = {key: Tensor(key, (), "input") for key in inputs} | {key: Tensor(key, ()) for key in outputs}
    graph = Graph(tensors, (Node(route.op, dims, inputs, outputs, route.op),), tuple(outputs))
    lowering = Lowering(caps)
    return lowering.plan(route.op, graph, routes=[lowering.routed(route, dims, launches)])


def lower(
    route: Route,
    dims: Dims,
    caps: DeviceCaps,
    operands: Operands,
    launch_list: LaunchList | None = None,
) -> Program:
    """The program of one op with packed operands in its buffers; others start as zeros.

    An operand that is None (no bias) is bound as an empty buffer; the kernel does not read it.
    """
    plan = op_plan(route, dims, caps, launch_list)
    contents: dict[str, Array | int] = {
        name: np.array(spec.words, np.uint32) if spec.role == "params" else spec.nbytes
        for name, spec in plan.buffers.items()
    }
    for name, array in operands.items():
        if array is None:
            continue
        pack = route.pack.get(name)
        packed = pack(array, dims, caps) if pack else {name: array}
        for key, value in packed.items():
            planned = plan.buffers[key].nbytes if key in plan.buffers else 0
            if value.nbytes < planned or (value.nbytes and not planned):
                raise KernelError(
                    f"{route.op}/{route.name}: {key} has {value.nbytes} bytes, the launch list says {planned}"
                )
            if planned:
                contents[key] = value
    return Program(contents, plan.program.steps, plan.outputs)


def run_op(
    device: Device | None, op: str, dims: Dims, operands: Operands, route: str | None
) -> dict[str, NDArray[np.uint8]]:
    """Route an op, run it once and return its outputs as raw bytes. Without a device: its formula, in NumPy."""
    if device is None:
        return _computed(op, dims, operands, route)
    chosen = choose(op, dims, device.caps, route)
    return device.run(lower(chosen, dims, device.caps, operands))


def _computed(op: str, dims: Dims, operands: Operands, route: str | None) -> dict[str, NDArray[np.uint8]]:
    if route is not None:
        raise RouteError(f"the device 'cpu' computes {op} in NumPy and has no routes, got {route!r}; leave route out")
    arrays = {name: array for name, array in operands.items() if array is not None}
    states = {name: arrays[name].copy() for name in OPS[op].outputs if name in arrays}
    if "format" in dims:
        arrays["weight"] = unpack(arrays["weight"], dims["format"])
    elif op == "linear_q4gsw":
        arrays["weight"] = nibbles_q4gsw(arrays["weight"])[:, : dims["K"]]
    computed = OPS[op].compute(dims, {**arrays, **states})
    outputs = {name: array.astype(np.uint32 if array.dtype.kind in "iu" else "f4") for name, array in computed.items()}
    return {
        name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in {**outputs, **states}.items()
    }
