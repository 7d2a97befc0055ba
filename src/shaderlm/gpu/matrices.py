"""Whether the products of matrices that a device lists are right, found out by running each once.

They are experimental, and a driver may list what it does not do. A kernel multiplies two small matrices twice, reading
them from workgroup memory as `kernels/shared/matrix_units.wgsl` does, and the sums are compared with NumPy's. Shapes
that fail are left out of the device's capabilities: routes then take the next way, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, KernelError, ModelError
from . import probe_cache
from .backends import UNITS_FORMAT, UNITS_PROBE, wrong_matrix_units
from .program import Program, RunsPrograms, Slot, Step

if TYPE_CHECKING:
    from .caps import DeviceCaps, MatrixShape

_log = logging.getLogger("shaderlm")
# left [m, k] and right [n, k] as pairs of f16, then result [m, n] in their place.
_SOURCE = """
enable f16;
enable subgroups;
enable chromium_experimental_subgroup_matrix;
@group(0) @binding(0) var<storage, read> given: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> found: array<vec4<u32>>;
alias Left = subgroup_matrix_left<f16, {k}, {m}>;
alias Right = subgroup_matrix_right<f16, {n}, {k}>;
alias Result = subgroup_matrix_result<f32, {n}, {m}>;
const GIVEN: u32 = {given}u;
const FOUND: u32 = {found}u;
var<workgroup> tile: array<vec4<u32>, GIVEN + FOUND>;
@compute @workgroup_size({lanes})
fn main(@builtin(local_invocation_index) lane: u32) {{
    for (var i = lane; i < GIVEN; i = i + {lanes}u) {{
        tile[i] = given[i];
    }}
    workgroupBarrier();
    let left = subgroupMatrixLoad<Left, row_major>(&tile, 0u, {k}u / 8u);
    let right = subgroupMatrixLoad<Right, col_major>(&tile, {m}u * {k}u / 8u, {k}u / 8u);
    var sum: Result;
    sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
    sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
    subgroupMatrixStore<row_major>(&tile, GIVEN, sum, {n}u / 4u);
    workgroupBarrier();
    for (var i = lane; i < FOUND; i = i + {lanes}u) {{
        found[i] = tile[GIVEN + i];
    }}
}}
"""

# By adapter: two devices on one adapter have the same units.
_wrong: dict[tuple[str, int], dict[MatrixShape, str]] = {}


def with_probed_matrices(device: RunsPrograms, adapter: tuple[str, int]) -> DeviceCaps:
    """A device's capabilities, of the shapes of f16 with sums in f32 only those that multiply right."""
    caps = device.caps
    if not caps.subgroup_matrix:
        return caps
    if adapter not in _wrong:
        _wrong[adapter] = _problems_of(device, [shape for shape in caps.matrix_shapes if _checked(shape)])
        for shape, reason in _wrong[adapter].items():
            _log.warning("%s: matrix units are not used for %s: %s", caps.name, shape, reason)
    right = replace(caps, matrix_shapes=tuple(shape for shape in caps.matrix_shapes if shape not in _wrong[adapter]))
    if caps.multiplies_f16 and not right.multiplies_f16:
        wrong_matrix_units.add(caps.name)
    return right


def _problems_of(device: RunsPrograms, shapes: Sequence[MatrixShape]) -> dict[MatrixShape, str]:
    """`problems`, or none if all shapes were right with this driver. What failed is tried again, whoever opens it."""
    caps, names = device.caps, [str(shape) for shape in shapes]
    if not caps.software and probe_cache.read(caps, UNITS_PROBE, UNITS_FORMAT) == names:
        return {}
    wrong = problems(device, shapes)
    if not caps.software:
        right = [str(shape) for shape in shapes if shape not in wrong]
        with suppress(OSError, ModelError):
            probe_cache.write(caps, UNITS_PROBE, UNITS_FORMAT, right)
    return wrong


def _checked(shape: MatrixShape) -> bool:
    """Those that kernels may use."""
    return (shape.component, shape.result) == ("f16", "f32") and shape.k % 8 == 0 and shape.n % 4 == 0


def problems(device: RunsPrograms, shapes: Sequence[MatrixShape]) -> dict[MatrixShape, str]:
    """What is wrong with each shape that is wrong."""
    try:
        results = products(device, shapes)  # together they are compiled in the time of one
    except (DeviceError, KernelError) as problem:
        if len(shapes) == 1:
            return {shapes[0]: str(problem)}
        return {shape: reason for each in shapes for shape, reason in problems(device, [each]).items()}
    return {shape: reason for shape, actual in results.items() if (reason := _difference(shape, actual))}


def _difference(shape: MatrixShape, actual: NDArray[np.float32]) -> str | None:
    """Where a product is not what it must be. All are whole numbers: sums are exact."""
    a, b = (side.astype(np.float32) for side in operands(shape))
    expected = 2 * a @ b.T
    if np.array_equal(actual, expected):
        return None
    row, column = np.argwhere(actual != expected)[0]
    return f"result [{row}, {column}] is {actual[row, column]:g}, it must be {expected[row, column]:g}"


def operands(shape: MatrixShape) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """left [m, k] and right [n, k]: small whole numbers, different in every row and column."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 10, (side, shape.k)).astype(np.float16) for side in (shape.m, shape.n))
    return a, b


def products(device: RunsPrograms, shapes: Sequence[MatrixShape]) -> dict[MatrixShape, NDArray[np.float32]]:
    """Twice left · rightᵀ, [m, n], of each shape, by one subgroup."""
    buffers: dict[str, NDArray[np.float16] | int] = {}
    steps = []
    for shape in shapes:
        values = np.concatenate([side.reshape(-1) for side in operands(shape)])
        sizes = {"given": values.size // 8, "found": shape.m * shape.n // 4, "lanes": device.caps.subgroup_max}
        source = _SOURCE.format(m=shape.m, n=shape.n, k=shape.k, **sizes)
        buffers |= {f"given {shape}": values, f"found {shape}": 16 * sizes["found"]}
        slots = (Slot(f"given {shape}", "read-only-storage"), Slot(f"found {shape}", "storage"))
        steps.append(Step("matrices", source, slots, (1, 1, 1)))
    outputs = device.run(Program(buffers, tuple(steps), tuple(f"found {shape}" for shape in shapes)))
    return {
        shape: outputs[f"found {shape}"].view(np.float32)[: shape.m * shape.n].reshape(shape.m, shape.n)
        for shape in shapes
    }
