"""Routes of embedding and add_positions: rows of a weight in any format that linear knows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...gpu.caps import DeviceCaps
from ..linear import packed
from ..linear.linear import pack_weight
from ..route import Array, Dims, LaunchList, Route, batch_bytes, covering, f32, part
from ..wgsl import Kernel


def _launch_list(op: str) -> Callable[[Dims, DeviceCaps], LaunchList]:
    def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
        lay, k = packed.layout(dims), packed.padded_k(dims)
        kernel, rows = Kernel(f"pointwise/{op}", (lay.file,)), f32(dims["tokens"] * k)
        inputs = {"tokens": 4} if op == "embedding" else {"x": rows}
        buffers = {"batch": batch_bytes(dims["tokens"]), **inputs, "out": rows}
        dispatches = []
        for i, (first, end) in enumerate(packed.ranges(dims, caps)):
            count = end - first
            buffers[part("weight", i)] = count * lay.row_bytes
            buffers[part("scales", i)] = count * lay.groups * lay.group_bytes
            params: dict[str, float] = {
                "tokens": dims["tokens"],
                "k": k,
                "n": count,
                "n_first": first,
                "groups": lay.groups,
            }
            if op == "embedding":
                params["factor"] = float(dims["factor"])
            bind = {name: part(name, i) for name in ("weight", "scales")}
            dispatches.append(covering(kernel, dims["tokens"] * k // 4, params, lay.constants, bind))
        return LaunchList(tuple(dispatches), buffers)

    return launch_list


def _pack_rows(x: Array, dims: Dims, caps: DeviceCaps) -> dict[str, Array]:
    return {"x": np.pad(x.reshape(dims["tokens"], -1), ((0, 0), (0, packed.padded_k(dims) - dims["K"])))}


_PACK = {"weight": pack_weight}
ROUTES: tuple[Route, ...] = (
    Route("embedding", "rows", _launch_list("embedding"), pack=_PACK, weight_parts=packed.weight_parts),
    Route(
        "add_positions",
        "rows",
        _launch_list("add_positions"),
        pack={**_PACK, "x": _pack_rows},
        weight_parts=packed.weight_parts,
    ),
)
