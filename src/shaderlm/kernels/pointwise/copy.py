"""Route of copy, which measures the memory bandwidth of a device."""

from __future__ import annotations

from ...gpu.facts import Facts
from ..route import Dims, Recipe, Route, covering, f32
from ..wgsl import Kernel


def _recipe(dims: Dims, facts: Facts) -> Recipe:
    count = dims["count"]
    dispatch = covering(Kernel("pointwise/copy_vec4"), count // 4, {"count": count // 4})
    return Recipe((dispatch,), {"x": f32(count), "out": f32(count)})


def _why_not(dims: Dims, facts: Facts) -> str | None:
    return f"count % 4 must be 0, count is {dims['count']}" if dims["count"] % 4 else None


ROUTES = (Route("copy", "vec4", _recipe, _why_not),)
