"""Finds and loads wgpu-native's library, makes instances, and receives its callbacks."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import Any

from ...errors import DeviceError
from ..environment import variables
from ..packages import folder_of
from ..swiftshader import offered_to_vulkan
from ..webgpu_h import Callbacks, number, put_off
from .bindings import ffi

VERSION = 29  # of the library; the layouts in declarations.py are this version's
_INSTALL = "Reinstall it: pip install 'wgpu>=0.32,<0.33'"
_FILES = {"win32": "wgpu_native-release.dll", "darwin": "libwgpu_native-release.dylib"}


def library_path() -> str:
    """The library in the package wgpu, or the one that WGPU_LIB_PATH names. The package is not imported."""
    override = os.environ.get("WGPU_LIB_PATH", "").strip()
    if override:
        return override
    folder = folder_of("wgpu")
    if folder is None:
        raise DeviceError(f"the wgpu package cannot be loaded: it is not installed. {_INSTALL}")
    name = _FILES.get(sys.platform, "libwgpu_native-release.so")
    return str(folder / "resources" / name)


def _load() -> Any:
    path = library_path()
    try:
        loaded = ffi.dlopen(path)
        version = loaded.wgpuGetVersion() >> 24
    except (OSError, ffi.error) as problem:
        raise DeviceError(f"the wgpu package cannot be loaded: {problem}. {_INSTALL}") from problem
    if version != VERSION:
        raise DeviceError(f"{path} is wgpu-native {version}, shaderlm needs {VERSION}. {_INSTALL}")
    return loaded


_loading = threading.Lock()
_library: Any = None
_instances: dict[int, Any] = {}


def library() -> Any:
    """The library, loaded when it is first wanted."""
    global _library
    with _loading:
        if _library is None:
            _library = _load()
        return _library


def instance(backends: int) -> Any:
    """The instance for these backends, made when it is first wanted and kept. Making it starts the drivers."""
    lib = library()
    with _loading:
        if backends not in _instances:
            extras = ffi.new("WGPUInstanceExtras *")
            extras.chain.sType = lib.WGPUSType_InstanceExtras
            extras.backends, extras.flags = backends, lib.WGPUInstanceFlag_Default
            descriptor = ffi.new("WGPUInstanceDescriptor *")
            descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", extras)
            # OpenGL is tried, too. Without a driver for it Mesa would tell the user's terminal.
            with offered_to_vulkan(), variables(EGL_LOG_LEVEL="fatal"):
                created = lib.wgpuCreateInstance(descriptor)
            if created == ffi.NULL:
                raise DeviceError("wgpu-native could not start: it made no instance")
            _instances[backends] = created
        return _instances[backends]


# Callbacks ---------------------------------------------------------------------------------------------------------


callbacks = Callbacks(ffi)
# Status of a mapping by its number, from when it is ready (or failed) until it is taken out by who asked for it.
mapped: dict[int, int] = {}
mapping_numbers = itertools.count(1)


def _put_off(kind: Any, value: Any, trace: Any) -> None:
    """The mapping is not forgotten where Ctrl-C comes in its callback."""
    if trace is not None and "mapping" in trace.tb_frame.f_locals:
        arguments = trace.tb_frame.f_locals
        mapped[number(ffi, arguments["mapping"])] = arguments["status"]
    put_off(kind, value, trace)


@ffi.callback("WGPUBufferMapCallback", onerror=_put_off)  # type: ignore[untyped-decorator]
def on_mapped(status: int, message: Any, mapping: Any, _: Any) -> None:
    """A buffer is mapped, or cannot be."""
    mapped[number(ffi, mapping)] = status
