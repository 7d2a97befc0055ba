"""Finds and loads wgpu-native's library, makes instances, and receives its callbacks."""

from __future__ import annotations

import _thread
import itertools
import os
import sys
import threading
import traceback
from typing import Any

from ...errors import DeviceError
from .. import webgpu_h
from ..native import NativeError, OutOfMemoryError
from ..packages import folder_of
from ..swiftshader import offered_to_vulkan
from .bindings import ffi

VERSION = 29  # of the library; the layouts in declarations.h are this version's
_INSTALL = "Reinstall it: pip install 'wgpu>=0.32,<0.33'"
_FILES = {"win32": "wgpu_native-release.dll", "darwin": "libwgpu_native-release.dylib"}


def library_path() -> str:
    """The library in the package wgpu, or the one that WGPU_LIB_PATH names. The package is not imported."""
    given = os.environ.get("WGPU_LIB_PATH", "").strip()
    if given:
        return given
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
            with offered_to_vulkan():
                made = lib.wgpuCreateInstance(descriptor)
            if made == ffi.NULL:
                raise DeviceError("wgpu-native could not start: it made no instance")
            _instances[backends] = made
        return _instances[backends]


def text(view: Any) -> str:
    """A string of the library."""
    return webgpu_h.text(ffi, view)


# Callbacks ---------------------------------------------------------------------------------------------------------


# Status of a mapping by its number, from when it is ready (or failed) until it is taken out by who asked for it.
mapped: dict[int, int] = {}
mapping_numbers = itertools.count(1)
_opened: dict[int, tuple[int, Any, str]] = {}  # status, device and message, by the number of the state


def _number(pointer: Any) -> int:
    return webgpu_h.number(ffi, pointer)


def _put_off(kind: Any, value: Any, trace: Any) -> None:
    """A callback must not raise. Ctrl-C, which Python may deliver in any line, is delivered again outside of it."""
    if trace is not None and "mapping" in trace.tb_frame.f_locals:
        found = trace.tb_frame.f_locals
        mapped[_number(found["mapping"])] = found["status"]
    if issubclass(kind, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        traceback.print_exception(kind, value, trace)


@ffi.callback("WGPUBufferMapCallback", onerror=_put_off)  # type: ignore[untyped-decorator]
def on_mapped(status: int, message: Any, mapping: Any, _: Any) -> None:
    """A buffer is mapped, or cannot be."""
    mapped[_number(mapping)] = status


@ffi.callback("WGPUUncapturedErrorCallback", onerror=_put_off)  # type: ignore[untyped-decorator]
def on_error(_: Any, kind: int, message: Any, device: Any, __: Any) -> None:
    """A call was refused."""
    state = webgpu_h.state_of(_number(device))
    if state is not None:
        error = OutOfMemoryError if kind == _library.WGPUErrorType_OutOfMemory else NativeError
        said = "\n".join(line.rstrip() for line in text(message).splitlines())
        if "device is lost" in said and state.lost is None:  # `on_lost` may come later, or not at all
            state.lost = said.splitlines()[-1].strip()
        state.errors.setdefault(threading.get_ident(), error(said))


@ffi.callback("WGPUDeviceLostCallback", onerror=_put_off)  # type: ignore[untyped-decorator]
def on_lost(_: Any, reason: int, message: Any, device: Any, __: Any) -> None:
    """A device is gone."""
    state = webgpu_h.state_of(_number(device))
    if state is not None and state.lost is None:
        state.lost = text(message) or "no reason was given"


@ffi.callback("WGPURequestDeviceCallback", onerror=_put_off)  # type: ignore[untyped-decorator]
def on_device(status: int, device: Any, message: Any, number: Any, _: Any) -> None:
    """A device was opened, or cannot be."""
    _opened[_number(number)] = (status, device, text(message))


def take_opened(state: webgpu_h.State) -> tuple[int, Any, str] | None:
    """What `on_device` was told for a state; the library calls it before the request returns."""
    return _opened.pop(state.number, None)
