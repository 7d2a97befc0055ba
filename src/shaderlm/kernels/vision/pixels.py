"""Routes of resize, concat and patches: from pixels to rows of a tower."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, Route, covering, f32
from ..wgsl import Kernel


def _resize(dims: Dims, caps: DeviceCaps) -> LaunchList:
    size, inner, to, taps = (dims[name] for name in ("size", "inner", "to", "taps"))
    count = dims["outer"] * to * inner
    params = {"count": count, "size": size, "inner": inner, "to": to, "taps": taps}
    buffers = {"x": f32(dims["outer"] * size * inner), "first": f32(to), "weights": f32(to * taps), "out": f32(count)}
    return LaunchList((covering(Kernel("vision/resize"), count, params),), buffers)


def _concat(dims: Dims, caps: DeviceCaps) -> LaunchList:
    a, b = dims["a"], dims["b"]
    buffers = {"a": f32(a), "b": f32(b), "out": f32(a + b)}
    return LaunchList((covering(Kernel("vision/concat"), a + b, {"first": a, "count": a + b}),), buffers)


def _patches(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width = dims["tokens"], dims["width"]
    params = {"tokens": tokens, "side": dims["patch"], "width": width}
    buffers = {"x": f32(dims["count"]), "corners": f32(2 * tokens), "factors": f32(6), "out": f32(tokens * width)}
    return LaunchList((covering(Kernel("vision/patches"), tokens * width, params),), buffers)


ROUTES: tuple[Route, ...] = (
    Route("resize", "values", _resize),
    Route("concat", "values", _concat),
    Route("patches", "values", _patches),
)
