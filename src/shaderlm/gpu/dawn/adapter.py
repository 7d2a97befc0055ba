"""Adapters that Dawn finds, what they can do, and opening a device on one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..caps import MatrixShape
from ..drivers import DRIVERS
from ..webgpu_h import NativeAdapter
from .device import DawnDevice
from .library import Library, library

_COMPONENTS = ("F32", "F16", "U32", "I32", "U8", "I8")
_ALWAYS = ("WGPUFeatureName_ImplicitDeviceSynchronization",)  # several threads compile, record and submit
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
    DRIVERS.start()
    native = library()
    with _lock:
        listed = [DawnAdapter(native, handle, ("dawn", i)) for i, handle in enumerate(native.adapter_handles())]
    backends = ("Null",) if null else ("Vulkan", "Metal", "D3D12")
    return [adapter for adapter in listed if adapter.caps.backend in backends]


class DawnAdapter(NativeAdapter):
    """One adapter."""

    FEATURES: ClassVar = {
        "f16": "WGPUFeatureName_ShaderF16",
        "subgroups": "WGPUFeatureName_Subgroups",
        "subgroup_matrix": "WGPUFeatureName_ChromiumExperimentalSubgroupMatrix",
        "timestamps": "WGPUFeatureName_TimestampQuery",
        "pass_timestamps": "WGPUFeatureName_ChromiumExperimentalTimestampQueryInsidePasses",
    }

    def __init__(self, native: Library, handle: Any, key: tuple[str, int]) -> None:
        self._native = native
        super().__init__(native.callbacks, native.lib, handle, key)

    def _own_caps(self) -> dict[str, Any]:
        return {"implementation": "dawn", "matrix_shapes": self._matrix_shapes(), "heap": self._heap()}

    def _matrix_shapes(self) -> tuple[MatrixShape, ...]:
        if not self._has(self.FEATURES["subgroup_matrix"]):
            return ()
        lib = self.lib
        listed = self.ffi.new("WGPUAdapterPropertiesSubgroupMatrixConfigs *")
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
        if not self._has("WGPUFeatureName_AdapterPropertiesMemoryHeaps"):
            return 0
        lib = self.lib
        listed = self.ffi.new("WGPUAdapterPropertiesMemoryHeaps *")
        listed.chain.sType = lib.WGPUSType_AdapterPropertiesMemoryHeaps
        lib.wgpuAdapterInfoFreeMembers(self._info(listed)[0])
        heaps = [listed.heapInfo[i] for i in range(listed.heapCount)]
        local = [int(each.size) for each in heaps if each.properties & lib.WGPUHeapProperty_DeviceLocal]
        lib.wgpuAdapterPropertiesMemoryHeapsFreeMembers(listed[0])
        return max(local, default=0)

    def open(self, features: Sequence[str], limits: Mapping[str, int], check_bounds: bool) -> DawnDevice:
        """Bounds are checked, or not, in all kernels of the device."""
        names = (*(self.FEATURES[cap] for cap in features), *_ALWAYS)
        toggles, owners = self._native.toggles(_ON if check_bounds else _ON + _UNCHECKED, _OFF)
        mode = self.lib.WGPUCallbackMode_WaitAnyOnly
        handle, state = self._request_device(names, limits, toggles, mode, self._native.wait)
        del owners
        return DawnDevice(self._native, handle, state)
