"""Routes of resize, concat and patches: from pixels to rows of a tower."""

from __future__ import annotations

from collections.abc import Mapping

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, ceil_div, covering, f32
from ..wgsl import Kernel
from .tower import values_of


def _pixels(count: int, dims: Dims) -> int:
    """Bytes of so many values of pixels: whole words."""
    return 4 * ceil_div(count, 4) if dims["bytes"] else f32(count)


def _reading_pixels(path: str, threads: int, params: Mapping[str, int | float], dims: Dims) -> Dispatch:
    return covering(Kernel(path, ("vision/pixel_values",)), threads, params, {"BYTES": dims["bytes"]})


def _resize(dims: Dims, caps: DeviceCaps) -> LaunchList:
    size, inner, to, taps = (dims[name] for name in ("size", "inner", "to", "taps"))
    count = dims["outer"] * to * inner
    params = {"count": count, "size": size, "inner": inner, "to": to, "taps": taps}
    buffers = {"x": _pixels(dims["outer"] * size * inner, dims), "first": f32(to), "weights": f32(to * taps)}
    return LaunchList((_reading_pixels("vision/resize", count, params, dims),), {**buffers, "out": f32(count)})


def _concat(dims: Dims, caps: DeviceCaps) -> LaunchList:
    a, b = dims["a"], dims["b"]
    buffers = {"a": f32(a), "b": f32(b), "out": f32(a + b)}
    unit, value = values_of(a, b)
    count = (a + b) // unit
    return LaunchList((covering(Kernel("vision/concat"), count, {"first": a // unit, "count": count}, value),), buffers)


def _patches(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width = dims["tokens"], dims["width"]
    params = {"tokens": tokens, "side": dims["patch"], "width": width}
    buffers = {"x": _pixels(dims["count"], dims), "corners": f32(2 * tokens), "factors": f32(6)}
    buffers["out"] = f32(tokens * width)
    return LaunchList((_reading_pixels("vision/patches", tokens * width, params, dims),), buffers)


ROUTES: tuple[Route, ...] = (
    Route("resize", "values", _resize),
    Route("concat", "values", _concat),
    Route("patches", "values", _patches),
)
