"""What a device can do, as plain numbers. Knows nothing of wgpu, so that kernels may plan with it."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("discrete", "integrated", "other", "software")  # in order of preference


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

    @property
    def max_operand(self) -> int:
        """The most that one operand may take: a buffer and a binding, in whole 16-byte words."""
        return min(self.max_binding, self.max_buffer) // 16 * 16

    @property
    def software(self) -> bool:
        """True for an adapter that computes on the CPU: right numbers, meaningless speed."""
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
