"""What a device can do at best, measured: bytes from memory, arithmetic, and launching a dispatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compile import lower
from ..compile.timing import Clock, Filler
from ..compile.workload import RoutedOp, copy_bandwidth, time_in_turns
from ..gpu import Device
from ..gpu.tracer import WALL
from ..graph import OPS, resolve
from ..kernels import Dims, choose

FMA_VALUES, FMA_ROUNDS = 1 << 22, 512
SHORT_FMA_VALUES, SHORT_FMA_ROUNDS = 1 << 16, 16
LAUNCH_VALUES = 4  # copied by a dispatch that does next to nothing
TIMESTAMPED_DISPATCHES, TIMESTAMPED_ROUNDS = 200, 10


@dataclass(frozen=True)
class Roofline:
    """Copy bandwidth, f32 multiply-adds, one small dispatch that waits for the one before, and a timestamp after it."""

    bytes_per_second: float
    flops_per_second: float
    dispatch_us: float
    timestamp_us: float

    def floor_us(self, nbytes: int, operations: int) -> float:
        """The least that this work takes by the two roofs, launching left aside."""
        return 1e6 * max(nbytes / self.bytes_per_second, operations / self.flops_per_second)


def measure_roofline(device: Device) -> Roofline:
    """A second or so of copies, multiply-adds and empty dispatches."""
    fill = Filler()
    clock = Clock(device)
    short = device.caps.policy.short_measurements
    count, rounds = (SHORT_FMA_VALUES, SHORT_FMA_ROUNDS) if short else (FMA_VALUES, FMA_ROUNDS)
    chain = resolve("fma_chain", {"count": count, "rounds": rounds})
    small = resolve("copy", {"count": LAUNCH_VALUES})
    try:
        bandwidth = copy_bandwidth(clock, fill)
        works = [(RoutedOp("fma_chain", "vec4", chain),), (RoutedOp("copy", "vec4", small),)]
        chained, launched = time_in_turns(clock, works, fill)
    finally:
        clock.close()
    operations = OPS["fma_chain"].flops(chain, 0)
    return Roofline(bandwidth, operations / chained, launched * 1e6, _timestamp_us(device, small, launched * 1e6))


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
