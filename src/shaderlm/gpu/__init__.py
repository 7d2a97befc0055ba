"""Adapters, devices, buffers, pipelines and timestamps. Nothing outside this room imports wgpu."""

from .adapters import WHAT_TO_INSTALL, Adapter, adapters
from .caps import WEBGPU_DEFAULT, DeviceCaps
from .device import Device, open_device
from .mailbox import Letter
from .program import Array, Program, Slot, Step, as_bytes
from .record import Loaded, Prepared, release
from .stock import Stock

__all__ = [
    "WEBGPU_DEFAULT",
    "WHAT_TO_INSTALL",
    "Adapter",
    "Array",
    "Device",
    "DeviceCaps",
    "Letter",
    "Loaded",
    "Prepared",
    "Program",
    "Slot",
    "Step",
    "Stock",
    "adapters",
    "as_bytes",
    "open_device",
    "release",
]
