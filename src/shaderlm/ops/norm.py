"""rms_norm and its fusions, NumPy in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compile import run_op
from ..compile.execute import read_as
from ..gpu import Array
from ..graph import resolve
from . import checks


def _dims(op: str, x: Array, eps: Any) -> dict[str, Any]:
    given = {
        "rows": x.size // x.shape[-1],
        "width": x.shape[-1],
        "eps": checks.number(op, "eps", eps, positive=True),
    }
    return resolve(op, given)


def _weight(op: str, weight: Any, x: Array) -> Array:
    given = checks.floats(op, "weight", weight, 1, "[width]")
    checks.shape(op, "weight", given, (x.shape[-1],), "[width]")
    return given


def rms_norm(x: Any, weight: Any, eps: float = 1e-6, *, route: str | None = None, device: Any = None) -> Array:
    """weight · x / sqrt(mean(x²) + eps) over the last axis, in one dispatch; weight None leaves it out."""
    if weight is not None:
        return rms_norm_mul(x, weight, eps, route=route, device=device)
    x = checks.floats("rms_norm", "x", x, None, "[..., width]")
    raw = run_op(checks.device_of(device), "rms_norm", _dims("rms_norm", x, eps), {"x": x}, route)
    return read_as(raw["out"], np.float32, x.shape)


def rms_norm_mul(x: Any, weight: Any, eps: float = 1e-6, *, route: str | None = None, device: Any = None) -> Array:
    """The fusion of rms_norm and mul: weight · x / sqrt(mean(x²) + eps) over the last axis."""
    x = checks.floats("rms_norm_mul", "x", x, None, "[..., width]")
    operands = {"x": x, "weight": _weight("rms_norm_mul", weight, x)}
    raw = run_op(checks.device_of(device), "rms_norm_mul", _dims("rms_norm_mul", x, eps), operands, route)
    return read_as(raw["out"], np.float32, x.shape)


def add_rms_norm(
    a: Any, b: Any, weight: Any, eps: float = 1e-6, *, route: str | None = None, device: Any = None
) -> tuple[Array, Array]:
    """(a + b, weight · rms_norm(a + b)) in one dispatch: a residual add and the norm that reads it."""
    op = "add_rms_norm"
    a = checks.floats(op, "a", a, None, "[..., width]")
    b = checks.floats(op, "b", b, None, "[..., width]")
    checks.shape(op, "b", b, a.shape, "the shape of a")
    operands = {"a": a, "b": b, "weight": _weight(op, weight, a)}
    raw = run_op(checks.device_of(device), op, _dims(op, a, eps), operands, route)
    return read_as(raw["sum"], np.float32, a.shape), read_as(raw["out"], np.float32, a.shape)
