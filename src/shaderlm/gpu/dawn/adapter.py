"""Adapters that Dawn finds, what they can do, and opening a device on one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import DeviceError
from .. import webgpu_h
from ..caps import DeviceCaps, MatrixShape
from ..processors import processors_of
from .device import DawnDevice
from .library import Library, library

# DeviceCaps' names for what may be switched off, and webgpu.h's.
_FEATURES = {
    "f16": "ShaderF16",
    "subgroups": "Subgroups",
    "subgroup_matrix": "ChromiumExperimentalSubgroupMatrix",
    "timestamps": "TimestampQuery",
    "pass_timestamps": "ChromiumExperimentalTimestampQueryInsidePasses",
}
_COMPONENTS = ("F32", "F16", "U32", "I32", "U8", "I8")
_ALWAYS = ("ImplicitDeviceSynchronization",)  # several threads compile, record and submit
_ON = (
    "enable_immediate_error_handling",  # errors come in the call that is to blame
    "wait_is_thread_safe",  # a thread that waits holds nobody up
    "disable_workgroup_init",  # kernels write before they read; SwiftShader takes ten times as long to compile it
)
_OFF = (
    "timestamp_quantization",  # to 65.5 µs
    "enable_spirv_validation",  # of what Tint writes: milliseconds for each kernel
)
# Checks of array bounds, and of the arguments of calls, which take a sixth of the time of recording and submitting.
# Divisions by 0 stay harmless: without that a decode step took 1 % longer on an H200.
_UNCHECKED = ("disable_robustness", "skip_validation")

_lock = threading.Lock()  # one thread at a time looks for adapters


def adapters(null: bool = False) -> list[DawnAdapter]:
    """Adapters of Vulkan, Metal and D3D12, in Dawn's order; or the null adapter, which compiles and runs nothing."""
    native = library()
    with _lock:
        found = [DawnAdapter(native, handle, ("dawn", i)) for i, handle in enumerate(native.adapter_handles())]
    wanted = ("Null",) if null else ("Vulkan", "Metal", "D3D12")
    return [adapter for adapter in found if adapter.caps.backend in wanted]


class DawnAdapter:
    """One adapter."""

    def __init__(self, native: Library, handle: Any, key: tuple[str, int]) -> None:
        self._native, self._ffi, self._lib = native, native.ffi, native.lib
        self._owner = webgpu_h.NativeHandle(handle, native.lib.wgpuAdapterRelease)
        self._handle, self.key = handle, key
        self._limits = self._ffi.new("WGPULimits *")
        if self._lib.wgpuAdapterGetLimits(handle, self._limits) != self._lib.WGPUStatus_Success:
            raise DeviceError("an adapter does not tell its limits")
        self.caps = self._get_caps()

    def _has(self, feature: str) -> bool:
        return bool(self._lib.wgpuAdapterHasFeature(self._handle, getattr(self._lib, f"WGPUFeatureName_{feature}")))

    def _info(self, chained: Any = None) -> Any:
        info = self._ffi.new("WGPUAdapterInfo *")
        if chained is not None:
            info.nextInChain = self._ffi.cast("WGPUChainedStruct *", chained)
        if self._lib.wgpuAdapterGetInfo(self._handle, info) != self._lib.WGPUStatus_Success:
            raise DeviceError("an adapter does not tell what it is")
        return info

    def _get_caps(self) -> DeviceCaps:
        info, text = self._info(), self._native.text
        vendor, name, description = text(info.vendor), text(info.device), text(info.description)
        self._lib.wgpuAdapterInfoFreeMembers(info[0])
        name = name or description or "unnamed adapter"
        backend = webgpu_h.BACKENDS.get(info.backendType, "unknown")
        found: dict[str, Any] = {
            cap: self._has(feature) for cap, feature in _FEATURES.items() if cap != "subgroup_matrix"
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
            implementation="dawn",
            matrix_shapes=self._matrix_shapes(),
            heap=self._heap(),
            **found,
        )

    def _matrix_shapes(self) -> tuple[MatrixShape, ...]:
        if not self._has(_FEATURES["subgroup_matrix"]):
            return ()
        lib = self._lib
        listed = self._ffi.new("WGPUAdapterPropertiesSubgroupMatrixConfigs *")
        listed.chain.sType = lib.WGPUSType_AdapterPropertiesSubgroupMatrixConfigs
        lib.wgpuAdapterInfoFreeMembers(self._info(listed)[0])
        names = {getattr(lib, f"WGPUSubgroupMatrixComponentType_{name}"): name.lower() for name in _COMPONENTS}
        shapes = [
            MatrixShape(names[each.componentType], names[each.resultComponentType], each.M, each.N, each.K)
            for each in (listed.configs[i] for i in range(listed.configCount))
            if each.componentType in names and each.resultComponentType in names
        ]
        lib.wgpuAdapterPropertiesSubgroupMatrixConfigsFreeMembers(listed[0])
        return tuple(dict.fromkeys(shapes))

    def _heap(self) -> int:
        """Bytes of the largest heap that is the device's own."""
        if not self._has("AdapterPropertiesMemoryHeaps"):
            return 0
        lib = self._lib
        listed = self._ffi.new("WGPUAdapterPropertiesMemoryHeaps *")
        listed.chain.sType = lib.WGPUSType_AdapterPropertiesMemoryHeaps
        lib.wgpuAdapterInfoFreeMembers(self._info(listed)[0])
        heaps = [listed.heapInfo[i] for i in range(listed.heapCount)]
        own = [int(each.size) for each in heaps if each.properties & lib.WGPUHeapProperty_DeviceLocal]
        lib.wgpuAdapterPropertiesMemoryHeapsFreeMembers(listed[0])
        return max(own, default=0)

    def open(self, features: Sequence[str], limits: Mapping[str, int], check_bounds: bool) -> DawnDevice:
        """A device with these features, and all limits of the adapter but those given here."""
        ffi, lib, native, state = self._ffi, self._lib, self._native, webgpu_h.State()
        wanted = ffi.new("WGPULimits *", self._limits[0])
        wanted.nextInChain = ffi.NULL
        webgpu_h.lower_limits(wanted, limits)
        asked = (*(_FEATURES[cap] for cap in features), *_ALWAYS)
        names = ffi.new("WGPUFeatureName[]", [getattr(lib, f"WGPUFeatureName_{name}") for name in asked])
        number = ffi.cast("void *", state.number)
        descriptor = ffi.new("WGPUDeviceDescriptor *")
        descriptor.nextInChain, kept = native.toggles(_ON if check_bounds else _ON + _UNCHECKED, _OFF)
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = len(names), names
        descriptor.requiredLimits = wanted
        descriptor.deviceLostCallbackInfo.mode = lib.WGPUCallbackMode_AllowSpontaneous
        descriptor.deviceLostCallbackInfo.callback = native.callbacks.on_lost
        descriptor.deviceLostCallbackInfo.userdata1 = number
        descriptor.uncapturedErrorCallbackInfo.callback = native.callbacks.on_error
        descriptor.uncapturedErrorCallbackInfo.userdata1 = number
        request = ffi.new("WGPURequestDeviceCallbackInfo *")
        request.mode, request.callback = lib.WGPUCallbackMode_WaitAnyOnly, native.callbacks.on_device
        request.userdata1 = number
        native.wait(lib.wgpuAdapterRequestDevice(self._handle, descriptor, request[0]))
        del kept
        found = native.callbacks.made.pop(state.number, None)
        if found is None or found[0] != lib.WGPURequestDeviceStatus_Success:
            raise DeviceError(f"{self.caps.name} could not be opened: {found[2] if found else 'it does not answer'}")
        return DawnDevice(native, found[1], state)
