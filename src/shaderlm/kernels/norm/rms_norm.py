"""Routes of rms_norm and of its fusions: the same two strategies for each."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, always, ceil_div, f32, reduction
from ..wgsl import Kernel


def _kept(quads: int) -> int:
    """Quads per lane in registers. Not 3: on an H200 that was slower than 4 with one of them unused."""
    return min(4, 1 << (quads - 1).bit_length())


def _launch_list(op: str, strategy: str) -> Callable[[Dims, DeviceCaps], LaunchList]:
    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        rows, width = dims["rows"], dims["width"]
        if strategy == "scalar":  # the baseline: 64 lanes and a tree, on every device
            kernel, constants = Kernel(f"norm/{op}_scalar", ("shared/reduce_tree",)), {"WG": 64}
        else:
            include, needs = reduction(caps)
            lanes = 64 if width <= 1024 else 256
            kernel = Kernel(f"norm/{op}_vec4", (include,), needs)
            # A CPU has the row in its cache anyway, and takes half the time to compile the kernel.
            keep = 1 if caps.software else _kept(ceil_div(width, 4 * lanes))
            constants = {"WG": lanes, "KEEP": keep}
        buffers = {"x": rows * width, "weight": width, "a": rows * width, "b": rows * width}
        buffers |= {"sum": rows * width, "out": rows * width}
        return LaunchList(
            (Dispatch(kernel, rows, {"rows": rows, "width": width, "eps": dims["eps"]}, constants),),
            {name: f32(count) for name, count in buffers.items() if name in _OPERANDS[op]},
        )

    return launch_list


_OPERANDS = {
    "rms_norm": ("x", "out"),
    "rms_norm_mul": ("x", "weight", "out"),
    "add_rms_norm": ("a", "b", "weight", "sum", "out"),
}


def _vec4_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return f"width % 4 must be 0, width is {dims['width']}" if dims["width"] % 4 else None


ROUTES = tuple(
    Route(op, strategy, _launch_list(op, strategy), unsupported_reason)
    for op in _OPERANDS
    for strategy, unsupported_reason in (("vec4", _vec4_unsupported_reason), ("scalar", always))
)
