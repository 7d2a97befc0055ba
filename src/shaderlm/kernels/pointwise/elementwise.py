"""Routes of add, mul and the gates: one kernel for one or four values at a time, `apply` included."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, always, batch_bytes, covering, f32, row_count
from ..wgsl import Kernel


def _launch_list(op: str, width: int) -> Callable[[Dims, DeviceCaps], LaunchList]:
    constants = {"value": "f32" if width == 1 else "vec4<f32>"}

    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        count, period, tokens = dims["count"], dims["period"], dims["tokens"]
        shared = ("shared/gelu",) if op == "gelu_mul" else ()
        kernel = Kernel("pointwise/pointwise", (f"pointwise/apply_{op}", *shared, row_count(dims)))
        params = {"tokens": tokens, "per_token": count // tokens // width, "period": period // width}
        buffers = {"a": f32(count), "b": f32(period), "out": f32(count), **batch_bytes(dims)}
        return LaunchList((covering(kernel, count // width, params, constants),), buffers)

    return launch_list


def _vec4_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    for name in ("count", "period"):
        if dims[name] % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    each = dims["count"] // dims["tokens"]
    return f"values per token % 4 must be 0, they are {each}" if each % 4 else None


ROUTES: tuple[Route, ...] = tuple(
    Route(op, strategy, _launch_list(op, width), unsupported_reason)
    for op in ("add", "mul", "silu_mul", "gelu_mul", "swiglu_clamped")
    for strategy, width, unsupported_reason in (("vec4", 4, _vec4_unsupported_reason), ("scalar", 1, always))
)
