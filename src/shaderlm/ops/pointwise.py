"""Element-wise ops and argmax, NumPy in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..gpu import Array
from ..graph import resolve
from . import checks


def _pointwise(op: str, a: Any, b: Any, route: str | None, device: Any, names: tuple[str, str] = ("a", "b")) -> Array:
    first, second = names
    a = checks.floats(op, first, a, None, "[...]")
    b = checks.floats(op, second, b, None, f"the shape of {first}, or its last dimensions")
    if b.shape != a.shape[a.ndim - b.ndim :] or b.ndim > a.ndim:
        raise InputError(
            f"{op}: {second} must have the shape of {first}, {list(a.shape)}, or its last dimensions; "
            f"got {list(b.shape)}"
        )
    dims = resolve(op, {"count": a.size, "period": b.size})
    return checks.run(op, dims, {"a": a, "b": b}, route, device, a.shape)


def add(a: Any, b: Any, *, route: str | None = None, device: Any = None) -> Array:
    """a + b; b has the shape of a or of its last dimensions."""
    return _pointwise("add", a, b, route, device)


def mul(a: Any, b: Any, *, route: str | None = None, device: Any = None) -> Array:
    """a · b; b has the shape of a or of its last dimensions."""
    return _pointwise("mul", a, b, route, device)


def silu_mul(gate: Any, up: Any, *, route: str | None = None, device: Any = None) -> Array:
    """silu(gate) · up, the middle of a gated feed-forward layer."""
    return _pointwise("silu_mul", gate, up, route, device, ("gate", "up"))


def argmax(x: Any, *, route: str | None = None, device: Any = None) -> NDArray[np.int64]:
    """Index of the largest value of the last axis, the lowest of equals. NaN counts as −inf."""
    op = "argmax"
    x = checks.floats(op, "x", x, None, "[..., n]")
    dims = resolve(op, {"rows": x.size // x.shape[-1], "width": x.shape[-1]})
    return checks.run(op, dims, {"x": x}, route, device, x.shape[:-1], np.uint32).astype(np.int64)
