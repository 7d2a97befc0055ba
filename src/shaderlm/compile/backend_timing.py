"""Times the same work by each implementation of WebGPU: what `--backend auto` follows from then on.

The work is that of a chat: a prompt of 512 rows through some products, and 128 steps of one row, submitted and read
back as decoding does it. Each implementation takes the routes that it has for these shapes. Time is the host's, from
the first submission to the last result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

from ..errors import DeviceError, KernelError, RouteError
from ..gpu import Adapter, BoundProgram, Device, Implementation, PendingReadBack
from ..gpu.backends import Timing
from ..graph import resolve
from ..kernels import choose
from .execute import lower
from .timing import Clock, Filler, Operands, inputs_of


@dataclass(frozen=True)
class Work:
    """Rows of a prompt, steps of one row, products in a step, and their size."""

    rows: int
    steps: int
    products: int
    width: int
    repeated: int  # the least time counts


ON_GPU = Work(rows=512, steps=128, products=64, width=2048, repeated=3)
IN_SOFTWARE = Work(rows=8, steps=2, products=4, width=256, repeated=1)


def timings_by(adapters: Mapping[Implementation, Adapter]) -> dict[Implementation, Timing]:
    """The timing of each implementation; one that cannot run the work is left out."""
    timings: dict[Implementation, Timing] = {}
    for implementation, adapter in adapters.items():
        try:
            with Device(adapter) as device:
                timings[implementation] = _timing(device)
        except (DeviceError, KernelError, RouteError):
            continue
    return timings


def _timing(device: Device) -> Timing:
    work = IN_SOFTWARE if device.caps.policy.short_measurements else ON_GPU
    fill = Filler()
    with ExitStack() as buffers:
        clock = buffers.enter_context(closing(Clock(device)))
        prompt, step = (
            _products(device, buffers.enter_context(closing(Operands(device, fill, work.products))), work, rows)
            for rows in (work.rows, 1)
        )
        timings = []
        for _ in range(1 + work.repeated):
            clock.warm(0.1)
            started = time.perf_counter()
            _run(device, prompt, 1)
            read = time.perf_counter()
            _run(device, step, work.steps)
            timings.append(Timing(read - started, time.perf_counter() - read))
        repeated = timings[1:]  # the first time is for caches and clocks
        return Timing(min(each.prompt for each in repeated), min(each.decode for each in repeated))


def _products(device: Device, operands: Operands, work: Work, rows: int) -> list[BoundProgram]:
    """Products over weights of their own, one after the other."""
    dims = resolve("linear", {"tokens": rows, "K": work.width, "N": work.width, "format": "q4_0"})
    program = lower(choose("linear", dims, device.caps, None, "fast"), dims, device.caps, {})
    return operands.bind(program, dims, inputs_of("linear", program))


def _run(device: Device, programs: list[BoundProgram], steps: int) -> None:
    """Steps with as many under way as decoding has."""
    read_back = (programs[-1].buffers["out"], 4)
    pool = device.command_pool(programs, read_back) if steps > 1 else None
    waiting: deque[PendingReadBack] = deque()
    for _ in range(steps):
        pending = device.submit(programs, read_back) if pool is None else device.submit_from(pool)
        assert pending is not None
        waiting.append(pending)
        if len(waiting) > device.caps.policy.steps_ahead:
            waiting.popleft().wait()
    for pending in waiting:
        pending.wait()
    if pool is not None:
        pool.close()
