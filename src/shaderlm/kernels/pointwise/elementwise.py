"""Routes of add, mul and silu_mul: one kernel for one or four values at a time, with the operation included."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.facts import Facts
from ..route import Dims, Recipe, Route, always, covering, f32
from ..wgsl import Kernel


def _recipe(op: str, width: int) -> Callable[[Dims, Facts], Recipe]:
    kernel = Kernel("pointwise/pointwise", (f"pointwise/apply_{op}",))
    constants = {"value": "f32" if width == 1 else "vec4<f32>"}

    def recipe(dims: Dims, facts: Facts) -> Recipe:
        count, period = dims["count"], dims["period"]
        params = {"count": count // width, "period": period // width}
        buffers = {"a": f32(count), "b": f32(period), "out": f32(count)}
        return Recipe((covering(kernel, count // width, params, constants),), buffers)

    return recipe


def _vec4_why_not(dims: Dims, facts: Facts) -> str | None:
    for name in ("count", "period"):
        if dims[name] % 4:
            return f"{name} % 4 must be 0, {name} is {dims[name]}"
    return None


ROUTES = tuple(
    Route(op, strategy, _recipe(op, width), why_not)
    for op in ("add", "mul", "silu_mul")
    for strategy, width, why_not in (("vec4", 4, _vec4_why_not), ("scalar", 1, always))
)
