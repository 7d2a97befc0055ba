"""Route of fma_chain, which measures the arithmetic speed of a device."""

from __future__ import annotations

from ...gpu.facts import Facts
from ..route import Dims, Recipe, Route, covering, f32
from ..wgsl import Kernel

_VALUES = 16  # per thread


def _recipe(dims: Dims, facts: Facts) -> Recipe:
    count = dims["count"]
    params = {"count": count // 4, "rounds": dims["rounds"], "factor": 0.75, "term": 0.25}
    dispatch = covering(Kernel("pointwise/fma_chain_vec4"), count // _VALUES, params)
    return Recipe((dispatch,), {"x": f32(count), "out": f32(count)})


def _why_not(dims: Dims, facts: Facts) -> str | None:
    return f"count % {_VALUES} must be 0, count is {dims['count']}" if dims["count"] % _VALUES else None


ROUTES = (Route("fma_chain", "vec4", _recipe, _why_not),)
