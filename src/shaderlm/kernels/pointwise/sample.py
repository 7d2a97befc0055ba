"""The route of sample: one workgroup, as large as the device allows, finds the thresholds and draws."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, f32, reduction
from ..wgsl import Kernel, compose

_WIDEST = 1 << 24  # the kernel counts in f32


def _lanes(kernel: Kernel, caps: DeviceCaps) -> int:
    """The most threads, up to 1024, that the device grants to a workgroup together with their memory."""
    for lanes in (1024, 512, 256):
        memory = compose(kernel, {"WG": lanes, "TEAM": lanes}).workgroup_memory
        if lanes <= caps.max_invocations and memory <= caps.max_workgroup_memory:
            return lanes
    return 128


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    width = dims["width"]
    include, needs = reduction(caps)
    team = "shared/team_subgroup" if caps.subgroups else "shared/team_tree"
    kernel = Kernel("pointwise/sample", (include, team), needs)
    lanes = _lanes(kernel, caps)
    dispatch = Dispatch(kernel, 1, {"width": width}, {"WG": lanes, "TEAM": lanes}, specialised=not caps.software)
    return LaunchList((dispatch,), {"logits": f32(width), "choice": f32(8), "out": f32(1)})


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    wide = dims["width"] > _WIDEST
    return f"width must be at most {_WIDEST:,}, width is {dims['width']:,}" if wide else None


ROUTES = (Route("sample", "workgroup", _launch_list, _unsupported_reason),)
