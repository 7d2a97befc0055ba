"""Finds adapters and puts them in order of preference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import DeviceError
from . import wgpu_native
from .caps import KINDS, DeviceCaps
from .native import NativeAdapter

WHAT_TO_INSTALL = """\
  Debian, Ubuntu   apt install libvulkan1 and your GPU's Vulkan driver: mesa-vulkan-drivers (AMD, Intel, and
                   software), nvidia-driver (NVIDIA); software only, faster: chromium-common (Debian)
  Fedora           dnf install vulkan-loader mesa-vulkan-drivers
  Arch             pacman -S vulkan-icd-loader and one of vulkan-radeon, vulkan-intel, nvidia-utils, vulkan-swrast
  Windows          the GPU vendor's current driver
  macOS            nothing: Metal is part of the system"""


@dataclass(frozen=True)
class Adapter:
    """One adapter, with the capabilities that it reports. A device opened on it may know better: it was probed."""

    caps: DeviceCaps
    native: NativeAdapter


def _rank(adapter: Adapter) -> tuple[bool, bool, int]:
    """Smaller is preferred: a real GPU before software, a modern backend before OpenGL (which has no subgroups)."""
    caps = adapter.caps
    return (caps.software, caps.backend.startswith("OpenGL"), KINDS.index(caps.kind))


def _modern() -> list[Adapter]:
    """Adapters of Vulkan, Metal and D3D12. Real GPUs among them come before everything else."""
    return sorted((Adapter(native.caps, native) for native in wgpu_native.adapters("modern")), key=_rank)


def adapters() -> list[Adapter]:
    """Every adapter of this machine, the preferred one first."""
    opengl = [Adapter(native.caps, native) for native in wgpu_native.adapters("opengl")]
    return sorted([*_modern(), *opengl], key=_rank)


def preferred_adapter() -> Adapter | None:
    """The first of `adapters`; OpenGL, which takes long to start, is left alone where there is a GPU without it."""
    found = _modern()
    if found and not found[0].caps.software:
        return found[0]
    return next(iter(adapters()), None)


def choose(spec: str | int | None) -> Adapter:
    """The preferred adapter, or the preferred one that `spec` names: a kind, a number, or part of a name."""
    if spec is not None and (isinstance(spec, bool) or not isinstance(spec, (str, int))):
        raise DeviceError(f"a device is named by a kind, a number or part of a name; got {type(spec).__name__}")
    if spec is None or spec == "auto":
        best = preferred_adapter()
        if best is None:
            raise DeviceError(f"no WebGPU adapter was found. Install a GPU driver:\n{WHAT_TO_INSTALL}")
        return best
    wanted = str(spec).strip().lower()
    modern = _modern()
    if wanted.isdecimal():  # a number is never part of a name: "16" is not the 16 of "LLVM 16.0.0"
        # In the whole list they come first.
        match = _numbered(int(wanted), [adapter for adapter in modern if not adapter.caps.software])
        match = match or _numbered(int(wanted), adapters())
    else:
        match = _named(wanted, modern) or _named(wanted, adapters())
    return match or _unknown(spec)


def _numbered(number: int, found: Sequence[Adapter]) -> Adapter | None:
    return found[number] if number < len(found) else None


def _named(wanted: str, found: Sequence[Adapter]) -> Adapter | None:
    for adapter in found:
        caps = adapter.caps
        if wanted == caps.kind or (wanted and wanted in f"{caps.name} {caps.backend}".lower()):
            return adapter
    return None


def _unknown(spec: str | int) -> Adapter:
    found = adapters()
    if not found:
        raise DeviceError(f"no WebGPU adapter was found. Install a GPU driver:\n{WHAT_TO_INSTALL}")
    listing = "; ".join(f"{i}: {a.caps.name} ({a.caps.kind}, {a.caps.backend})" for i, a in enumerate(found))
    raise DeviceError(
        f"no adapter matches {spec!r}. Give auto, cpu, a kind (discrete, integrated, software), a number or part of a "
        f"name. Found: {listing}"
    )
