"""From Ray's GPU ids to WebGPU adapters.

Ray isolates GPUs by CUDA_VISIBLE_DEVICES and the like. Vulkan, Metal and D3D12 ignore these: every process sees every
adapter. So the id chooses the adapter, and two replicas with whole GPUs of a machine have different ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import DeviceError
from ..gpu import DeviceCaps


def device_of(gpu_ids: Sequence[str], adapters: Sequence[DeviceCaps]) -> str:
    """The device, as `load(device=...)` takes it: a number in the list of adapters that compute in hardware.

    gpu_ids: of one replica, as Ray says them. adapters: all of the machine, in the order of `gpu.adapters()`, which is
    the same in every process.
    """
    if len(gpu_ids) != 1:
        raise DeviceError(f"an engine has one device, and Ray gave the GPUs {', '.join(gpu_ids) or 'none'}")
    numbers = gpus_of(adapters)
    hardware = [caps for caps in adapters if not caps.software]
    listing = "; ".join(f"{i}: {hardware[n].name} ({hardware[n].backend})" for i, n in enumerate(numbers)) or "none"
    if not gpu_ids[0].isdecimal():
        raise DeviceError(
            f"Ray's GPU id must be a number, got {gpu_ids[0]!r}; start Ray with --num-gpus {len(numbers)}"
        )
    gpu = int(gpu_ids[0])
    if gpu >= len(numbers):
        raise DeviceError(
            f"Ray gave the GPU {gpu}, and WebGPU finds {len(numbers)} here: {listing}. "
            f"Install the GPU's Vulkan driver, or start Ray with --num-gpus {len(numbers)}"
        )
    return str(numbers[gpu])


def gpus_of(adapters: Sequence[DeviceCaps]) -> list[int]:
    """Each GPU once, as its number among the adapters in hardware: those of the first backend.

    The processor's own GPU counts where there is no other. Equal GPUs have equal capabilities, and differ in number.
    """
    hardware = [caps for caps in adapters if not caps.software]
    best = [number for number, caps in enumerate(hardware) if caps.backend == hardware[0].backend]
    return [number for number in best if hardware[number].kind == "discrete"] or best
