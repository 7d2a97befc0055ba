"""Routes of mamba2_scan and its chain: the state of each head in registers, row by row."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32, processors
from ..wgsl import Kernel

_ROWS = 8  # of the state, in the registers of a lane
_LANES = 128  # of a workgroup, if its head is wide enough
_WINDOW = 8  # rows of a step that workgroups look at for beginnings of sequences
_MOST = 3e38  # where nothing limits dt
_CHUNKS = (16, 8, 4, 2, 1)  # rows of a step between two barriers


def _quads(dims: Dims, caps: DeviceCaps) -> int:
    """Columns of a workgroup, in fours: fewer where heads do not fill the device."""
    quads, parts = int(dims["P"]) // 4, int(dims["N"]) // _ROWS
    lanes = max(1, _LANES // parts)
    while lanes > 1 and (
        lanes >= 2 * quads or (lanes * parts > 32 and dims["H"] * ceil_div(quads, lanes) < processors(caps))
    ):
        lanes //= 2
    return lanes


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, values, rows, groups = (dims[name] for name in ("tokens", "H", "P", "N", "G"))
    quads, parts = _quads(dims, caps), ceil_div(rows, _ROWS)
    lanes = quads * parts
    each = 8 * rows + 16 * quads + 8 + 16 * lanes  # bytes of workgroup memory
    fitting = [chunk for chunk in _CHUNKS if chunk * each <= caps.max_workgroup_memory]
    chunk = 1 if dims["single"] else next(iter(fitting), 1)
    gated, window = "gate_first" in dims, 1 if dims["single"] else _WINDOW
    constants = {
        "GATED": gated,
        "ONE_ROW": tokens == 1,
        "SINGLE": dims["single"],
        "QUADS": quads,
        "PARTS": parts,
        "WG": lanes,
        "STATE": rows,
        "ROW_QUADS": _ROWS // 4,
        "WINDOW": window,
        "CHUNK": chunk,
        "SUMS": chunk * lanes,
        "STAGED": chunk * rows // 4,
        "VALUES": chunk * quads,
    }
    params = {"heads": heads, "groups": groups, "values": values, "least": dims["dt_min"]}
    params |= {"most": dims["dt_max"] or _MOST, "stride": dims.get("stride", heads)}
    params |= {name: dims.get(name, 0) for name in ("deltas_first", "gate_first")}
    name = "projected" if gated else "deltas"
    kernel = Kernel("recurrent/mamba2_scan", ("shared/batch", "recurrent/states", "shared/silu"), unroll=True)
    dispatch = Dispatch(
        kernel, ceil_div(tokens, window) * heads * ceil_div(values // 4, quads), params, constants, {"projected": name}
    )
    channels = heads * values + 2 * groups * rows
    buffers = {
        "x": f32(tokens * channels),
        "bias": f32(channels),
        name: f32(tokens * dims.get("stride", heads)),
        "factors": f32(3 * heads),
        "batch": batch_bytes(tokens),
        "page_table": f32(1),
        "state": f32(heads * rows * values),
        "out": f32(tokens * heads * values),
    }
    return LaunchList((dispatch,), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if dims["N"] % _ROWS or dims["P"] % 4:
        return f"N must be a multiple of {_ROWS} and P of 4, they are {dims['N']} and {dims['P']}"
    return None


ROUTES: tuple[Route, ...] = tuple(
    Route(op, "rows", _launch_list, _unsupported_reason) for op in ("mamba2_scan", "mamba2_scan_silu_mul")
)
