"""Finds adapters by each implementation of WebGPU, and puts them in order of preference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import DeviceError
from . import dawn, wgpu_native
from .backends import Backend, checked, choice
from .caps import KINDS, DeviceCaps
from .webgpu_h import NativeAdapter

WHAT_TO_INSTALL = """\
  Debian, Ubuntu   apt install libvulkan1 and your GPU's Vulkan driver: mesa-vulkan-drivers (AMD, Intel, and
                   software), nvidia-driver (NVIDIA); software only, faster: chromium-common (Debian)
  Fedora           dnf install vulkan-loader mesa-vulkan-drivers
  Arch             pacman -S vulkan-icd-loader and one of vulkan-radeon, vulkan-intel, nvidia-utils, vulkan-swrast
  Windows          the GPU vendor's current driver
  macOS            nothing: Metal is part of the system"""
_NO_ADAPTER = f"no WebGPU adapter was found. Install a GPU driver:\n{WHAT_TO_INSTALL}"


@dataclass(frozen=True)
class Adapter:
    """One adapter, with the capabilities that it reports. A device opened on it may know better: it was probed."""

    caps: DeviceCaps
    native: NativeAdapter
    reason: str = "it was asked for"  # why this implementation is taken
    other: DeviceCaps | None = None  # the same adapter by the implementation that is not taken


def _rank(adapter: Adapter) -> tuple[bool, bool, int]:
    """Smaller is preferred: a real GPU before software, a modern backend before OpenGL (which has no subgroups)."""
    caps = adapter.caps
    return (caps.software, caps.backend.startswith("OpenGL"), KINDS.index(caps.kind))


def _of_dawn() -> list[Adapter]:
    """Those of Vulkan, Metal and D3D12; Dawn has no OpenGL here."""
    return sorted((Adapter(native.caps, native) for native in dawn.adapters()), key=_rank)


def _of_dawn_if_there() -> list[Adapter] | str:
    """The same, or why Dawn cannot be used."""
    try:
        return dawn.missing() or _of_dawn()
    except DeviceError as problem:
        return str(problem)


def _of_wgpu(reason: str = Adapter.reason) -> list[Adapter]:
    """Those of Vulkan, Metal and D3D12. Real GPUs among them come before everything else."""
    return sorted((Adapter(native.caps, native, reason) for native in wgpu_native.adapters("modern")), key=_rank)


def _merged(of_wgpu: Sequence[Adapter], of_dawn: Sequence[Adapter]) -> list[Adapter]:
    """Each adapter once, by the implementation that is to be taken for it; the same name twice is two adapters."""

    def named(listed: Sequence[Adapter]) -> dict[tuple[str, str, int], Adapter]:
        seen: Counter[tuple[str, str]] = Counter()
        keyed = {}
        for adapter in listed:
            name = (adapter.caps.name, adapter.caps.backend)
            keyed[*name, seen[name]] = adapter
            seen[name] += 1
        return keyed

    both, merged = named(of_dawn), named(of_wgpu)
    for key, by_dawn in both.items():
        if key not in merged:
            merged[key] = Adapter(by_dawn.caps, by_dawn.native, "wgpu does not find this adapter")
            continue
        fastest = choice(by_dawn.caps)
        pair = (by_dawn, merged[key]) if fastest.implementation == "dawn" else (merged[key], by_dawn)
        merged[key] = Adapter(pair[0].caps, pair[0].native, fastest.reason, pair[1].caps)
    return sorted(merged.values(), key=_rank)


def _modern(backend: Backend) -> list[Adapter]:
    if backend == "dawn":
        return _of_dawn()
    if backend == "wgpu":
        return _of_wgpu()
    by_dawn = _of_dawn_if_there()
    if isinstance(by_dawn, str):
        return _of_wgpu(by_dawn)
    return _merged(_of_wgpu("Dawn does not find this adapter"), by_dawn)


def adapters(backend: Backend = "auto") -> list[Adapter]:
    """Every adapter of this machine, the preferred one first."""
    modern = _modern(checked(backend))
    if backend == "dawn":
        return modern
    reason = Adapter.reason if backend == "wgpu" else "Dawn has no OpenGL"
    opengl = [Adapter(native.caps, native, reason) for native in wgpu_native.adapters("opengl")]
    return sorted([*modern, *opengl], key=_rank)


def preferred_adapter(backend: Backend = "auto") -> Adapter | None:
    """The first of `adapters`; what is slow to start is left alone where it is not needed.

    OpenGL takes long where there is a GPU without it, and so does wgpu where Dawn is going to be taken.
    """
    by_dawn = _of_dawn_if_there() if checked(backend) == "auto" else []
    if by_dawn and not isinstance(by_dawn, str) and not by_dawn[0].caps.software:
        fastest = choice(by_dawn[0].caps)
        if fastest.implementation == "dawn":
            return Adapter(by_dawn[0].caps, by_dawn[0].native, fastest.reason)
    modern = _modern(backend)
    if modern and not modern[0].caps.software:
        return modern[0]
    return next(iter(adapters(backend)), None)


def choose(spec: str | int | None, backend: Backend = "auto") -> Adapter:
    """The preferred adapter, or the preferred one that `spec` names: a kind, a number, or part of a name."""
    if spec is not None and (isinstance(spec, bool) or not isinstance(spec, (str, int))):
        raise DeviceError(f"a device is named by a kind, a number or part of a name; got {type(spec).__name__}")
    checked(backend)
    if spec is None or spec == "auto":
        best = preferred_adapter(backend)
        if best is None:
            raise DeviceError(_NO_ADAPTER)
        return best
    word = str(spec).strip().lower()
    modern = _modern(backend)
    if word.isdecimal():  # a number is never part of a name: "16" is not the 16 of "LLVM 16.0.0"
        # In the whole list real GPUs come first.
        match = _numbered(int(word), [adapter for adapter in modern if not adapter.caps.software])
        match = match or _numbered(int(word), adapters(backend))
    else:
        match = _named(word, modern) or _named(word, adapters(backend))
    if match is not None:
        return match
    listed = adapters(backend)
    if not listed:
        raise DeviceError(_NO_ADAPTER)
    listing = "; ".join(f"{i}: {a.caps.name} ({a.caps.kind}, {a.caps.backend})" for i, a in enumerate(listed))
    raise DeviceError(
        f"no adapter matches {spec!r}. Give auto, cpu, numpy, a kind (discrete, integrated, software), a number or "
        f"part of a name. Found: {listing}"
    )


def _numbered(number: int, listed: Sequence[Adapter]) -> Adapter | None:
    return listed[number] if number < len(listed) else None


def _named(word: str, listed: Sequence[Adapter]) -> Adapter | None:
    for adapter in listed:
        caps = adapter.caps
        if word == caps.kind or (word and word in f"{caps.name} {caps.backend}".lower()):
            return adapter
    return None
