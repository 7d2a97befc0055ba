"""What a device can do at best, measured: bytes from memory, arithmetic, and launching a dispatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..bench.comparisons import Part
from ..bench.measure import copy_bandwidth, time_in_turns
from ..compile import lower
from ..compile.timing import Clock, Filler
from ..gpu import Device, release
from ..gpu.watch import WALL
from ..graph import resolve
from ..graph.cost import flops
from ..kernels import Dims, choose

FMA_VALUES, FMA_ROUNDS = 1 << 22, 512
SOFTWARE_FMA_VALUES, SOFTWARE_FMA_ROUNDS = 1 << 16, 16
LAUNCH_VALUES = 4  # copied by a dispatch that does next to nothing
STAMPED_DISPATCHES, STAMPED_ROUNDS = 200, 10


@dataclass(frozen=True)
class Roofline:
    """Copy bandwidth, f32 multiply-adds, one small dispatch that waits for the one before, and a stamp after it."""

    bytes_per_second: float
    flops_per_second: float
    dispatch_us: float
    stamp_us: float

    def floor_us(self, nbytes: int, operations: int) -> float:
        """The least that this work takes by the two roofs, launching left aside."""
        return 1e6 * max(nbytes / self.bytes_per_second, operations / self.flops_per_second)


def measure_roofline(device: Device) -> Roofline:
    """A second or so of copies, multiply-adds and empty dispatches."""
    fill = Filler()
    clock = Clock(device)
    software = device.caps.software
    count, rounds = (SOFTWARE_FMA_VALUES, SOFTWARE_FMA_ROUNDS) if software else (FMA_VALUES, FMA_ROUNDS)
    chain = resolve("fma_chain", {"count": count, "rounds": rounds})
    small = resolve("copy", {"count": LAUNCH_VALUES})
    try:
        bandwidth = copy_bandwidth(clock, fill)
        works = [(Part("fma_chain", "vec4", chain),), (Part("copy", "vec4", small),)]
        chained, launched = time_in_turns(clock, works, fill)
    finally:
        clock.close()
    operations = flops("fma_chain", chain, 0)
    return Roofline(bandwidth, operations / chained, launched * 1e6, _stamp_us(device, small, launched * 1e6))


def _stamp_us(device: Device, dims: Dims, dispatch_us: float) -> float:
    """What a timestamp adds to a small dispatch."""
    if device.clock == WALL:
        return 0.0
    loaded = device.load(lower(choose("copy", dims, device.caps, None), dims, device.caps, {}))
    try:
        with device.watched("dispatch") as watch:
            for _ in range(STAMPED_ROUNDS):
                device.submit([loaded] * STAMPED_DISPATCHES)
        *_, last = watch.collect()  # the first ones wake the GPU up
    finally:
        release(loaded)
    return max(0.0, float(np.median(np.diff(last.ends))) / 1e3 - dispatch_us)
