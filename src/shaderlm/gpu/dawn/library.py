"""Finds and loads Dawn's library, makes its instance, and receives its callbacks."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import DeviceError
from ..packages import folder_of, version_of
from ..swiftshader import offered_to_vulkan
from ..webgpu_h import Callbacks

PACKAGE, VERSION = "wgpudawn", "0.32.0.4"  # experimental functions may change with any version
INSTALL = f"pip install {PACKAGE}=={VERSION}"
FOREVER = (1 << 64) - 1  # nanoseconds


def missing() -> str | None:
    """Why Dawn cannot be used, in one line; None if it can."""
    version = version_of(PACKAGE)
    if version is None:
        return f"the package {PACKAGE} is not installed: {INSTALL}"
    return None if version == VERSION else f"{PACKAGE} {version} is installed, shaderlm needs {VERSION}: {INSTALL}"


def _module() -> Any:
    """The compiled module of the package. The package itself takes 0.2 s to import, and nothing of it is used."""
    loaded = sys.modules.get(f"{PACKAGE}._lib._wgpu_dawn")
    if loaded is not None:
        return loaded
    folder = folder_of(PACKAGE)
    files = sorted((folder / "_lib").glob("_wgpu_dawn.*")) if folder is not None else []
    path = next((path for path in files if path.suffix in (".so", ".pyd")), None)
    if path is None:
        raise ImportError(f"there is no _wgpu_dawn in {folder}")
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}._lib._wgpu_dawn", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in set(sys.modules) - before:  # who imports the package finds everything as it should be
        if name.startswith(f"{PACKAGE}."):
            del sys.modules[name]
    return module


class DawnCallbacks(Callbacks):
    """The package has some too, which its Python classes set for the whole process."""

    def __init__(self, ffi: Any) -> None:
        super().__init__(ffi)
        self.on_pipeline = self.answering("WGPUCreateComputePipelineAsyncCallback")
        self.on_done = self.declared("WGPUQueueWorkDoneCallback")(lambda *_: None)
        self.on_mapped = self.declared("WGPUBufferMapCallback")(lambda *_: None)


class Library:
    """The library with its callbacks and its instance."""

    def __init__(self) -> None:
        reason = missing()
        if reason is not None:
            raise DeviceError(f"Dawn cannot be used: {reason}")
        try:
            module = _module()
        except ImportError as problem:
            raise DeviceError(f"Dawn cannot be loaded: {problem}. Reinstall it: {INSTALL}") from problem
        self.ffi, self.lib = module.ffi, module.lib
        self.callbacks = DawnCallbacks(self.ffi)
        self.instance = self._new_instance()
        self._vulkan_starts = False  # is not known before adapters are looked for

    def toggles(self, on: Sequence[str], off: Sequence[str] = ()) -> tuple[Any, Any]:
        """Switches of Dawn, to be chained to a descriptor; and what must be kept as long as that is used."""
        ffi = self.ffi
        descriptor = ffi.new("WGPUDawnTogglesDescriptor *")
        descriptor.chain.sType = self.lib.WGPUSType_DawnTogglesDescriptor
        names = [[ffi.new("char[]", name.encode()) for name in which] for which in (on, off)]
        arrays = [ffi.new("const char *[]", which) for which in names]
        descriptor.enabledToggleCount, descriptor.enabledToggles = len(on), arrays[0]
        descriptor.disabledToggleCount, descriptor.disabledToggles = len(off), arrays[1]
        return ffi.cast("WGPUChainedStruct *", descriptor), (descriptor, names, arrays)

    def _new_instance(self) -> Any:
        lib = self.lib
        names = (lib.WGPUInstanceFeatureName_TimedWaitAny, lib.WGPUInstanceFeatureName_MultipleDevicesPerAdapter)
        features = self.ffi.new("WGPUInstanceFeatureName[]", names)
        descriptor = self.ffi.new("WGPUInstanceDescriptor *")
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = len(names), features
        descriptor.nextInChain, owners = self.toggles(["allow_unsafe_apis"])  # for experimental features
        instance = lib.wgpuCreateInstance(descriptor)
        del owners
        if instance == self.ffi.NULL:
            raise DeviceError("Dawn could not start: it made no instance")
        return instance

    def adapter_handles(self) -> list[Any]:
        """Every adapter. The first call starts the drivers."""
        options = self.ffi.new("WGPURequestAdapterOptions *")
        options.nextInChain, owners = self.toggles(["vulkan_enable_f16_on_nvidia"])
        with offered_to_vulkan(), self._vulkan() as starts:
            if not starts:  # Dawn would try, and print warnings
                options.backendType = self.lib.WGPUBackendType_Null
            count = self.lib.wgpu_dawn_enumerate_adapters(self.instance, options, self.ffi.NULL, 0)
            handles = self.ffi.new("WGPUAdapter[]", count)
            count = min(count, self.lib.wgpu_dawn_enumerate_adapters(self.instance, options, handles, count))
        del owners
        return [handles[i] for i in range(count)]

    @contextmanager
    def _vulkan(self) -> Iterator[bool]:
        """Where Dawn has Vulkan alone: is there a driver? It stays loaded until Dawn has loaded it."""
        if sys.platform != "linux" or self._vulkan_starts:
            yield True
            return
        import ctypes

        try:
            vulkan = ctypes.CDLL("libvulkan.so.1")
        except OSError:
            yield False
            return
        instance = ctypes.c_void_p()
        info = (ctypes.c_uint64 * 8)(1)  # VkInstanceCreateInfo: its type, and no layers and extensions
        self._vulkan_starts = vulkan.vkCreateInstance(info, None, ctypes.byref(instance)) == 0
        try:
            yield self._vulkan_starts
        finally:
            if self._vulkan_starts:
                vulkan.vkDestroyInstance(instance, None)

    def wait(self, future: Any, nanoseconds: int = FOREVER) -> bool:
        """Until something is done, without Python's lock. False: it is not, after this time, or was refused."""
        if not future.id:  # Dawn ends the process where it is asked to wait for that
            return False
        waited = self.ffi.new("WGPUFutureWaitInfo *")
        waited.future = future
        self.lib.wgpuInstanceWaitAny(self.instance, 1, waited, nanoseconds)
        return bool(waited.completed)


_loading = threading.Lock()
_library: Library | None = None


def library() -> Library:
    """The library, loaded when it is first wanted."""
    global _library
    with _loading:
        if _library is None:
            _library = Library()
        return _library
