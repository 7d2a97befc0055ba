"""Adapters that wgpu-native finds, what they can do, and opening a device on one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...errors import DeviceError
from ..caps import DeviceCaps
from . import library as native
from .bindings import ffi
from .device import WgpuDevice

Backends = Literal["modern", "opengl"]

_KIND_OF_TYPE = {1: "discrete", 2: "integrated", 3: "software"}
_BACKENDS = {2: "WebGPU", 3: "D3D11", 4: "D3D12", 5: "Metal", 6: "Vulkan", 7: "OpenGL", 8: "OpenGLES"}
# By the number that PCI or Khronos gave.
_VENDORS = {
    0x1002: "amd",
    0x106B: "apple",
    0x10DE: "nvidia",
    0x13B5: "arm",
    0x1414: "microsoft",
    0x14E4: "broadcom",
    0x1AE0: "google",
    0x5143: "qualcomm",
    0x8086: "intel",
    0x10005: "mesa",
}
# Metal and OpenGL have no instruction for dot products of bytes: naga writes four multiplications.
_WITHOUT_DOT4 = ("Metal", "OpenGL", "OpenGLES")

# DeviceCaps' names for what may be switched off or lowered, and the library's.
_FEATURES = {
    "f16": "WGPUFeatureName_ShaderF16",
    "subgroups": "WGPUNativeFeature_Subgroup",
    "timestamps": "WGPUFeatureName_TimestampQuery",
    "pass_timestamps": "WGPUNativeFeature_TimestampQueryInsidePasses",
}
_LIMITS = {
    "max_binding": "maxStorageBufferBindingSize",
    "max_buffer": "maxBufferSize",
    "max_workgroups": "maxComputeWorkgroupsPerDimension",
    "max_invocations": "maxComputeInvocationsPerWorkgroup",
    "max_workgroup_memory": "maxComputeWorkgroupStorageSize",
    "max_storage_buffers": "maxStorageBuffersPerShaderStage",
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
        kind = _KIND_OF_TYPE.get(info.adapterType, "other")
        if "llvmpipe" in name or "swiftshader" in name.lower():
            kind = "software"
        backend = _BACKENDS.get(info.backendType, "unknown")
        found: dict[str, Any] = {
            cap: bool(self._lib.wgpuAdapterHasFeature(self._handle, getattr(self._lib, feature)))
            for cap, feature in _FEATURES.items()
        }
        found |= {cap: int(getattr(self._limits, limit)) for cap, limit in _LIMITS.items()}
        return DeviceCaps(
            name=name,
            kind=kind,
            backend=backend,
            driver=" ".join(word for word in (vendor, description) if word),
            vendor=_VENDORS.get(info.vendorID, ""),
            subgroup_min=info.subgroupMinSize,
            subgroup_max=info.subgroupMaxSize,
            dot4=backend not in _WITHOUT_DOT4,
            offset_alignment=max(16, self._limits.minStorageBufferOffsetAlignment),
            **found,
        )

    def open(self, features: Sequence[str], limits: Mapping[str, int]) -> WgpuDevice:
        """A device with these features, and all limits of the adapter but those given here."""
        lib, state = self._lib, native.State()
        wanted = ffi.new("WGPULimits *", self._limits[0])
        more = ffi.new("WGPUNativeLimits *")
        more.chain.sType = lib.WGPUSType_NativeLimits
        more.maxNonSamplerBindings = self._native_limits.maxNonSamplerBindings
        wanted.nextInChain = ffi.cast("WGPUChainedStruct *", more)
        for cap, value in limits.items():
            setattr(wanted, _LIMITS[cap], value)
        for axis in "XYZ":
            field = f"maxComputeWorkgroupSize{axis}"
            setattr(wanted, field, min(getattr(wanted, field), wanted.maxComputeInvocationsPerWorkgroup))
        names = ffi.new("WGPUFeatureName[]", [getattr(lib, _FEATURES[cap]) for cap in features])
        number = ffi.cast("void *", state.number)
        described = ffi.new("WGPUDeviceDescriptor *")
        described.requiredFeatureCount, described.requiredFeatures = len(names), names
        described.requiredLimits = wanted
        described.deviceLostCallbackInfo.mode = lib.WGPUCallbackMode_AllowSpontaneous
        described.deviceLostCallbackInfo.callback = native.on_lost
        described.deviceLostCallbackInfo.userdata1 = number
        described.uncapturedErrorCallbackInfo.callback = native.on_error
        described.uncapturedErrorCallbackInfo.userdata1 = number
        request = ffi.new("WGPURequestDeviceCallbackInfo *")
        request.mode, request.callback = lib.WGPUCallbackMode_AllowProcessEvents, native.on_device
        request.userdata1 = number
        lib.wgpuAdapterRequestDevice(self._handle, described, request[0])
        lib.wgpuInstanceProcessEvents(self._instance)
        found = native.take_opened(state)
        if found is None or found[0] != lib.WGPURequestDeviceStatus_Success:
            raise DeviceError(f"{self.caps.name} could not be opened: {found[2] if found else 'it does not answer'}")
        return WgpuDevice(found[1], state)
