"""Routes of sample: greedy for all rows, or by the settings of each row; the last dispatch ends the step."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ...graph.sampling import OUTPUT
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32, is_specialised
from ..wgsl import Constant, Kernel
from .argmax import CHUNK, part_dispatch

WIDEST = 1 << 24  # the kernels count in f32
_LANES = 256  # of a workgroup; a row has no more chunks than that
_BINS = 1024
_LARGEST_UNIT = 1 << 23


def _chunk(width: int) -> int:
    """Logits per workgroup. It depends on the width alone: a row is sampled alike in every batch."""
    chunk = CHUNK
    while ceil_div(width, chunk) > _LANES:
        chunk *= 2
    return chunk


def _buffers(dims: Dims) -> dict[str, int]:
    rows = dims["rows"]
    return {
        "logits": f32(rows * dims["width"]),
        "outputs": OUTPUT.itemsize * rows,
        "batch": batch_bytes(dims["tokens"]),
        **({"page_table": f32(dims["pages"])} if dims["advance"] and dims["paged"] else {}),
        "tokens": f32(dims["slots"]),
        **({"counts": f32(dims["slots"] * dims["width"])} if dims["counted"] else {}),
    }


def _ending(dims: Dims) -> tuple[str, ...]:
    """The files of the dispatch that ends a step: what becomes of a token and of its row of the batch."""
    count = f"sampling/count_{'token' if dims['counted'] else 'nothing'}"
    if not dims["advance"]:
        return (count, "sampling/stay")
    return (count, f"sampling/advance_{'paged' if dims['paged'] else 'contiguous'}", "shared/batch")


def _greedy_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    parts = ceil_div(width, CHUNK)
    merge = Dispatch(
        Kernel("sampling/sample_greedy", ("sampling/best", "sampling/best_part", *_ending(dims))),
        rows,
        {"width": width, "parts": parts},
        specialised=caps.policy.specialise_constants,
    )
    buffers = {**_buffers(dims), "keys": f32(rows * parts), "indices": f32(rows * parts)}
    return LaunchList((part_dispatch(rows, width, "logits", rows > 1, caps), merge), buffers)


def _greedy_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    return None if dims["greedy"] else "it takes the largest logit of every row; greedy is not set"


def _histogram_launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    rows, width = dims["rows"], dims["width"]
    chunk = _chunk(width)
    parts = ceil_div(width, chunk)
    specialised = is_specialised(rows, caps)
    count = f"sampling/output_count_{'fixed' if rows == 1 else 'batch'}"
    row = ("sampling/keys", "sampling/settings", "sampling/extent")
    shape = {"rows": rows, "width": width, "parts": parts}
    # Of what a weight lacks of its bin's largest, less than 1 / 16: as many as there are logits must fit 32 bits.
    unit = float(min(_LARGEST_UNIT, 16 * (((1 << 32) - 1) // width - 1)))
    extent = Kernel("sampling/sample_extent", ("sampling/keys", "sampling/extent", count))
    histogram = Kernel("sampling/sample_histogram", (*row, "sampling/bins", count))
    gather = Kernel("sampling/sample_gather", (*row, "sampling/bins", "sampling/workgroup", count))
    draw = Kernel("sampling/sample_draw", (*row, "sampling/workgroup", "sampling/uniform", *_ending(dims)))
    sizes: dict[str, Constant] = {"WG": _LANES, "CHUNK": chunk}
    bins = {**sizes, "BINS": _BINS}
    lanes = _LANES >> (parts - 1).bit_length()
    dispatches = (
        Dispatch(extent, rows * parts, shape, bins, specialised=specialised),
        Dispatch(histogram, rows * parts, {**shape, "unit": unit}, bins, specialised=specialised),
        Dispatch(gather, rows * parts, {**shape, "unit": unit}, bins, specialised=specialised),
        Dispatch(
            draw,
            rows,
            {"width": width, "parts": parts, "lanes": lanes},
            sizes,
            specialised=caps.policy.specialise_constants,
        ),
    )
    buffers = {
        **_buffers(dims),
        "extents": 8 * rows * parts,
        "histogram": f32(2 * _BINS * rows),
        "gathered": f32(rows * width),
        "sums": 32 * rows * parts,
    }
    return LaunchList(dispatches, buffers)


def _histogram_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["greedy"]:
        return "it reads the settings of every row; greedy is set"
    wide = dims["width"] > WIDEST
    return f"width must be at most {WIDEST:,}, width is {dims['width']:,}" if wide else None


ROUTES: tuple[Route, ...] = (
    Route("sample", "greedy", _greedy_launch_list, _greedy_unsupported_reason),
    Route("sample", "histogram", _histogram_launch_list, _histogram_unsupported_reason),
)
