"""Adapters, devices, buffers, pipelines and timestamps. Nothing outside this room imports wgpu."""

from .adapters import WHAT_TO_INSTALL, Adapter, adapters
from .device import Device, Loaded, open_device, release
from .facts import WEBGPU_DEFAULT, Facts
from .mailbox import Letter
from .program import Array, Program, Slot, Step, as_bytes

__all__ = [
    "WEBGPU_DEFAULT",
    "WHAT_TO_INSTALL",
    "Adapter",
    "Array",
    "Device",
    "Facts",
    "Letter",
    "Loaded",
    "Program",
    "Slot",
    "Step",
    "adapters",
    "as_bytes",
    "open_device",
    "release",
]
