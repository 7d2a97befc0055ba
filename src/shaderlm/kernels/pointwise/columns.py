"""Route of columns: a part of each row, copied out."""

from __future__ import annotations

from ...gpu.facts import Facts
from ..route import Dims, Recipe, Route, covering, f32
from ..wgsl import Kernel


def _recipe(dims: Dims, facts: Facts) -> Recipe:
    rows, width, count = dims["rows"], dims["width"], dims["count"]
    params = {"rows": rows, "width": width, "first": dims["first"], "count": count}
    buffers = {"x": f32(rows * width), "out": f32(rows * count)}
    return Recipe((covering(Kernel("pointwise/columns"), rows * count, params),), buffers)


ROUTES = (Route("columns", "values", _recipe),)
