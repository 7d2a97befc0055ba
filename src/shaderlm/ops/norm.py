"""rms_norm and its fusions, NumPy in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compile import run_op
from ..errors import InputError
from ..gpu import Array
from ..graph import resolve
from . import checks


def _dims(called: str, op: str, x: Array, eps: Any) -> dict[str, Any]:
    eps = checks.number(called, "eps", eps, positive=True)
    return resolve(op, {"tokens": x.size // x.shape[-1], "width": x.shape[-1], "eps": eps})


def _rows(op: str, name: str, x: Any) -> Array:
    """Rows whose squares add up to a number that f32 holds; above that a norm would be 0."""
    rows = checks.floats(op, name, x, None, "[..., width]")
    limit = float(np.sqrt(np.finfo(np.float32).max / rows.shape[-1]))
    largest = float(np.abs(rows[np.isfinite(rows)]).max(initial=0.0))
    if largest > limit:
        raise InputError(f"{op}: the squares of {name} must fit float32: at most {limit:.3g} here, got {largest:.3g}")
    return rows


def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6, *, route: str | None = None, device: Any = None) -> Array:
    """weight · x / sqrt(mean(x²) + eps) over the last axis, in one dispatch; weight None leaves it out."""
    return _norm("rms_norm", x, weight, eps, route, device)


def rms_norm_mul(x: Any, weight: Any, eps: float = 1e-6, *, route: str | None = None, device: Any = None) -> Array:
    """The fusion of rms_norm and mul: weight · x / sqrt(mean(x²) + eps) over the last axis."""
    if weight is None:
        raise InputError("rms_norm_mul: weight must be a NumPy array, got None; rms_norm takes none")
    return _norm("rms_norm_mul", x, weight, eps, route, device)


def _norm(called: str, x: Any, weight: Any, eps: float, route: str | None, device: Any) -> Array:
    """rms_norm with or without weights; errors name the function that was called."""
    x = _rows(called, "x", x)
    op, operands = "rms_norm", {"x": x}
    if weight is not None:
        op, operands = "rms_norm_mul", {"x": x, "weight": _weight(called, weight, x)}
    return checks.run(op, _dims(called, op, x, eps), operands, route, device, x.shape)


def _weight(op: str, weight: Any, x: Array) -> Array:
    return checks.floats(op, "weight", weight, 1, "[width]", x.shape[-1:])


def add_rms_norm(
    a: Any, b: Any, weight: Any, eps: float = 1e-6, *, route: str | None = None, device: Any = None
) -> tuple[Array, Array]:
    """(a + b, weight · rms_norm(a + b)) in one dispatch: a residual add and the norm that reads it."""
    op = "add_rms_norm"
    a, b = _rows(op, "a", a), _rows(op, "b", b)
    checks.shape(op, "b", b, a.shape, "the shape of a")
    operands = {"a": a, "b": b, "weight": _weight(op, weight, a)}
    raw = run_op(checks.device_of(device), op, _dims(op, op, a, eps), operands, route)
    return raw["sum"].view(np.float32).reshape(a.shape), raw["out"].view(np.float32).reshape(a.shape)
