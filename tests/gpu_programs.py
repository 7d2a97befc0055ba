"""Small programs for tests of devices: no op of shaderlm is in them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from shaderlm.gpu import Copy, Device, PendingReadBack, Program, Slot, Step

from .policies import with_policy


def adding(label: str, one: str = "1.0", threads: str = "1u") -> str:
    """WGSL that adds one to the first value of a buffer."""
    return f"""
    @group(0) @binding(0) var<storage, read_write> out: array<f32>;
    @compute @workgroup_size({threads})
    fn main() {{ out[0] = out[0] + {one}; }}  // {label}
    """


def program(source: str, grid: tuple[int, int, int] = (1, 1, 1), nbytes: int = 16, steps: int = 1) -> Program:
    """A source as a program, over one buffer `out`."""
    step = Step("adding", source, (Slot("out", "storage"),), grid)
    return Program({"out": nbytes}, (step,) * steps, ("out",))


def number(pending: PendingReadBack | None) -> float:
    """The first value that comes back."""
    assert pending is not None
    return float(pending.wait().view(np.float32)[0])


def uses(device: Device) -> dict[str, Callable[[], object]]:
    """Everything that reaches the GPU."""
    bound = device.bind(program(adding("used")))
    out = bound.buffers["out"]
    fresh = Step("fresh", adding(f"fresh {time.monotonic()}"), (Slot("out", "storage"),), (1, 1, 1))
    device.caps = with_policy(device.caps, record_ahead=True)
    pool = device.command_pool([bound], (out, 16))
    assert pool is not None
    return {
        "buffer": lambda: device.buffer(16),
        "contents": lambda: device.buffer(np.zeros(4, np.uint32)),
        "read": lambda: device.read(out, 16),
        "write": lambda: device.write(out, np.zeros(4, np.uint32)),
        "copy": lambda: device.copy(Copy(out, out, 4, 0, 8)),
        "flush": device.flush,
        "compile": lambda: device.compile([fresh]),
        "bind": lambda: device.bind(program(adding("used")), {"out": out}),
        "run": lambda: device.run(program(adding("used"))),
        "submit": lambda: device.submit([bound]),
        "read back": lambda: device.submit([bound], (out, 16)),
        "pool": lambda: device.submit_from(pool),
        "time": lambda: device.time_wall([bound]),
    }
