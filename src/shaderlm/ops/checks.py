"""What every function here does: check its arguments, saying what was given and what was expected, and run its op."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compile.execute import Operands, run_op
from ..errors import InputError
from ..gpu import Array, Device, open_device
from ..kernels import Dims


def array(op: str, name: str, value: Any, dtypes: tuple[Any, ...], ndim: int | None, layout: str) -> Array:
    """A non-empty array of an expected dtype and rank; `layout` words the expectation."""
    names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    if not isinstance(value, np.ndarray):
        raise InputError(f"{op}: {name} must be a NumPy array, {names} {layout}; got {type(value).__name__}")
    if value.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        raise InputError(f"{op}: {name} must be {names} {layout}, got {value.dtype} {list(value.shape)}")
    if (ndim is not None and value.ndim != ndim) or value.ndim == 0:
        raise InputError(f"{op}: {name} must be {layout}, got {value.ndim} dimensions {list(value.shape)}")
    if value.size == 0:
        raise InputError(f"{op}: {name} must be {layout} and not empty, got {list(value.shape)}")
    return value


def floats(
    op: str, name: str, value: Any, ndim: int | None, layout: str, expected: tuple[int, ...] | None = None
) -> Array:
    """A float32 array; of the expected shape, if there is one."""
    checked = array(op, name, value, (np.float32,), ndim, layout)
    if expected is not None:
        shape(op, name, checked, expected, layout)
    return checked


def shape(op: str, name: str, value: Array, expected: tuple[int, ...], layout: str) -> None:
    """Exactly this shape."""
    if value.shape != expected:
        raise InputError(f"{op}: {name} must be {layout} = {list(expected)}, got {list(value.shape)}")


def whole(op: str, name: str, value: Any, least: int) -> int:
    """An integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{op}: {name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def number(op: str, name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InputError(f"{op}: {name} must be a number, got {value!r}")
    with np.errstate(over="ignore"):
        finite = bool(np.isfinite(np.float32(value)))  # kernels compute in f32
    if not finite or (positive and value < 0):
        raise InputError(
            f"{op}: {name} must be finite in float32{' and not negative' if positive else ''}, got {value!r}"
        )
    return float(value)


def ids(op: str, name: str, value: Any, ndim: int, limit: int, layout: str) -> Array:
    """Integers in 0 … limit − 1, as uint32."""
    checked = array(op, name, value, (np.int64, np.int32, np.uint32, np.uint64), ndim, layout)
    if int(checked.min()) < 0 or int(checked.max()) >= limit:
        wrong = checked[(checked < 0) | (checked >= limit)].flat[0]
        raise InputError(f"{op}: {name} must lie in 0 … {limit - 1}, got {wrong}")
    return checked.astype(np.uint32)


def device_of(device: Any) -> Device | None:
    """A device from what the caller gave: none, a name, or an open device. None for "cpu", which is NumPy."""
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and device.strip().lower() == "cpu":
        return None
    if device is None or (isinstance(device, (str, int)) and not isinstance(device, bool)):
        return open_device(device)
    raise InputError(f"device must be None, a name, a number or an open device, got {type(device).__name__}")


def run(
    op: str, dims: Dims, operands: Operands, route: str | None, device: Any, shape: tuple[int, ...], dtype: Any = "f4"
) -> Array:
    """The result `out` of an op, in this shape."""
    raw = run_op(device_of(device), op, dims, operands, route)
    out: Array = raw["out"].view(dtype).reshape(shape)
    return out
