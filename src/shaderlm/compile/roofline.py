"""What a device can do at best, measured: bytes from memory, arithmetic, and launching a dispatch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from ..gpu import Device, DeviceCaps, Step
from ..gpu.tracer import WALL
from ..graph import OPS, resolve
from ..kernels import Dims, choose
from ..kernels.linear.matrix import matrix_shape, units_unsupported_reason
from .execute import lower
from .timing import Clock, Filler
from .workload import RoutedOp, copy_bandwidth, time_in_turns

FMA_VALUES, FMA_ROUNDS = 1 << 22, 512
SHORT_FMA_VALUES, SHORT_FMA_ROUNDS = 1 << 16, 16
# 2 × 4 matrices of sums in a subgroup, so that no product waits for the one before. So many workgroups that a GPU is
# full most of the time (on an H200 614 TFLOP/s with 4,096, 631 with 8,192), and so many rounds that writing the sums
# takes 1 % of it.
MATRIX_SIDES, MATRIX_COUNT, MATRIX_ROUNDS = (2, 4), 8192, 2048
LAUNCH_VALUES = 4  # copied by a dispatch that does next to nothing
TIMESTAMPED_DISPATCHES, TIMESTAMPED_ROUNDS = 200, 10


@dataclass(frozen=True)
class Roofline:
    """Copy bandwidth, f32 multiply-adds, one small dispatch that waits for the one before, and a timestamp after it.

    `matrix_flops_per_second` is of f16 with sums in f32 by matrix units; None where kernels do not use any.
    """

    bytes_per_second: float
    flops_per_second: float
    dispatch_us: float
    timestamp_us: float
    matrix_flops_per_second: float | None = None

    def __str__(self) -> str:
        matrix = self.matrix_flops_per_second
        units = f" ({_rate(matrix)}FLOP/s by matrix units)" if matrix is not None else ""
        arithmetic = f"multiplies and adds {_rate(self.flops_per_second)}FLOP/s{units}"
        return f"copies {_rate(self.bytes_per_second)}B/s, {arithmetic}"

    def floor_us(self, nbytes: int, operations: int, matrix_units: bool) -> float:
        """The least that this work takes by bandwidth and by the arithmetic that it uses, launching left aside."""
        peak = self.matrix_flops_per_second if matrix_units else self.flops_per_second
        assert peak is not None, "what uses matrix units runs where there are some"
        return 1e6 * max(nbytes / self.bytes_per_second, operations / peak)


def _rate(per_second: float) -> str:
    """4.25 T, 812 G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= size:
            return f"{per_second / size:,.3g} {unit}"
    return f"{per_second:,.3g} "


def uses_matrix_units(step: Step) -> bool:
    """Does a dispatch multiply by matrix units? Then their peak is its roof."""
    return "subgroupMatrixMultiplyAccumulate" in step.source


def matrix_dims(caps: DeviceCaps) -> Dims:
    """A chain of products of the shape that kernels take."""
    shape = matrix_shape(caps)
    assert shape is not None, "units_unsupported_reason was asked"
    sides = {"rows": MATRIX_SIDES[0] * shape.m, "columns": MATRIX_SIDES[1] * shape.n, "K": shape.k}
    return resolve("matrix_chain", {"count": MATRIX_COUNT, "rounds": MATRIX_ROUNDS, **sides})


def measure_roofline(device: Device) -> Roofline:
    """A second or so of copies, multiply-adds, products of matrices and empty dispatches."""
    fill = Filler()
    short = device.caps.policy.short_measurements
    count, rounds = (SHORT_FMA_VALUES, SHORT_FMA_ROUNDS) if short else (FMA_VALUES, FMA_ROUNDS)
    chain = resolve("fma_chain", {"count": count, "rounds": rounds})
    small = resolve("copy", {"count": LAUNCH_VALUES})
    works = [RoutedOp("copy", "vec4", small), RoutedOp("fma_chain", "vec4", chain)]
    if units_unsupported_reason(device.caps) is None:
        works.append(RoutedOp("matrix_chain", "matrix", matrix_dims(device.caps)))
    with closing(Clock(device)) as clock:
        bandwidth = copy_bandwidth(clock, fill)
        launched, *chained = time_in_turns(clock, [(work,) for work in works], fill)
    peaks = [OPS[work.op].flops(work.dims, 0) / seconds for work, seconds in zip(works[1:], chained, strict=True)]
    timestamp_us = _timestamp_us(device, small, launched * 1e6)
    return Roofline(bandwidth, peaks[0], launched * 1e6, timestamp_us, *peaks[1:])


def _timestamp_us(device: Device, dims: Dims, dispatch_us: float) -> float:
    """What a timestamp adds to a small dispatch."""
    if device.clock == WALL:
        return 0.0
    bound = device.bind(lower(choose("copy", dims, device.caps, None), dims, device.caps, {}))
    try:
        with device.traced("dispatch") as tracer:
            for _ in range(TIMESTAMPED_ROUNDS):
                device.submit([bound] * TIMESTAMPED_DISPATCHES)
        *_, last = tracer.collect()  # the first ones wake the GPU up
    finally:
        bound.release()
    return max(0.0, float(np.median(np.diff(last.ends))) / 1e3 - dispatch_us)
