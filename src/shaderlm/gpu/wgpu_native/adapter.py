"""Adapters that wgpu-native finds, what they can do, and opening a device on one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...errors import DeviceError
from .. import webgpu_h
from ..caps import DeviceCaps
from ..processors import processors_of
from . import library as native
from .bindings import ffi
from .device import WgpuDevice

Backends = Literal["modern", "opengl"]

# DeviceCaps' names for what may be switched off, and the library's.
_FEATURES = {
    "f16": "WGPUFeatureName_ShaderF16",
    "subgroups": "WGPUNativeFeature_Subgroup",
    "timestamps": "WGPUFeatureName_TimestampQuery",
    "pass_timestamps": "WGPUNativeFeature_TimestampQueryInsidePasses",
}

_lock = threading.Lock()  # one thread at a time looks for adapters
_opengl: list[WgpuAdapter] = []


def adapters(backends: Backends) -> list[WgpuAdapter]:
    """Adapters of the modern backends (Vulkan, Metal, D3D12), or of OpenGL, in the library's order.

    They are looked for apart: starting OpenGL takes 0.1 s and loads Mesa's compilers into the process. Those of OpenGL
    are kept: wgpu-hal 29 aborts the process where one is released while another thread uses OpenGL.
    """
    with _lock:
        if backends == "modern":
            return _found(backends)
        if not _opengl:
            _opengl.extend(_found(backends))
        return list(_opengl)


def _found(backends: Backends) -> list[WgpuAdapter]:
    lib = native.library()
    modern = lib.WGPUInstanceBackend_Vulkan | lib.WGPUInstanceBackend_Metal | lib.WGPUInstanceBackend_DX12
    instance = native.instance(modern if backends == "modern" else lib.WGPUInstanceBackend_GL)
    count = lib.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, ffi.NULL)
    found = ffi.new("WGPUAdapter[]", count)
    lib.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, found)
    return [WgpuAdapter(instance, handle, (backends, i)) for i, handle in enumerate(found)]


class WgpuAdapter:
    """One adapter."""

    def __init__(self, instance: Any, handle: Any, key: tuple[str, int]) -> None:
        self._lib, self._instance = native.library(), instance
        self._handle = ffi.gc(handle, self._lib.wgpuAdapterRelease)
        self.key = key
        self._limits, self._native_limits = self._get_limits()
        self.caps = self._get_caps()

    def _get_limits(self) -> tuple[Any, Any]:
        more = ffi.new("WGPUNativeLimits *")
        more.chain.sType = self._lib.WGPUSType_NativeLimits
        limits = ffi.new("WGPULimits *")
        limits.nextInChain = ffi.cast("WGPUChainedStruct *", more)
        if self._lib.wgpuAdapterGetLimits(self._handle, limits) != self._lib.WGPUStatus_Success:
            raise DeviceError("an adapter does not tell its limits")
        return limits, more

    def _get_caps(self) -> DeviceCaps:
        info = ffi.new("WGPUAdapterInfo *")
        if self._lib.wgpuAdapterGetInfo(self._handle, info) != self._lib.WGPUStatus_Success:
            raise DeviceError("an adapter does not tell its name")
        vendor, name, description = (native.text(view) for view in (info.vendor, info.device, info.description))
        self._lib.wgpuAdapterInfoFreeMembers(info[0])
        name = name or description or "unnamed adapter"
        backend = webgpu_h.BACKENDS.get(info.backendType, "unknown")
        found: dict[str, Any] = {
            cap: bool(self._lib.wgpuAdapterHasFeature(self._handle, getattr(self._lib, feature)))
            for cap, feature in _FEATURES.items()
        }
        found |= {cap: int(getattr(self._limits, limit)) for cap, limit in webgpu_h.LIMITS.items()}
        return DeviceCaps(
            name=name,
            kind=webgpu_h.kind_of(info.adapterType, name),
            backend=backend,
            driver=" ".join(word for word in (vendor, description) if word),
            vendor=webgpu_h.VENDORS.get(info.vendorID, ""),
            processors=processors_of(name),
            subgroup_min=info.subgroupMinSize,
            subgroup_max=info.subgroupMaxSize,
            dot4=backend not in webgpu_h.WITHOUT_DOT4,
            offset_alignment=max(16, self._limits.minStorageBufferOffsetAlignment),
            **found,
        )

    def open(self, features: Sequence[str], limits: Mapping[str, int], check_bounds: bool) -> WgpuDevice:
        """A device with these features, and all limits of the adapter but those given here."""
        lib, state = self._lib, webgpu_h.State()
        wanted = ffi.new("WGPULimits *", self._limits[0])
        more = ffi.new("WGPUNativeLimits *")
        more.chain.sType = lib.WGPUSType_NativeLimits
        more.maxNonSamplerBindings = self._native_limits.maxNonSamplerBindings
        wanted.nextInChain = ffi.cast("WGPUChainedStruct *", more)
        webgpu_h.lower_limits(wanted, limits)
        names = ffi.new("WGPUFeatureName[]", [getattr(lib, _FEATURES[cap]) for cap in features])
        number = ffi.cast("void *", state.number)
        descriptor = ffi.new("WGPUDeviceDescriptor *")
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = len(names), names
        descriptor.requiredLimits = wanted
        descriptor.deviceLostCallbackInfo.mode = lib.WGPUCallbackMode_AllowSpontaneous
        descriptor.deviceLostCallbackInfo.callback = native.on_lost
        descriptor.deviceLostCallbackInfo.userdata1 = number
        descriptor.uncapturedErrorCallbackInfo.callback = native.on_error
        descriptor.uncapturedErrorCallbackInfo.userdata1 = number
        request = ffi.new("WGPURequestDeviceCallbackInfo *")
        request.mode, request.callback = lib.WGPUCallbackMode_AllowProcessEvents, native.on_device
        request.userdata1 = number
        lib.wgpuAdapterRequestDevice(self._handle, descriptor, request[0])
        lib.wgpuInstanceProcessEvents(self._instance)
        found = native.take_opened(state)
        if found is None or found[0] != lib.WGPURequestDeviceStatus_Success:
            raise DeviceError(f"{self.caps.name} could not be opened: {found[2] if found else 'it does not answer'}")
        return WgpuDevice(found[1], state, check_bounds)
