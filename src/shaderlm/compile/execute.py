"""Brings one op's launch_list and operands together into a program, and runs it. Knows no text and no models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError
from ..gpu import Array, Device, DeviceCaps, Program, Slot, Step
from ..graph import OPS
from ..kernels import Dims, Route, choose, fold, shader_of
from ..kernels.wgsl import Target

Operands = Mapping[str, Array | None]


def lower(route: Route, dims: Dims, caps: DeviceCaps, operands: Operands, target: Target = "wgpu") -> Program:
    """The program of one op: packed operands, scratch and result buffers, composed dispatches.

    An operand that is None (no bias) is bound as an empty buffer; the kernel is specialised not to read it.
    """
    launch_list = route.launch_list(dims, caps)
    contents: dict[str, Array | int] = dict(launch_list.buffers)
    for name, array in operands.items():
        if array is None:
            continue
        pack = route.pack.get(name)
        packed = pack(array, dims, caps) if pack else {name: array}
        for key, value in packed.items():
            planned = launch_list.buffers.get(key)
            if planned != value.nbytes:
                given = f"{key} has {value.nbytes} bytes"
                raise KernelError(f"{route.op}/{route.name}: {given}, the launch_list says {planned}")
            contents[key] = value if value.nbytes else 0
    steps = []
    for i, dispatch in enumerate(launch_list.dispatches):
        shader = shader_of(dispatch, target)
        slots = []
        for name, access in shader.bindings:
            buffer = f"params.{i}" if name == "params" else dispatch.bind.get(name, name)
            if name == "params":
                contents[buffer] = shader.pack_params(dispatch.params)
            slots.append(Slot(buffer, access))
        grid = fold(dispatch.workgroups, caps.max_workgroups)
        assert grid is not None, "Route.reason refuses grids that do not fold"
        steps.append(Step(dispatch.kernel.name, shader.source, tuple(slots), grid))
    return Program(contents, tuple(steps), OPS[route.op].outputs)


def run_op(device: Device, op: str, dims: Dims, operands: Operands, route: str | None) -> dict[str, NDArray[np.uint8]]:
    """Route an op, run it once and return its outputs as raw bytes."""
    chosen = choose(op, dims, device.caps, route)
    return device.run(lower(chosen, dims, device.caps, operands))


def read_as(raw: NDArray[np.uint8], dtype: Any, shape: tuple[int, ...]) -> Array:
    """Raw output bytes as an array."""
    array: Array = raw.view(dtype).reshape(shape)
    return array
