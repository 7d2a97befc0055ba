"""Finds adapters and puts them in order of preference; the first half of the only room that imports wgpu."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeviceError
from .caps import KINDS, DeviceCaps

# Where Chromium's packages put SwiftShader, a software Vulkan driver without an entry of its own in the
# Vulkan loader's search path.
_SWIFTSHADER_ICDS = (
    "/usr/lib/chromium/vk_swiftshader_icd.json",
    "/usr/lib/chromium-browser/vk_swiftshader_icd.json",
    "/usr/lib64/chromium-browser/vk_swiftshader_icd.json",
    "/opt/google/chrome/vk_swiftshader_icd.json",
)
_KIND_OF_TYPE = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "CPU": "software"}
# OpenGL is wgpu's last resort: no subgroups, and software rasterisers hide behind it.
_BACKEND_ORDER = {"Metal": 0, "Vulkan": 0, "D3D12": 0, "WebGPU": 0}

WHAT_TO_INSTALL = """\
  Debian, Ubuntu   apt install libvulkan1 and your GPU's Vulkan driver: mesa-vulkan-drivers (AMD, Intel, and
                   software), nvidia-driver (NVIDIA); software only, faster: chromium-common (Debian)
  Fedora           dnf install vulkan-loader mesa-vulkan-drivers
  Arch             pacman -S vulkan-icd-loader and one of vulkan-radeon, vulkan-intel, nvidia-utils, vulkan-swrast
  Windows          the GPU vendor's current driver
  macOS            nothing: Metal is part of the system"""


def swiftshader_icd() -> str | None:
    """Path of an installed SwiftShader driver file, if there is one."""
    return next((path for path in _SWIFTSHADER_ICDS if Path(path).is_file()), None)


def _offer_swiftshader() -> None:
    """Let the Vulkan loader see SwiftShader beside the system's drivers, unless the user chose drivers."""
    chosen = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES")
    icd = swiftshader_icd()
    if icd and not any(os.environ.get(name) for name in chosen):
        os.environ["VK_ADD_DRIVER_FILES"] = icd


@dataclass(frozen=True)
class Adapter:
    """One adapter that wgpu found, with the caps of a device opened at its full limits."""

    number: int  # in order of preference, as `shaderlm devices` lists them
    caps: DeviceCaps
    native: Any


def _rank(caps: DeviceCaps) -> tuple[int, int]:
    """Smaller is preferred: a real GPU before software, a modern backend before OpenGL."""
    return (KINDS.index(caps.kind), _BACKEND_ORDER.get(caps.backend, 1))


def _facts(native: Any) -> DeviceCaps:
    info, features, limits = native.info, native.features, native.limits
    name = info["device"] or info["description"] or "unnamed adapter"
    kind = _KIND_OF_TYPE.get(info["adapter_type"], "other")
    if "llvmpipe" in name or "swiftshader" in name.lower():
        kind = "software"
    return DeviceCaps(
        name=name,
        kind=kind,
        backend=info["backend_type"],
        driver=" ".join(str(info[key]) for key in ("vendor", "description") if info[key]),
        f16="shader-f16" in features,
        subgroups="subgroup" in features,
        timestamps="timestamp-query" in features,
        max_binding=int(limits["max-storage-buffer-binding-size"]),
        max_buffer=int(limits["max-buffer-size"]),
        max_workgroups=int(limits["max-compute-workgroups-per-dimension"]),
        max_invocations=int(limits["max-compute-invocations-per-workgroup"]),
        max_workgroup_memory=int(limits["max-compute-workgroup-storage-size"]),
        max_storage_buffers=int(limits["max-storage-buffers-per-shader-stage"]),
        pass_timestamps="timestamp-query-inside-passes" in features,
    )


def adapters() -> list[Adapter]:
    """Every adapter of this machine, the preferred one first."""
    _offer_swiftshader()
    try:
        import wgpu  # late: the Vulkan loader reads its environment when wgpu starts
    except (ImportError, OSError) as problem:
        raise DeviceError(
            f"the wgpu package cannot be loaded: {problem}. Reinstall it: pip install 'wgpu>=0.32,<0.33'"
        ) from problem
    # An object that Ctrl-C caught in the middle of its making has no `_internal` yet. When it is forgotten, wgpu asks
    # for that, and Python prints a traceback that nobody can use.
    wgpu.GPUObjectBase._internal = None
    wgpu.GPUBuffer._mapped_memoryviews = ()
    found = [(_facts(native), native) for native in wgpu.gpu.enumerate_adapters_sync()]
    found.sort(key=lambda pair: _rank(pair[0]))
    return [Adapter(number, caps, native) for number, (caps, native) in enumerate(found)]


def choose(spec: str | int | None) -> Adapter:
    """The preferred adapter, or the preferred one that `spec` names: a kind, a number, or part of a name."""
    if spec is not None and (isinstance(spec, bool) or not isinstance(spec, (str, int))):
        raise DeviceError(f"a device is named by a kind, a number or part of a name; got {type(spec).__name__}")
    found = adapters()
    if not found:
        raise DeviceError(f"no WebGPU adapter was found. Install a GPU driver:\n{WHAT_TO_INSTALL}")
    if spec is None or spec == "auto":
        return found[0]
    wanted = str(spec).strip().lower()
    if wanted.isdecimal():  # a number is never part of a name: "16" is not the 16 of "LLVM 16.0.0"
        if int(wanted) < len(found):
            return found[int(wanted)]
        wanted = ""
    for adapter in found:
        caps = adapter.caps
        if wanted == caps.kind or (wanted and wanted in f"{caps.name} {caps.backend}".lower()):
            return adapter
    listing = "; ".join(f"{a.number}: {a.caps.name} ({a.caps.kind}, {a.caps.backend})" for a in found)
    raise DeviceError(
        f"no adapter matches {spec!r}. Give a kind (discrete, integrated, software), a number or part of a "
        f"name. Found: {listing}"
    )
