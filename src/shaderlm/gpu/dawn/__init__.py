"""WebGPU by Dawn, the implementation of Chrome: the library of the package wgpudawn, called by its C functions.

    library.py  finds and loads the library, makes the instance, and receives its callbacks
    adapter.py  adapters, their capabilities, and opening a device
    device.py   shaders, submission, mapping: a `gpu.webgpu_h.NativeDevice`

The package is optional and nothing of it is imported before an adapter is looked for. Of it nothing but the compiled
module is used, which knows the C types by itself: its Python classes wait for results in a way that fails where several
threads wait.

Dawn gives what wgpu-native does not: products of matrices by subgroups, and the sizes of memory heaps. A command buffer
is translated for the driver when it is submitted, without Python's lock; `finish` costs nothing. Checks of array bounds
are switched for a whole device.
"""

from .adapter import adapters
from .library import missing

__all__ = ["adapters", "missing"]
