"""A route that was chosen for a shape, with all that lowering wants to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..graph.cost import CACHES
from ..kernels import Dispatch, LaunchList, Route
from ..kernels.route import WeightPart, buffers_of


class Routed(NamedTuple):
    """A route for a shape, its configuration and launch list, and each dispatch's share of the op's arithmetic."""

    route: Route
    config: str
    launch_list: LaunchList
    shares: tuple[float, ...]
    weight_parts: Mapping[str, WeightPart]


def shares(launch_list: LaunchList) -> tuple[float, ...]:
    """An op's arithmetic is shared out by the bytes of matrices or caches that a dispatch reads; of all if none."""

    def streamed(dispatch: Dispatch) -> int:
        bound = [] if dispatch.idle else buffers_of(dispatch)
        return sum(launch_list.buffers[key] for key in bound if not large or key in large)

    large = {key for key in launch_list.buffers if key.split(".")[0] in ("weight", *CACHES)}
    sizes = [streamed(dispatch) for dispatch in launch_list.dispatches]
    return tuple(size / (sum(sizes) or 1) for size in sizes)
