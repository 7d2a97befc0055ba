"""Route of next_position, which ends a step, so that the next one needs nothing from the host."""

from __future__ import annotations

from ...gpu.facts import Facts
from ..route import Dims, Dispatch, Recipe, Route, f32
from ..wgsl import Kernel


def _recipe(dims: Dims, facts: Facts) -> Recipe:
    dispatch = Dispatch(Kernel("pointwise/next_position"), 1, {"by": dims["by"]})
    return Recipe((dispatch,), {"positions": f32(1)})


ROUTES = (Route("next_position", "thread", _recipe),)
