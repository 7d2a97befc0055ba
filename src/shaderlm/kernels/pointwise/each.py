"""Routes of gelu, gelu_erf, relu_squared, scale and softcap: one kernel for one or four values, `apply` included."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, always, batch_bytes, covering, f32, row_count
from ..wgsl import Kernel

# What each op includes, and the dim that its function takes besides x.
_OPS: dict[str, tuple[tuple[str, ...], str]] = {
    "gelu": (("pointwise/apply_gelu", "shared/gelu"), ""),
    "gelu_erf": (("pointwise/apply_gelu_erf", "shared/gelu_erf"), ""),
    "relu_squared": (("pointwise/apply_relu_squared",), ""),
    "scale": (("pointwise/apply_scale",), "factor"),
    "softcap": (("pointwise/apply_softcap", "shared/softcap"), "cap"),
}


def _launch_list(op: str, width: int) -> Callable[[Dims, DeviceCaps], LaunchList]:
    include, number = _OPS[op]
    constants = {"value": "f32" if width == 1 else "vec4<f32>"}

    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        count, tokens = dims["count"], dims["tokens"]
        kernel = Kernel("pointwise/each", (*include, row_count(dims)))
        params = {"tokens": tokens, "per_token": count // tokens // width, "number": dims[number] if number else 0.0}
        buffers = {"x": f32(count), "out": f32(count), **batch_bytes(dims)}
        return LaunchList((covering(kernel, count // width, params, constants),), buffers)

    return launch_list


def _vec4_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    each = dims["count"] // dims["tokens"]
    return f"values per token % 4 must be 0, they are {each}" if each % 4 else None


ROUTES: tuple[Route, ...] = tuple(
    Route(op, strategy, _launch_list(op, width), unsupported_reason)
    for op in _OPS
    for strategy, width, unsupported_reason in (("vec4", 4, _vec4_unsupported_reason), ("scalar", 1, always))
)
