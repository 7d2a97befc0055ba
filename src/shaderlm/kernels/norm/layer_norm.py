"""Routes of layer_norm: one kernel for one or four values at a time, with the bias included."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_if_read, f32, reduction, row_count
from ..wgsl import Constant, Kernel
from .rms_norm import vec4_unsupported_reason


def _launch_list(values: str) -> Callable[[Dims, DeviceCaps], LaunchList]:
    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        rows, width = dims["tokens"] * dims["heads"], dims["width"]
        sums, needs = reduction(caps)
        bias = f"norm/bias_{'vector' if dims['bias'] else 'none'}"
        kernel = Kernel("norm/layer_norm", (f"norm/values_{values}", bias, sums, row_count(dims)), needs)
        constants: dict[str, Constant] = {"WG": 64 if width <= 1024 else 256}
        if values == "one":
            constants["value"] = "f32"
        params = {"tokens": dims["tokens"], "heads": dims["heads"], "width": width, "eps": dims["eps"]}
        buffers = dict.fromkeys(("x", "out"), f32(rows * width)) | {"weight": f32(width)} | batch_if_read(dims)
        if dims["bias"]:
            buffers["bias"] = f32(width)
        return LaunchList((Dispatch(kernel, rows, params, constants),), buffers)

    return launch_list


ROUTES: tuple[Route, ...] = (
    Route("layer_norm", "vec4", _launch_list("four"), vec4_unsupported_reason),
    Route("layer_norm", "scalar", _launch_list("one")),
)
