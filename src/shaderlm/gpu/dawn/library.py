"""Finds and loads Dawn's library, makes its instance, and receives its callbacks."""

from __future__ import annotations

import _thread
import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DeviceError
from .. import webgpu_h
from ..native import NativeError, OutOfMemoryError
from ..packages import folder_of, version_of
from ..swiftshader import offered_to_vulkan

PACKAGE, VERSION = "wgpudawn", "0.32.0.4"  # experimental functions may change with any version
INSTALL = f"pip install {PACKAGE}=={VERSION}"
FOREVER = (1 << 64) - 1  # nanoseconds


def missing() -> str | None:
    """Why Dawn cannot be used, in one line; None if it can."""
    found = version_of(PACKAGE)
    if found is None:
        return f"the package {PACKAGE} is not installed: {INSTALL}"
    return None if found == VERSION else f"{PACKAGE} {found} is installed, shaderlm needs {VERSION}: {INSTALL}"


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
        self.callbacks = Callbacks(self.ffi, self.lib)
        self.instance = self._new_instance()

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
        wanted = (lib.WGPUInstanceFeatureName_TimedWaitAny, lib.WGPUInstanceFeatureName_MultipleDevicesPerAdapter)
        features = self.ffi.new("WGPUInstanceFeatureName[]", wanted)
        descriptor = self.ffi.new("WGPUInstanceDescriptor *")
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = len(wanted), features
        descriptor.nextInChain, kept = self.toggles(["allow_unsafe_apis"])  # for experimental features
        made = lib.wgpuCreateInstance(descriptor)
        del kept
        if made == self.ffi.NULL:
            raise DeviceError("Dawn could not start: it made no instance")
        return made

    def adapter_handles(self) -> list[Any]:
        """Every adapter. The first call starts the drivers."""
        options = self.ffi.new("WGPURequestAdapterOptions *")
        options.nextInChain, kept = self.toggles(["vulkan_enable_f16_on_nvidia"])
        with offered_to_vulkan():
            count = self.lib.wgpu_dawn_enumerate_adapters(self.instance, options, self.ffi.NULL, 0)
            found = self.ffi.new("WGPUAdapter[]", count)
            count = min(count, self.lib.wgpu_dawn_enumerate_adapters(self.instance, options, found, count))
        del kept
        return [found[i] for i in range(count)]

    def wait(self, future: Any, nanoseconds: int = FOREVER) -> bool:
        """Until something is done, without Python's lock. False: it is not, after this time, or was refused."""
        if not future.id:  # Dawn ends the process where it is asked to wait for that
            return False
        waited = self.ffi.new("WGPUFutureWaitInfo *")
        waited.future = future
        self.lib.wgpuInstanceWaitAny(self.instance, 1, waited, nanoseconds)
        return bool(waited.completed)

    def text(self, view: Any) -> str:
        """A string of the library."""
        return webgpu_h.text(self.ffi, view)


_loading = threading.Lock()
_library: Library | None = None


def library() -> Library:
    """The library, loaded when it is first wanted."""
    global _library
    with _loading:
        if _library is None:
            _library = Library()
        return _library


# Callbacks ---------------------------------------------------------------------------------------------------------


def _put_off(kind: Any, value: Any, trace: Any) -> None:
    """A callback must not raise. Ctrl-C, which Python may deliver in any line, is delivered again outside of it."""
    if issubclass(kind, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        traceback.print_exception(kind, value, trace)


class Callbacks:
    """C functions that Dawn calls. The package has some too, which its Python classes set for the whole process."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self.made: dict[int, tuple[int, Any, str]] = {}  # status, handle and message, by the number of a request

        def callback(kind: str) -> Callable[[Callable[..., None]], Any]:
            made: Callable[[Callable[..., None]], Any] = ffi.callback(kind, onerror=_put_off)
            return made

        def number(pointer: Any) -> int:
            return webgpu_h.number(ffi, pointer)

        @callback("WGPURequestDeviceCallback")
        def on_device(status: int, device: Any, message: Any, request: Any, _: Any) -> None:
            self.made[number(request)] = (status, device, webgpu_h.text(ffi, message))

        @callback("WGPUCreateComputePipelineAsyncCallback")
        def on_pipeline(status: int, pipeline: Any, message: Any, request: Any, _: Any) -> None:
            self.made[number(request)] = (status, pipeline, webgpu_h.text(ffi, message))

        @callback("WGPUUncapturedErrorCallback")
        def on_error(_: Any, kind: int, message: Any, device: Any, __: Any) -> None:
            state = webgpu_h.state_of(number(device))
            if state is not None:
                error = OutOfMemoryError if kind == lib.WGPUErrorType_OutOfMemory else NativeError
                state.errors.setdefault(threading.get_ident(), error(webgpu_h.text(ffi, message).strip()))

        @callback("WGPUDeviceLostCallback")
        def on_lost(_: Any, reason: int, message: Any, device: Any, __: Any) -> None:
            state = webgpu_h.state_of(number(device))
            if state is not None and state.lost is None:
                state.lost = webgpu_h.text(ffi, message).strip() or "no reason was given"

        @callback("WGPUQueueWorkDoneCallback")
        def on_done(status: int, *_: Any) -> None:
            pass

        @callback("WGPUBufferMapCallback")
        def on_mapped(status: int, *_: Any) -> None:
            pass

        self.on_device, self.on_pipeline = on_device, on_pipeline
        self.on_error, self.on_lost = on_error, on_lost
        self.on_done, self.on_mapped = on_done, on_mapped
