"""The route of sample: one workgroup, as large as the device allows, finds the thresholds and draws."""

from __future__ import annotations

from ...gpu.facts import Facts
from ..route import Dims, Dispatch, Recipe, Route, f32, reduction
from ..wgsl import Kernel, compose

_WIDEST = 1 << 24  # the kernel counts in f32


def _lanes(kernel: Kernel, facts: Facts) -> int:
    """The most threads, up to 1024, that the device grants to a workgroup together with their memory."""
    for lanes in (1024, 512, 256):
        memory = compose(kernel, {"WG": lanes, "TEAM": lanes}).workgroup_memory
        if lanes <= facts.max_invocations and memory <= facts.max_workgroup_memory:
            return lanes
    return 128


def _recipe(dims: Dims, facts: Facts) -> Recipe:
    width = dims["width"]
    include, needs = reduction(facts)
    team = "shared/team_subgroup" if facts.subgroups else "shared/team_tree"
    kernel = Kernel("pointwise/sample", (include, team), needs)
    lanes = _lanes(kernel, facts)
    dispatch = Dispatch(kernel, 1, {"width": width}, {"WG": lanes, "TEAM": lanes}, written=not facts.software)
    return Recipe((dispatch,), {"logits": f32(width), "choice": f32(8), "out": f32(1)})


def _why_not(dims: Dims, facts: Facts) -> str | None:
    wide = dims["width"] > _WIDEST
    return f"width must be at most {_WIDEST:,}, width is {dims['width']:,}" if wide else None


ROUTES = (Route("sample", "workgroup", _recipe, _why_not),)
