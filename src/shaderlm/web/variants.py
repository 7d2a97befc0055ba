"""The devices that an export has plans for, best first. A page takes the first whose features and limits it gets.

All of them have the limits of sizes that every browser grants, so that one set of weight buffers serves all. The last
one is for adapters that compute on a CPU, and for no other: its kernels have few threads and few barriers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..gpu.caps import WEBGPU_DEFAULT, DeviceCaps, MatrixShape

# A browser wants the same WGSL as Dawn. What no adapter tells a page is as unfavourable as WebGPU allows.
PORTABLE = replace(WEBGPU_DEFAULT, name="portable", implementation="dawn")
SUBGROUPS = replace(
    PORTABLE, name="subgroups", subgroups=True, max_storage_buffers=10, subgroup_min=4, subgroup_max=128
)
SUBGROUPS_1024 = replace(SUBGROUPS, name="subgroups-1024", max_invocations=1024, max_workgroup_memory=32 << 10)
MATRIX = replace(
    SUBGROUPS_1024,
    name="matrix",
    f16=True,
    max_workgroup_memory=48 << 10,
    subgroup_min=32,
    subgroup_max=32,
    subgroup_size=32,
    matrix_shapes=(MatrixShape("f16", "f32", 16, 16, 16),),
)
SOFTWARE = replace(SUBGROUPS, name="software", kind="software")
VARIANTS: tuple[DeviceCaps, ...] = (MATRIX, SUBGROUPS_1024, SUBGROUPS, PORTABLE, SOFTWARE)

# Language extensions of WGSL by the functions that need them: no `enable`, but a browser may lack them.
LANGUAGE: Mapping[str, str] = dict.fromkeys(
    ("dot4I8Packed", "dot4U8Packed", "pack4xI8", "pack4xU8", "pack4xI8Clamp", "unpack4xI8", "unpack4xU8"),
    "packed_4x8_integer_dot_product",
)
# Names of `DeviceCaps` and of the WebGPU specification.
FEATURES: Mapping[str, str] = {
    "f16": "shader-f16",
    "subgroups": "subgroups",
    "subgroup_matrix": "chromium-experimental-subgroup-matrix",
}
LIMITS: Mapping[str, tuple[str, ...]] = {
    "max_binding": ("maxStorageBufferBindingSize", "maxBufferSize"),
    "max_invocations": ("maxComputeInvocationsPerWorkgroup", "maxComputeWorkgroupSizeX"),
    "max_storage_buffers": ("maxStorageBuffersPerShaderStage",),
    "max_workgroup_memory": ("maxComputeWorkgroupStorageSize",),
    "max_workgroups": ("maxComputeWorkgroupsPerDimension",),
}
