"""Adapters that wgpu-native finds, what they can do, and opening a device on one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from ..drivers import DRIVERS
from ..webgpu_h import NativeAdapter
from . import library as native
from .bindings import ffi
from .device import WgpuDevice

Backends = Literal["modern", "opengl"]

_lock = threading.Lock()  # one thread at a time looks for adapters
_opengl: list[WgpuAdapter] = []


def adapters(backends: Backends) -> list[WgpuAdapter]:
    """Adapters of the modern backends (Vulkan, Metal, D3D12), or of OpenGL, in the library's order.

    They are looked for apart: starting OpenGL takes 0.1 s and loads Mesa's compilers into the process. Those of OpenGL
    are kept: wgpu-hal 29 aborts the process where one is released while another thread uses OpenGL.
    """
    DRIVERS.start()
    with _lock:
        if backends == "modern":
            return _enumerate(backends)
        if not _opengl:
            _opengl.extend(_enumerate(backends))
        return list(_opengl)


def _enumerate(backends: Backends) -> list[WgpuAdapter]:
    lib = native.library()
    modern = lib.WGPUInstanceBackend_Vulkan | lib.WGPUInstanceBackend_Metal | lib.WGPUInstanceBackend_DX12
    instance = native.instance(modern if backends == "modern" else lib.WGPUInstanceBackend_GL)
    count = lib.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, ffi.NULL)
    handles = ffi.new("WGPUAdapter[]", count)
    lib.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, handles)
    return [WgpuAdapter(instance, handle, (backends, i)) for i, handle in enumerate(handles)]


class WgpuAdapter(NativeAdapter):
    """One adapter."""

    FEATURES: ClassVar = {
        "f16": "WGPUFeatureName_ShaderF16",
        "subgroups": "WGPUNativeFeature_Subgroup",
        "timestamps": "WGPUFeatureName_TimestampQuery",
        "pass_timestamps": "WGPUNativeFeature_TimestampQueryInsidePasses",
    }

    def __init__(self, instance: Any, handle: Any, key: tuple[str, int]) -> None:
        self._instance = instance
        super().__init__(native.callbacks, native.library(), handle, key)
        limits = self._native_limits  # those of features that nobody asks for are left at their defaults
        limits.maxBindingArrayElementsPerShaderStage = limits.maxBindingArraySamplerElementsPerShaderStage = 0
        limits.maxMultiviewViewCount = 0

    def _chained_limits(self) -> Any:
        self._native_limits = ffi.new("WGPUNativeLimits *")
        self._native_limits.chain.sType = self.lib.WGPUSType_NativeLimits
        return ffi.cast("WGPUChainedStruct *", self._native_limits)

    def open(self, features: Sequence[str], limits: Mapping[str, int], check_bounds: bool) -> WgpuDevice:
        """Bounds are checked, or not, by kernel."""

        def wait(_: Any) -> None:
            self.lib.wgpuInstanceProcessEvents(self._instance)

        names, mode = [self.FEATURES[cap] for cap in features], self.lib.WGPUCallbackMode_AllowProcessEvents
        handle, state = self._request_device(names, limits, ffi.NULL, mode, wait)
        return WgpuDevice(handle, state, check_bounds)
