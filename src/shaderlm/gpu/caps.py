"""What a device can do, as plain numbers. Knows nothing of wgpu, so that kernels may plan with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .policy import DevicePolicy, policy_of

KINDS = ("discrete", "integrated", "other", "software")  # in order of preference
Implementation = Literal["wgpu", "dawn"]  # of WebGPU; a browser wants the same WGSL as Dawn

_LEAST_LANES = 4  # of a subgroup, where nobody says how many it has


@dataclass(frozen=True)
class MatrixShape:
    """A product of matrices that a subgroup computes at once: result[m, n] += left[m, k] · right[k, n]."""

    component: str  # of left and right: f16, i8, u8, …
    result: str  # f32, f16, i32, u32
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.component} → {self.result} {self.m}×{self.n}×{self.k}"


@dataclass(frozen=True)
class DeviceCaps:
    """Features and limits that routes look at. Sizes are bytes."""

    name: str
    kind: str
    backend: str
    driver: str
    f16: bool
    subgroups: bool
    timestamps: bool
    max_binding: int
    max_buffer: int
    max_workgroups: int
    max_invocations: int
    max_workgroup_memory: int
    max_storage_buffers: int
    pass_timestamps: bool = False  # between the dispatches of one pass: not part of the WebGPU standard
    vendor: str = ""  # of the GPU, in lower case: nvidia, amd, intel, apple, …; "" if it is not known
    subgroup_min: int = 0  # lanes of a subgroup; 0 if it is not known. Some drivers report 4 to 128 whatever they have
    subgroup_max: int = 0
    subgroup_size: int = 0  # lanes of every subgroup in every kernel; 0 if drivers may choose, or if it is not known
    subgroup_reported: int = 0  # the fewest lanes that the driver says a subgroup has; 0: it does not say
    dot4: bool = True  # dot products of four bytes are one instruction
    offset_alignment: int = 256  # of a binding's offset in its buffer
    implementation: Implementation = "wgpu"  # of WebGPU: shaders are composed for it
    matrix_shapes: tuple[MatrixShape, ...] = ()  # products of matrices by subgroups; wgpu has none
    heap: int = 0  # bytes of the device's own memory, or of the memory it shares; 0 if it is not known
    processors: int = 0  # that run workgroups; 0 if it is not known

    @property
    def max_operand(self) -> int:
        """The most that one operand may take: a buffer and a binding, in whole 16-byte words."""
        return min(self.max_binding, self.max_buffer) // 16 * 16

    @property
    def same_subgroup_size(self) -> int:
        """Lanes of all subgroups that were seen, or that a driver reports; 0 if they differ."""
        return self.subgroup_max if self.subgroup_min == self.subgroup_max else 0

    @property
    def least_lanes(self) -> int:
        """Lanes that a subgroup of any kernel has at least: a driver may choose fewer than a probe saw."""
        seen, reported = self.subgroup_min or _LEAST_LANES, self.subgroup_reported or _LEAST_LANES
        return self.subgroup_size or min(seen, reported)

    @property
    def subgroup_matrix(self) -> bool:
        """Kernels may multiply matrices by subgroups. Such a kernel reads its inputs in f16."""
        return bool(self.matrix_shapes) and self.subgroups and self.f16

    @property
    def multiplies_f16(self) -> bool:
        """Matrix units multiply f16 and add up in f32, which is what kernels use them for."""
        return self.subgroup_matrix and any((s.component, s.result) == ("f16", "f32") for s in self.matrix_shapes)

    @cached_property
    def policy(self) -> DevicePolicy:
        """What is decided for a device of this kind. Kernels, plans and runtimes ask this and not the kind."""
        return policy_of(self.kind, self.implementation, self.backend)

    @property
    def software(self) -> bool:
        """True for an adapter that computes on the CPU: for words to people, and to choose a device."""
        return self.kind == "software"


# The limits that every WebGPU implementation grants without asking: what a browser page gets.
WEBGPU_DEFAULT = DeviceCaps(
    name="WebGPU default limits",
    kind="other",
    backend="WebGPU",
    driver="",
    f16=False,
    subgroups=False,
    timestamps=False,
    max_binding=128 << 20,
    max_buffer=256 << 20,
    max_workgroups=65_535,
    max_invocations=256,
    max_workgroup_memory=16 << 10,
    max_storage_buffers=8,
)


def size(nbytes: int) -> str:
    """Bytes in the largest unit with a whole number of them. Units are decimal, as those of downloads and disks are."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if value == int(value) or unit in ("B", "kB") else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError
