"""Route of embedding: rows of a weight in any format that linear knows."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..linear import packed
from ..linear.linear import pack_weight
from ..route import Dims, LaunchList, Route, covering, f32, part
from ..wgsl import Kernel


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    lay, k = packed.layout(dims), packed.padded_k(dims)
    kernel = Kernel("pointwise/embedding", (lay.file,))
    buffers = {"batch": 16 * (1 + dims["tokens"]), "tokens": 4, "out": f32(dims["tokens"] * k)}
    dispatches = []
    for i, (first, end) in enumerate(packed.ranges(dims, caps)):
        rows = end - first
        buffers[part("weight", i)] = rows * lay.row_bytes
        buffers[part("scales", i)] = rows * lay.groups * lay.group_bytes
        params = {"tokens": dims["tokens"], "k": k, "n": rows, "n_first": first, "groups": lay.groups}
        bind = {name: part(name, i) for name in ("weight", "scales")}
        dispatches.append(covering(kernel, dims["tokens"] * k // 4, params, lay.constants, bind))
    return LaunchList(tuple(dispatches), buffers)


ROUTES: tuple[Route, ...] = (
    Route("embedding", "rows", _launch_list, pack={"weight": pack_weight}, weight_parts=packed.weight_parts),
)
