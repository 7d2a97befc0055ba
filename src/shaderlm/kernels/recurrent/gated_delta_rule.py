"""Routes of gated_delta_rule: the state of each head in registers, row by row of a sequence."""

from __future__ import annotations

from collections.abc import Mapping

from ...gpu.caps import DeviceCaps
from ..route import Dims, Dispatch, LaunchList, Route, batch_bytes, ceil_div, f32, reduction
from ..wgsl import Constant, Kernel

_OPS = ("gated_delta_rule", "slice_gated_delta_rule")
_PARTS, _COLUMNS = 4, 32
_MAX_KEYS = 256  # a lane has KEYS / 4 values of the state in registers
_LANES, _WORKGROUP, _ROWS, _STAGE = 8, 128, 32, 16  # of `columns`
_SMALL_STAGE, _SMALL_MEMORY = 4, 32 << 10  # where a workgroup has less memory


def channels(dims: Dims) -> int:
    """Columns of x: queries and keys of all key heads, values of all value heads."""
    return int(2 * dims["Hk"] * dims["Dk"] + dims["Hv"] * dims["Dv"])


def _buffers(dims: Dims) -> dict[str, int]:
    tokens, heads = dims["tokens"], dims["Hv"]
    factors = dict.fromkeys(("alpha", "beta"), f32(tokens * heads))
    return {
        "x": f32(tokens * channels(dims)),
        **({"factors": f32(tokens * dims["stride"])} if "stride" in dims else factors),
        "decay": f32(2 * heads),
        "batch": batch_bytes(tokens),
        "page_table": f32(1),
        "state": f32(heads * dims["Dk"] * dims["Dv"]),
        "out": f32(tokens * heads * dims["Dv"]),
    }


def _of_factors(dims: Dims) -> tuple[dict[str, int], Mapping[str, str]]:
    """Parameters of alpha and beta, and the buffers that they are in."""
    if "stride" not in dims:
        return {"stride": dims["Hv"], "alpha_first": 0, "beta_first": 0}, {}
    names = ("stride", "alpha_first", "beta_first")
    return {name: dims[name] for name in names}, dict.fromkeys(("alpha", "beta"), "factors")


def _rows(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, keys, values = dims["tokens"], dims["Hv"], dims["Dk"], dims["Dv"]
    constants: dict[str, Constant] = {
        "ONE_ROW": tokens == 1,
        "SINGLE": dims["single"],
        "GROUPED": dims["grouped"],
        "KEYS": keys,
        "ROWS": keys // _PARTS,
    }
    factors, bind = _of_factors(dims)
    params = {"key_heads": dims["Hk"], "value_heads": heads, "values": values, **factors}
    include = ("shared/batch", "recurrent/states", "recurrent/delta_factors")
    kernel = Kernel("recurrent/gated_delta_rule", include)
    dispatch = Dispatch(kernel, tokens * heads * ceil_div(values, _COLUMNS), params, constants, bind)
    return LaunchList((dispatch,), _buffers(dims))


def _rows_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    keys = dims["Dk"]
    if keys % _PARTS or keys > _MAX_KEYS:
        return f"Dk must be a multiple of {_PARTS} and at most {_MAX_KEYS}, it is {keys}"
    return None


def _lanes(caps: DeviceCaps) -> int:
    """Lanes of a column: as many as are in a subgroup whatever its size."""
    return min(_LANES, caps.least_lanes)


def _columns(dims: Dims, caps: DeviceCaps) -> LaunchList:
    tokens, heads, keys, values = dims["tokens"], dims["Hv"], dims["Dk"], dims["Dv"]
    sums, needs = reduction(caps)
    factors, bind = _of_factors(dims)
    shared: dict[str, Constant] = {"ONE_ROW": tokens == 1, "GROUPED": dims["grouped"]}
    of_rows = Dispatch(
        Kernel("recurrent/gated_delta_rule_factors", ("shared/batch", "recurrent/delta_factors", sums), needs),
        tokens * dims["Hk"],
        {"key_heads": dims["Hk"], "value_heads": heads, "keys": keys, "channels": channels(dims), **factors},
        shared,
        bind,
    )
    lanes = max(1, _lanes(caps))
    stage = _STAGE if caps.max_workgroup_memory >= _SMALL_MEMORY else _SMALL_STAGE
    include, subgroups = ("shared/batch", "recurrent/states"), frozenset({"subgroups"})
    of_columns = Dispatch(
        Kernel("recurrent/gated_delta_rule_columns", include, subgroups, unroll=True),
        ceil_div(tokens, _ROWS) * heads * ceil_div(values, _WORKGROUP // lanes),
        {"key_heads": dims["Hk"], "value_heads": heads, "keys": keys, "values": values},
        {
            **shared,
            "LANES": lanes,
            "QUADS": max(1, keys // 4 // lanes),
            "WG": _WORKGROUP,
            "ROWS": _ROWS,
            "STAGE": stage,
        },
    )
    buffers = {**_buffers(dims), "row_factors": f32(8 * tokens * heads)}
    return LaunchList((of_rows, of_columns), buffers)


def _columns_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    if not caps.subgroups or caps.subgroup_min < 4:
        return "it needs subgroups of at least 4 lanes"
    if dims["tokens"] == 1:
        return "it is for several rows, tokens is 1"
    keys, multiple = dims["Dk"], 4 * _lanes(caps)
    if keys % multiple or keys > _MAX_KEYS:
        return f"Dk must be a multiple of {multiple} and at most {_MAX_KEYS}, it is {keys}"
    return f"Dv % 4 must be 0, Dv is {dims['Dv']}" if dims["Dv"] % 4 else None


ROUTES: tuple[Route, ...] = tuple(
    route
    for op in _OPS
    for route in (
        Route(op, "columns", _columns, _columns_unsupported_reason),
        Route(op, "rows", _rows, _rows_unsupported_reason),
    )
)
