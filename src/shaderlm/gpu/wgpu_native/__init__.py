"""WebGPU by wgpu-native: the library of the package wgpu, called through bindings of our own.

    declarations.py  the part of its C interface that is used, as tables
    generate.py      writes bindings.py from them
    library.py       finds and loads the library, makes instances, and receives its callbacks
    adapter.py       adapters, their capabilities, and opening a device
    device.py        buffers, pipelines, encoders, submission, mapping: a `gpu.webgpu_h.NativeDevice`

Of the package wgpu nothing but the library is used. Its Python classes take a second to start and 6 to 8 µs to record a
dispatch; with handles that are kept it is 2 µs, and a token takes hundreds.

What the library does not do well, as of version 29: `wgpuQueueSubmitForIndex` ends the process where it finds the
device lost or a buffer destroyed, and so does reading a range that is not mapped. `Device` looks before it submits. A
loss that `submit` itself is the first to notice cannot be survived. While one thread waits for a submission, another
one that submits is held up until that is done: one thread should do both.
"""

from .adapter import adapters

__all__ = ["adapters"]
