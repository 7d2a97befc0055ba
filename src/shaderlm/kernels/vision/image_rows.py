"""Routes of ops that read records of rows of images: features in place of embeddings, and angles on several axes."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ...graph.batch import IMAGE_WORDS
from ..route import Dims, LaunchList, Route, batch_bytes, covering, f32
from ..wgsl import Kernel


def record_bytes(tokens: int) -> int:
    """Of the records of so many rows."""
    return f32(IMAGE_WORDS * tokens)


def _put_features(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, width, levels = dims["tokens"], dims["K"], dims["levels"]
    count = tokens * width
    params = {"count": count, "width": width, "stride": levels * width, "first": dims["level"] * width}
    # Of features there is one row at least.
    buffers = {"x": f32(count), "features": f32(levels * width), "image_rows": record_bytes(tokens), "out": f32(count)}
    return LaunchList((covering(Kernel("vision/put_features"), count, params, {"ADD": dims["add"]}),), buffers)


def _rope_rows(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, pairs = dims["tokens"], dims["rotary"] // 2
    params = {"tokens": tokens, "pairs": pairs}
    params |= {name: dims[name] for name in ("temporal", "vertical", "horizontal")}
    buffers = {"table": f32(2 * pairs), "batch": batch_bytes(tokens), "image_rows": record_bytes(tokens)}
    buffers["out"] = f32(2 * tokens * pairs)
    kernel = Kernel("vision/rope_rows")
    return LaunchList((covering(kernel, tokens * pairs, params, {"GROUPED": dims["grouped"]}),), buffers)


ROUTES: tuple[Route, ...] = (
    Route("put_features", "values", _put_features),
    Route("rope_rows", "pairs", _rope_rows),
)
