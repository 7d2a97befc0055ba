"""Routes of ops on single values: one kernel for one or four values at a time, the function `apply` included."""

from __future__ import annotations

from functools import partial

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, batch_if_read, covering, f32, row_count
from ..wgsl import Kernel

# Of one input: what each op includes besides `apply`, and the dim that its function takes besides x.
_UNARY: dict[str, tuple[tuple[str, ...], str]] = {
    "gelu": (("shared/gelu",), ""),
    "gelu_erf": (("shared/gelu_erf",), ""),
    "relu_squared": ((), ""),
    "scale": ((), "factor"),
    "softcap": (("shared/softcap",), "cap"),
}
_BINARY: dict[str, tuple[str, ...]] = {
    "add": (),
    "mul": (),
    "silu_mul": (),
    "sigmoid_mul": (),
    "gelu_mul": ("shared/gelu",),
    "swiglu_clamped": (),
}


def _unary_launch_list(op: str, width: int, dims: Dims, caps: DeviceCaps) -> LaunchList:
    include, number = _UNARY[op]
    count, tokens = dims["count"], dims["tokens"]
    kernel = Kernel("pointwise/each", (f"pointwise/apply_{op}", *include, row_count(dims)))
    params = {"tokens": tokens, "per_token": count // tokens // width, "number": dims[number] if number else 0.0}
    buffers = {"x": f32(count), "out": f32(count), **batch_if_read(dims)}
    return LaunchList((covering(kernel, count // width, params, _value(width)),), buffers)


def _binary_launch_list(op: str, width: int, dims: Dims, caps: DeviceCaps) -> LaunchList:
    count, period, tokens = dims["count"], dims["period"], dims["tokens"]
    kernel = Kernel("pointwise/pointwise", (f"pointwise/apply_{op}", *_BINARY[op], row_count(dims)))
    params = {"tokens": tokens, "per_token": count // tokens // width, "period": period // width}
    buffers = {"a": f32(count), "b": f32(period), "out": f32(count), **batch_if_read(dims)}
    return LaunchList((covering(kernel, count // width, params, _value(width)),), buffers)


def _columns_launch_list(width: int, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """Of sigmoid_mul whose gates are columns of wider rows."""
    tokens, values, stride = dims["tokens"], dims["width"], dims["stride"]
    kernel = Kernel("pointwise/columns", ("pointwise/apply_sigmoid_mul", row_count(dims)))
    params = {
        "tokens": tokens,
        "per_token": values // width,
        "stride": stride // width,
        "first": dims["first"] // width,
    }
    buffers = {"gate": f32(tokens * stride), **dict.fromkeys(("b", "out"), f32(tokens * values)), **batch_if_read(dims)}
    return LaunchList((covering(kernel, tokens * values // width, params, _value(width)),), buffers)


def _columns_vec4_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    names = ("width", "stride", "first")
    return next((f"{name} % 4 must be 0, {name} is {dims[name]}" for name in names if dims[name] % 4), None)


def _value(width: int) -> dict[str, str]:
    return {"value": "f32" if width == 1 else "vec4<f32>"}


def _vec4_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    for name in ("count", "period") if "period" in dims else ():
        if dims[name] % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    each = dims["count"] // dims["tokens"]
    return f"values per token % 4 must be 0, they are {each}" if each % 4 else None


ROUTES: tuple[Route, ...] = (
    *(
        route
        for ops, launch_list in ((_UNARY, _unary_launch_list), (_BINARY, _binary_launch_list))
        for op in ops
        for route in (
            Route(op, "vec4", partial(launch_list, op, 4), _vec4_unsupported_reason),
            Route(op, "scalar", partial(launch_list, op, 1)),
        )
    ),
    Route("slice_sigmoid_mul", "vec4", partial(_columns_launch_list, 4), _columns_vec4_unsupported_reason),
    Route("slice_sigmoid_mul", "scalar", partial(_columns_launch_list, 1)),
)
