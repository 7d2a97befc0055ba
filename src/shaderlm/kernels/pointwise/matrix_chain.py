"""Route of matrix_chain, which measures the arithmetic speed of a device's matrix units."""

from __future__ import annotations

from ...gpu.caps import DeviceCaps
from ..linear.matrix import MATRIX_UNITS, matrix_constants, matrix_shape, units_unsupported_reason
from ..route import Dims, Dispatch, LaunchList, Route, f32
from ..wgsl import Kernel

_SUBGROUPS, _STEPS = 8, 4  # of a workgroup; rounds that are written out
_NEEDS = frozenset({"f16", "subgroups", "subgroup_matrix"})


def launch_list_with(dims: Dims, caps: DeviceCaps, units: str = MATRIX_UNITS) -> LaunchList:
    """The chain with the shape that products take. `units` is the file that multiplies matrices."""
    shape = matrix_shape(caps)
    assert shape is not None, "unsupported_reason was asked"
    sides = {"TM": dims["rows"] // shape.m, "TN": dims["columns"] // shape.n}
    needs = _NEEDS if units == MATRIX_UNITS else frozenset[str]()
    dispatch = Dispatch(
        Kernel("pointwise/matrix_chain", (units,), needs, unroll=True),
        dims["count"],
        {"count": dims["count"], "rounds": dims["rounds"] // (_SUBGROUPS * _STEPS)},
        {**sides, **matrix_constants(shape, caps.subgroup_max), "SUBS": _SUBGROUPS, "STEPS": _STEPS},
    )
    x, out = (dims["rows"] + dims["columns"]) * dims["K"], dims["count"] * dims["rows"] * dims["columns"]
    return LaunchList((dispatch,), {"x": f32(x), "out": f32(out)})


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return launch_list_with(dims, caps)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    reason = units_unsupported_reason(caps)
    if reason:
        return reason
    shape = matrix_shape(caps)
    assert shape is not None
    if dims["rows"] % shape.m or dims["columns"] % shape.n or dims["K"] != shape.k:
        product = f"{dims['rows']}×{dims['columns']}×{dims['K']}"
        return f"matrices of {shape.m}×{shape.n}×{shape.k} do not make up {product}"
    if dims["rounds"] % (_SUBGROUPS * _STEPS):
        return f"rounds % {_SUBGROUPS * _STEPS} must be 0, rounds is {dims['rounds']}"
    return None


ROUTES: tuple[Route, ...] = (Route("matrix_chain", "matrix", _launch_list, _unsupported_reason, exact=False),)
