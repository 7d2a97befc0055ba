"""Route of route_experts."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_if_read, f32, is_specialised, row_count
from ..wgsl import Kernel

# Bits of the parameter `how` (route_experts.wgsl).
_GATING = {"softmax": 1, "softmax_used": 2, "sigmoid": 0}
_NORMALISE, _BIAS, _SCALED, _SHARED = 4, 8, 16, 32


def _room(count: int) -> int:
    """A power of two: few kernels serve all models."""
    return max(16, 1 << (count - 1).bit_length())


def _gating(dims: Dims) -> int:
    """A softmax over all experts whose chosen factors are made to add up to 1 is one over the chosen experts."""
    if dims["gating"] == "softmax" and dims["normalise"] and not dims["bias"]:
        return _GATING["softmax_used"]
    return _GATING[dims["gating"]]


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, experts, used = dims["tokens"], dims["experts"], dims["used"]
    how = dims["normalise"] * _NORMALISE + dims["bias"] * _BIAS + dims["scaled"] * _SCALED + dims["shared"] * _SHARED
    params = {
        "tokens": tokens,
        "experts": experts,
        "used": used,
        "how": _gating(dims) + how,
        "scale": dims["scale"],
    }
    # A lane for each expert, as far as a workgroup of usual size goes.
    constants = {"WG": max(32, min(256, _room(experts))), "EXPERTS": _room(experts), "USED": _room(used)}
    specialised = is_specialised(tokens, caps)
    there = {"bias": dims["bias"], "expert_scale": dims["scaled"]}
    unbound = tuple(name for name, is_there in there.items() if not is_there) if specialised else ()
    kernel = Kernel("experts/route_experts", (row_count(dims),))
    dispatch = Dispatch(kernel, tokens, params, constants, specialised=specialised, unbound=unbound)
    buffers = {
        "logits": f32(tokens * (experts + dims["shared"])),
        **{name: f32(experts) if is_there else 0 for name, is_there in there.items()},
        **dict.fromkeys(("ids", "factors"), f32(tokens * (used + dims["shared"]))),
        **batch_if_read(dims),
    }
    return LaunchList((dispatch,), buffers)


ROUTES = (Route("route_experts", "workgroup", _launch_list),)
