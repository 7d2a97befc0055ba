"""Reads shaders with the front end of an implementation: no driver compiles them. Limits are not looked at."""

from __future__ import annotations

from typing import Any

from shaderlm.gpu.webgpu_h import NativeHandle


def read_shader(native: Any, label: str, source: str) -> None:
    """naga or Tint checks types and features of a source, Tint also uniformity. `NativeError` if it is wrong."""
    described, kept = native.shader_descriptor(label, source)
    NativeHandle(native.lib.wgpuDeviceCreateShaderModule(native.handle, described), native.lib.wgpuShaderModuleRelease)
    del kept
    native.check()
