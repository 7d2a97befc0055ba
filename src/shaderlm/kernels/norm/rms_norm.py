"""Routes of rms_norm and of its fusions: the same two strategies, with what is normed and the weights included."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_if_read, ceil_div, f32, reduction, row_count
from ..wgsl import Constant, Kernel

# What each op includes, and its operands of [tokens, heads, width].
_INCLUDES = {
    "rms_norm": ("norm/input_x", "norm/weight_none"),
    "rms_norm_mul": ("norm/input_x", "norm/weight_vector"),
    "add_rms_norm": ("norm/input_sum", "norm/weight_vector"),
    "rms_norm_silu_mul": ("norm/input_x", "norm/weight_vector"),
}
_ROWS = {op: ("a", "b", "sum", "out") if op == "add_rms_norm" else ("x", "out") for op in _INCLUDES}


def _quads_in_registers(quads: int) -> int:
    """Quads per lane in registers. Not 3: on an H200 that was slower than 4 with one of them unused."""
    return min(4, 1 << (quads - 1).bit_length())


def _vec4_constants(width: int, caps: DeviceCaps) -> dict[str, int]:
    lanes = 64 if width <= 1024 else 256
    # A CPU has the row in its cache anyway, and takes half the time to compile the kernel.
    keep = _quads_in_registers(ceil_div(width, 4 * lanes)) if caps.policy.specialise_constants else 1
    return {"WG": lanes, "KEEP": keep}


def _params(dims: Dims) -> Mapping[str, int | float]:
    return {name: dims[name] for name in ("tokens", "heads", "width", "eps")}


def _launch_list(op: str, strategy: str) -> Callable[[Dims, DeviceCaps], LaunchList]:
    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        rows, width = dims["tokens"] * dims["heads"], dims["width"]
        needs: frozenset[str] = frozenset()
        if strategy == "scalar":  # the baseline: 64 lanes and a tree, on every device
            sums, constants = "shared/reduce_tree", {"WG": 64}
        else:
            sums, needs = reduction(caps)
            constants = _vec4_constants(width, caps)
        finish: tuple[str, ...] = ("norm/finish_add" if dims.get("residual") else "norm/finish_none",)
        if dims.get("scaled"):
            finish = ("norm/finish_add_mul",)
        if gated := op == "rms_norm_silu_mul":
            finish = ("norm/finish_gate", "pointwise/apply_silu_mul")
            quads = 1 if strategy == "scalar" else 4
            sizes = {"GATE_VALUES": dims["heads"] * width, "GATE_STRIDE": dims["stride"], "GATE_FIRST": dims["first"]}
            constants |= {name: size // quads for name, size in sizes.items()}
        kernel = Kernel(f"norm/rms_norm_{strategy}", (*_INCLUDES[op], *finish, sums, row_count(dims)), needs)
        params = _params(dims)
        buffers = dict.fromkeys(_ROWS[op], f32(rows * width)) | batch_if_read(dims)
        if op != "rms_norm":
            buffers["weight"] = f32(width)
        if dims.get("residual"):
            buffers["residual"] = f32(rows * width)
        if dims.get("scaled"):
            buffers["scale"] = f32(1)
        if gated:
            buffers["gate"] = f32(dims["tokens"] * dims["stride"])
        named: dict[str, Constant] = dict(constants)
        return LaunchList((Dispatch(kernel, rows, params, named),), buffers)

    return launch_list


def _both_norms_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """What is added is normalised, and so is the sum."""
    rows, width = dims["tokens"] * dims["heads"], dims["width"]
    sums, needs = reduction(caps)
    kernel = Kernel("norm/rms_norm_add_rms_norm_vec4", (sums, row_count(dims)), needs)
    buffers = dict.fromkeys(("a", "b", "sum", "out"), f32(rows * width)) | batch_if_read(dims)
    buffers |= dict.fromkeys(("weight", "next_weight"), f32(width))
    constants: dict[str, Constant] = dict(_vec4_constants(width, caps))
    return LaunchList((Dispatch(kernel, rows, _params(dims), constants),), buffers)


def vec4_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why four values are not taken at a time."""
    for name in ("first", "stride"):
        if dims.get(name, 0) % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    return f"width % 4 must be 0, width is {dims['width']}" if dims["width"] % 4 else None


ROUTES: tuple[Route, ...] = (
    *(Route(op, "vec4", _launch_list(op, "vec4"), vec4_unsupported_reason) for op in _INCLUDES),
    *(Route(op, "scalar", _launch_list(op, "scalar")) for op in _INCLUDES),
    Route("rms_norm_add_rms_norm", "vec4", _both_norms_launch_list, vec4_unsupported_reason),
)
