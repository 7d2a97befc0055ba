"""A boundary around WebGPU: what a GPU can do, memory, kernels, submissions, results, time. Nothing outside of this
package touches an implementation of WebGPU, and nothing in it knows ops or models.

    begin_opening("auto")                             # drivers start in another thread
    device = open_device("auto")                      # shared; or Device(adapter), owned: close() it
    device = open_device("auto", backend="dawn")      # by an implementation of WebGPU: wgpu, dawn or auto
    device.caps, device.caps.policy                   # what it can do; what is decided from that
    a = device.buffer(array_or_nbytes)                # a Buffer: size, destroy()
    device.write(a, array, offset)                    # before whatever is submitted later
    device.read(a, nbytes, offset)                    # waits
    device.copy(Copy(a, b, nbytes, 0, 256), …)        # one submission; within one buffer too
    device.compile(program.steps)                     # ahead of time, on all cores
    bound = device.bind(program, {"weight": a})       # a BoundProgram: buffers, pipelines, bind groups; release()
    pending = device.submit([bound, …], read_back=(a, nbytes))
    pending.wait()                                    # the bytes, once; or pending.discard()
    pool = device.command_pool([bound, …], read_back) # recorded ahead by other threads, or None (policy.record_ahead)
    pending = device.submit_from(pool)                # pool.close() when its programs are of no more use
    with device.traced("dispatch") as tracer: …       # then tracer.collect(): host times and timestamps
    device.time([bound]), device.time_wall([bound])   # seconds

Bytes of copies and writes, and all offsets, are multiples of 4. A `Slot` may bind a part of a buffer, at a multiple of
`caps.offset_alignment`. What a GPU refuses is a `DeviceError`; a kernel that does not compile is a `KernelError`. A
device that was lost says so in every call; the next `open_device` opens a new one.

Lowest first: `program` (plain data), `policy`, `caps`, `drivers`, `webgpu_h` (what an implementation has to have),
`wgpu_native` and `dawn`, `backends`, `adapters`, `read_back`, `recording`, `queue`,
`command_pool`, `pipelines`, `tracer`, `lanes`, `device`, `opening`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .adapters import WHAT_TO_INSTALL, Adapter, adapters, preferred_adapter
from .backends import Backend
from .backends import missing as backend_missing
from .backends import versions as implementation_versions
from .caps import WEBGPU_DEFAULT, DeviceCaps, Implementation, MatrixShape
from .opening import begin_opening, open_device
from .policy import DevicePolicy
from .webgpu_h import Buffer

if TYPE_CHECKING:
    from .command_pool import CommandBufferPool
    from .device import Copy, Device
    from .program import Array, Program, Slot, Step, as_bytes
    from .read_back import PendingReadBack
    from .recording import BoundProgram, CommandBuffer

# Module → names, imported when one is first used: these import NumPy, and drivers can start meanwhile.
_LAZY = {
    ".command_pool": ("CommandBufferPool",),
    ".device": ("Copy", "Device"),
    ".program": ("Array", "Program", "Slot", "Step", "as_bytes"),
    ".read_back": ("PendingReadBack",),
    ".recording": ("BoundProgram", "CommandBuffer"),
}

__all__ = [
    "WEBGPU_DEFAULT",
    "WHAT_TO_INSTALL",
    "Adapter",
    "Array",
    "Backend",
    "BoundProgram",
    "Buffer",
    "CommandBuffer",
    "CommandBufferPool",
    "Copy",
    "Device",
    "DeviceCaps",
    "DevicePolicy",
    "Implementation",
    "MatrixShape",
    "PendingReadBack",
    "Program",
    "Slot",
    "Step",
    "adapters",
    "as_bytes",
    "backend_missing",
    "begin_opening",
    "implementation_versions",
    "open_device",
    "preferred_adapter",
]


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
