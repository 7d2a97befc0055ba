"""The part of wgpu-native's C interface that shaderlm calls, as tables.

Names stand without their prefix (`WGPU` of types and numbers, `wgpu` of functions). A type is a key of `C_TYPES` or a
name that another table here declares; `*` makes it a pointer. The order of fields is the one in memory.
`python -m shaderlm.gpu.wgpu_native.generate` writes bindings.py from these tables, and a test compares them with the
header in the package wgpu.
"""

from __future__ import annotations

from collections.abc import Mapping

Fields = Mapping[str, str]

# What is not declared here: types of C, by a short name.
C_TYPES: Mapping[str, str] = {
    "void": "void",
    "char": "char",
    "int": "int",
    "u8": "uint8_t",
    "u32": "uint32_t",
    "u64": "uint64_t",
    "size": "size_t",
    "float": "float",
}

# Another name of a number.
ALIASES: Mapping[str, str] = {"Bool": "u32", "SubmissionIndex": "u64"}

# Pointers to what only the library sees into.
HANDLES = (
    "Adapter",
    "BindGroup",
    "BindGroupLayout",
    "Buffer",
    "CommandBuffer",
    "CommandEncoder",
    "ComputePassEncoder",
    "ComputePipeline",
    "Device",
    "Instance",
    "PipelineLayout",
    "QuerySet",
    "Queue",
    "ShaderModule",
)

# The members that are used. One whose prefix is not the name of its type is written with it.
ENUMS: Mapping[str, Mapping[str, int]] = {
    "AdapterType": {"DiscreteGPU": 1, "IntegratedGPU": 2, "CPU": 3},
    "BackendType": {
        "WebGPU": 2,
        "D3D11": 3,
        "D3D12": 4,
        "Metal": 5,
        "Vulkan": 6,
        "OpenGL": 7,
        "OpenGLES": 8,
    },
    "BufferBindingType": {"Uniform": 2, "Storage": 3, "ReadOnlyStorage": 4},
    "CallbackMode": {"AllowProcessEvents": 2, "AllowSpontaneous": 3},
    "DeviceLostReason": {"Destroyed": 2},
    "ErrorType": {"OutOfMemory": 3},
    "FeatureName": {
        "TimestampQuery": 0x9,
        "ShaderF16": 0xB,
        "NativeFeature_Subgroup": 0x30021,
        "NativeFeature_TimestampQueryInsidePasses": 0x30025,
    },
    "MapAsyncStatus": {"Success": 1},
    "QueryType": {"Timestamp": 2},
    "RequestDeviceStatus": {"Success": 1},
    "SType": {"ShaderSourceWGSL": 0x2, "NativeLimits": 0x30002, "InstanceExtras": 0x30004},
    "Status": {"Success": 1},
}

# The same for sets of bits, which have 64.
FLAGS: Mapping[str, Mapping[str, int]] = {
    "BufferUsage": {
        "MapRead": 0x1,
        "CopySrc": 0x4,
        "CopyDst": 0x8,
        "Uniform": 0x40,
        "Storage": 0x80,
        "QueryResolve": 0x200,
    },
    "InstanceBackend": {"Vulkan": 0x1, "GL": 0x2, "Metal": 0x4, "DX12": 0x8},
    "InstanceFlag": {"Default": 0x1000000},
    "MapMode": {"Read": 0x1},
    "ShaderRuntimeChecks": {"None": 0x0},
    "ShaderStage": {"Compute": 0x4},
}

# Arguments; a callback returns nothing.
_USER_DATA = ("void*", "void*")
CALLBACKS: Mapping[str, tuple[str, ...]] = {
    "BufferMapCallback": ("MapAsyncStatus", "StringView", *_USER_DATA),
    "DeviceLostCallback": ("Device*", "DeviceLostReason", "StringView", *_USER_DATA),
    "RequestDeviceCallback": ("RequestDeviceStatus", "Device", "StringView", *_USER_DATA),
    "UncapturedErrorCallback": ("Device*", "ErrorType", "StringView", *_USER_DATA),
}


def _all(kind: str, *names: str) -> Fields:
    return dict.fromkeys(names, kind)


_NEXT = {"nextInChain": "ChainedStruct*"}
_NEXT_LABEL = {**_NEXT, "label": "StringView"}
_MODE = {"mode": "CallbackMode"}


def _callback(name: str) -> Fields:
    return {"callback": name, "userdata1": "void*", "userdata2": "void*"}


# A struct stands below those that it contains.
STRUCTS: Mapping[str, Fields] = {
    "StringView": {"data": "char*", "length": "size"},
    "ChainedStruct": {"next": "ChainedStruct*", "sType": "SType"},
    "Future": {"id": "u64"},
    "BufferMapCallbackInfo": {**_NEXT, **_MODE, **_callback("BufferMapCallback")},
    "RequestDeviceCallbackInfo": {**_NEXT, **_MODE, **_callback("RequestDeviceCallback")},
    "DeviceLostCallbackInfo": {**_NEXT, **_MODE, **_callback("DeviceLostCallback")},
    "UncapturedErrorCallbackInfo": {**_NEXT, **_callback("UncapturedErrorCallback")},
    # Adapters and instances
    "AdapterInfo": {
        **_NEXT,
        **_all("StringView", "vendor", "architecture", "device", "description"),
        "backendType": "BackendType",
        "adapterType": "AdapterType",
        **_all("u32", "vendorID", "deviceID", "subgroupMinSize", "subgroupMaxSize"),
    },
    "Limits": {
        **_NEXT,
        **_all("u32", *(f"maxTextureDimension{n}D" for n in (1, 2, 3)), "maxTextureArrayLayers"),
        **_all("u32", "maxBindGroups", "maxBindGroupsPlusVertexBuffers", "maxBindingsPerBindGroup"),
        **_all("u32", *(f"maxDynamic{kind}BuffersPerPipelineLayout" for kind in ("Uniform", "Storage"))),
        **_all("u32", "maxSampledTexturesPerShaderStage", "maxSamplersPerShaderStage"),
        **_all(
            "u32", *(f"max{kind}PerShaderStage" for kind in ("StorageBuffers", "StorageTextures", "UniformBuffers"))
        ),
        **_all("u64", "maxUniformBufferBindingSize", "maxStorageBufferBindingSize"),
        **_all("u32", "minUniformBufferOffsetAlignment", "minStorageBufferOffsetAlignment", "maxVertexBuffers"),
        **_all("u64", "maxBufferSize"),
        **_all("u32", "maxVertexAttributes", "maxVertexBufferArrayStride", "maxInterStageShaderVariables"),
        **_all("u32", "maxColorAttachments", "maxColorAttachmentBytesPerSample"),
        **_all("u32", "maxComputeWorkgroupStorageSize", "maxComputeInvocationsPerWorkgroup"),
        **_all("u32", *(f"maxComputeWorkgroupSize{axis}" for axis in "XYZ")),
        **_all("u32", "maxComputeWorkgroupsPerDimension", "maxImmediateSize"),
    },
    "NativeLimits": {
        "chain": "ChainedStruct",
        **_all("u32", "maxNonSamplerBindings"),
        **_all("u32", *(f"maxBindingArray{kind}ElementsPerShaderStage" for kind in ("", "Sampler"))),
        **_all("u32", "maxMultiviewViewCount"),
    },
    "InstanceDescriptor": {
        **_NEXT,
        "requiredFeatureCount": "size",
        "requiredFeatures": "void*",
        "requiredLimits": "void*",
    },
    "XlibDisplayHandle": {"display": "void*", "screen": "int"},
    "NativeDisplayHandle": {"type": "u32", "data": "XlibDisplayHandle"},  # a union; this is its largest member
    "InstanceExtras": {
        "chain": "ChainedStruct",
        "backends": "InstanceBackend",
        "flags": "InstanceFlag",
        **_all("u32", "dx12ShaderCompiler", "gles3MinorVersion", "glFenceBehaviour"),
        "dxcPath": "StringView",
        "dxcMaxShaderModel": "u32",
        "dx12PresentationSystem": "u32",
        **_all("u8*", "budgetForDeviceCreation", "budgetForDeviceLoss"),
        "displayHandle": "NativeDisplayHandle",
    },
    "InstanceEnumerateAdapterOptions": {**_NEXT, "backends": "InstanceBackend"},
    # Devices
    "QueueDescriptor": _NEXT_LABEL,
    "DeviceDescriptor": {
        **_NEXT_LABEL,
        "requiredFeatureCount": "size",
        "requiredFeatures": "FeatureName*",
        "requiredLimits": "Limits*",
        "defaultQueue": "QueueDescriptor",
        "deviceLostCallbackInfo": "DeviceLostCallbackInfo",
        "uncapturedErrorCallbackInfo": "UncapturedErrorCallbackInfo",
    },
    # Buffers, and what binds them
    "BufferDescriptor": {**_NEXT_LABEL, "usage": "BufferUsage", "size": "u64", "mappedAtCreation": "Bool"},
    "BufferBindingLayout": {
        **_NEXT,
        "type": "BufferBindingType",
        "hasDynamicOffset": "Bool",
        "minBindingSize": "u64",
    },
    "SamplerBindingLayout": {**_NEXT, "type": "u32"},
    "TextureBindingLayout": {**_NEXT, "sampleType": "u32", "viewDimension": "u32", "multisampled": "Bool"},
    "StorageTextureBindingLayout": {**_NEXT, **_all("u32", "access", "format", "viewDimension")},
    "BindGroupLayoutEntry": {
        **_NEXT,
        "binding": "u32",
        "visibility": "ShaderStage",
        "bindingArraySize": "u32",
        "buffer": "BufferBindingLayout",
        "sampler": "SamplerBindingLayout",
        "texture": "TextureBindingLayout",
        "storageTexture": "StorageTextureBindingLayout",
    },
    "BindGroupLayoutDescriptor": {**_NEXT_LABEL, "entryCount": "size", "entries": "BindGroupLayoutEntry*"},
    "BindGroupEntry": {
        **_NEXT,
        "binding": "u32",
        "buffer": "Buffer",
        "offset": "u64",
        "size": "u64",
        "sampler": "void*",
        "textureView": "void*",
    },
    "BindGroupDescriptor": {
        **_NEXT_LABEL,
        "layout": "BindGroupLayout",
        "entryCount": "size",
        "entries": "BindGroupEntry*",
    },
    "PipelineLayoutDescriptor": {
        **_NEXT_LABEL,
        "bindGroupLayoutCount": "size",
        "bindGroupLayouts": "BindGroupLayout*",
        "immediateSize": "u32",
    },
    # Shaders and pipelines
    "ShaderSourceWGSL": {"chain": "ChainedStruct", "code": "StringView"},
    "ShaderModuleDescriptor": _NEXT_LABEL,
    "ComputeState": {
        **_NEXT,
        "module": "ShaderModule",
        "entryPoint": "StringView",
        "constantCount": "size",
        "constants": "void*",
    },
    "ComputePipelineDescriptor": {**_NEXT_LABEL, "layout": "PipelineLayout", "compute": "ComputeState"},
    # Commands
    "CommandEncoderDescriptor": _NEXT_LABEL,
    "CommandBufferDescriptor": _NEXT_LABEL,
    "PassTimestampWrites": {
        **_NEXT,
        "querySet": "QuerySet",
        **_all("u32", "beginningOfPassWriteIndex", "endOfPassWriteIndex"),
    },
    "ComputePassDescriptor": {**_NEXT_LABEL, "timestampWrites": "PassTimestampWrites*"},
    "QuerySetDescriptor": {**_NEXT_LABEL, "type": "QueryType", "count": "u32"},
}

# The result, then the arguments.
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "GetVersion": ("u32",),
    "CreateInstance": ("Instance", "InstanceDescriptor*"),
    "InstanceProcessEvents": ("void", "Instance"),
    "InstanceEnumerateAdapters": ("size", "Instance", "InstanceEnumerateAdapterOptions*", "Adapter*"),
    "AdapterGetInfo": ("Status", "Adapter", "AdapterInfo*"),
    "AdapterInfoFreeMembers": ("void", "AdapterInfo"),
    "AdapterGetLimits": ("Status", "Adapter", "Limits*"),
    "AdapterHasFeature": ("Bool", "Adapter", "FeatureName"),
    "AdapterRequestDevice": ("Future", "Adapter", "DeviceDescriptor*", "RequestDeviceCallbackInfo"),
    "AdapterRelease": ("void", "Adapter"),
    "DeviceGetQueue": ("Queue", "Device"),
    "DeviceGetLimits": ("Status", "Device", "Limits*"),
    "DeviceHasFeature": ("Bool", "Device", "FeatureName"),
    "DevicePoll": ("Bool", "Device", "Bool", "SubmissionIndex*"),  # whether to wait, and for what
    "DeviceDestroy": ("void", "Device"),
    "DeviceRelease": ("void", "Device"),
    "DeviceCreateBuffer": ("Buffer", "Device", "BufferDescriptor*"),
    "DeviceCreateBindGroup": ("BindGroup", "Device", "BindGroupDescriptor*"),
    "DeviceCreateBindGroupLayout": ("BindGroupLayout", "Device", "BindGroupLayoutDescriptor*"),
    "DeviceCreatePipelineLayout": ("PipelineLayout", "Device", "PipelineLayoutDescriptor*"),
    "DeviceCreateShaderModule": ("ShaderModule", "Device", "ShaderModuleDescriptor*"),
    "DeviceCreateShaderModuleTrusted": ("ShaderModule", "Device", "ShaderModuleDescriptor*", "ShaderRuntimeChecks"),
    "DeviceCreateComputePipeline": ("ComputePipeline", "Device", "ComputePipelineDescriptor*"),
    "DeviceCreateCommandEncoder": ("CommandEncoder", "Device", "CommandEncoderDescriptor*"),
    "DeviceCreateQuerySet": ("QuerySet", "Device", "QuerySetDescriptor*"),
    "QueueSubmitForIndex": ("SubmissionIndex", "Queue", "size", "CommandBuffer*"),
    "QueueWriteBuffer": ("void", "Queue", "Buffer", "u64", "void*", "size"),  # offset, data, bytes
    "QueueGetTimestampPeriod": ("float", "Queue"),
    "QueueRelease": ("void", "Queue"),
    "BufferMapAsync": ("Future", "Buffer", "MapMode", "size", "size", "BufferMapCallbackInfo"),  # offset, bytes
    "BufferGetConstMappedRange": ("void*", "Buffer", "size", "size"),
    "BufferUnmap": ("void", "Buffer"),
    "BufferDestroy": ("void", "Buffer"),
    "BufferRelease": ("void", "Buffer"),
    "CommandEncoderBeginComputePass": ("ComputePassEncoder", "CommandEncoder", "ComputePassDescriptor*"),
    # Source and its offset, target and its offset, bytes
    "CommandEncoderCopyBufferToBuffer": ("void", "CommandEncoder", "Buffer", "u64", "Buffer", "u64", "u64"),
    # First query, how many, target and its offset
    "CommandEncoderResolveQuerySet": ("void", "CommandEncoder", "QuerySet", "u32", "u32", "Buffer", "u64"),
    "CommandEncoderFinish": ("CommandBuffer", "CommandEncoder", "CommandBufferDescriptor*"),
    "CommandEncoderRelease": ("void", "CommandEncoder"),
    "ComputePassEncoderSetPipeline": ("void", "ComputePassEncoder", "ComputePipeline"),
    "ComputePassEncoderSetBindGroup": ("void", "ComputePassEncoder", "u32", "BindGroup", "size", "u32*"),
    "ComputePassEncoderDispatchWorkgroups": ("void", "ComputePassEncoder", "u32", "u32", "u32"),
    "ComputePassEncoderWriteTimestamp": ("void", "ComputePassEncoder", "QuerySet", "u32"),
    "ComputePassEncoderEnd": ("void", "ComputePassEncoder"),
    "ComputePassEncoderRelease": ("void", "ComputePassEncoder"),
    "CommandBufferRelease": ("void", "CommandBuffer"),
    "BindGroupRelease": ("void", "BindGroup"),
    "BindGroupLayoutRelease": ("void", "BindGroupLayout"),
    "PipelineLayoutRelease": ("void", "PipelineLayout"),
    "ShaderModuleRelease": ("void", "ShaderModule"),
    "ComputePipelineRelease": ("void", "ComputePipeline"),
    "QuerySetRelease": ("void", "QuerySet"),
}


def _c(name: str) -> str:
    """A type as C spells it."""
    base = name.rstrip("*")
    return C_TYPES.get(base, f"WGPU{base}") + name[len(base) :]


def members(kind: str, numbers: Mapping[str, int]) -> dict[str, int]:
    """The numbers of an enumeration or a set of bits by their whole names."""
    return {f"WGPU{name}" if "_" in name else f"WGPU{kind}_{name}": value for name, value in numbers.items()}


def c_declarations() -> str:
    """The tables as declarations in C, for cffi."""
    lines = [f"typedef {_c(kind)} WGPU{name};" for name, kind in ALIASES.items()]
    lines += [f"typedef struct WGPU{name}Impl* WGPU{name};" for name in HANDLES]
    for name, numbers in ENUMS.items():
        listed = ", ".join(f"{member} = {value}" for member, value in members(name, numbers).items())
        lines.append(f"typedef enum {{ {listed} }} WGPU{name};")
    for name, numbers in FLAGS.items():
        lines.append(f"typedef uint64_t WGPU{name};")
        lines += [f"#define {member} {value}" for member, value in members(name, numbers).items()]
    lines += [f"typedef struct WGPU{name} WGPU{name};" for name in STRUCTS]
    # A callback is given a StringView by value, which cffi accepts before the struct is complete.
    for name, arguments in CALLBACKS.items():
        lines.append(f"typedef void (*WGPU{name})({', '.join(map(_c, arguments))});")
    for name, struct in STRUCTS.items():
        listed = " ".join(f"{_c(kind)} {field};" for field, kind in struct.items())
        lines.append(f"struct WGPU{name} {{ {listed} }};")
    for name, (result, *kinds) in FUNCTIONS.items():
        lines.append(f"{_c(result)} wgpu{name}({', '.join(map(_c, kinds)) or 'void'});")
    return "\n".join(lines) + "\n"
