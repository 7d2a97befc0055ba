"""Shader modules with or without naga's checks of array bounds and of endless loops.

WebGPU asks for the checks, which is right for shaders from anywhere. Ours are known, and tested with checks on; without
them loops unroll, and a decode step is a sixth shorter on an H200. wgpu's classes do not offer it: where its native
function is missing, modules are checked.
"""

from __future__ import annotations

from typing import Any


def checked_module(native_device: Any, label: str, source: str) -> Any:
    """A shader module as WebGPU has it."""
    return native_device.create_shader_module(label=label, code=source)


def unchecked_module(native_device: Any, label: str, source: str) -> Any:
    """The same without checks at run time. What is wrong with the source is said either way."""
    try:
        from wgpu.backends.wgpu_native import ffi, lib
        from wgpu.backends.wgpu_native._api import GPUShaderModule, libf

        create, none = libf.wgpuDeviceCreateShaderModuleTrusted, lib.WGPUShaderRuntimeChecks_None
    except (ImportError, AttributeError):
        return checked_module(native_device, label, source)
    text, name = ffi.new("char[]", source.encode()), ffi.new("char[]", label.encode())
    wgsl = ffi.new("WGPUShaderSourceWGSL *")
    wgsl.chain.sType = lib.WGPUSType_ShaderSourceWGSL
    wgsl.code.data, wgsl.code.length = text, len(text) - 1
    described = ffi.new("WGPUShaderModuleDescriptor *")
    described.nextInChain = ffi.cast("WGPUChainedStruct *", wgsl)
    described.label.data, described.label.length = name, len(name) - 1
    return GPUShaderModule(label, create(native_device._internal, described, none), native_device)
