"""Routes of add, mul and silu_mul: one kernel for one or four values at a time, with the operation included."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, always, covering, f32
from ..wgsl import Kernel


def _launch_list(op: str, width: int) -> Callable[[Dims, DeviceCaps], LaunchList]:
    kernel = Kernel("pointwise/pointwise", (f"pointwise/apply_{op}",))
    constants = {"value": "f32" if width == 1 else "vec4<f32>"}

    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        count, period = dims["count"], dims["period"]
        params = {"count": count // width, "period": period // width}
        buffers = {"a": f32(count), "b": f32(period), "out": f32(count)}
        return LaunchList((covering(kernel, count // width, params, constants),), buffers)

    return launch_list


def _vec4_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    for name in ("count", "period"):
        if dims[name] % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    return None


ROUTES = tuple(
    Route(op, strategy, _launch_list(op, width), unsupported_reason)
    for op in ("add", "mul", "silu_mul")
    for strategy, width, unsupported_reason in (("vec4", 4, _vec4_unsupported_reason), ("scalar", 1, always))
)
