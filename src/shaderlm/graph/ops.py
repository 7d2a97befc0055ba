"""What nodes of a graph are: primitives, and chains of them. Shapes are checked here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from ..formats.weight_formats import WEIGHT_FORMATS
from . import conditions, reference
from .batch import CONTEXTS
from .chains import CHAINS, Chain
from .primitives import PRIMITIVES, REQUIRED, Op

OPS: Mapping[str, Op | Chain] = {**PRIMITIVES, **CHAINS}


PROLOGUES = ("none", "int16_activations", "rms_norm", "rms_norm_add_rms_norm", "rms_norm_add")
EPILOGUES = ("none", "add", "silu_mul", "gelu_mul", "gelu", "gelu_erf", "gelu_residual", "rope_kv_write")
_CHOICES = {
    "scales": ("f32", "f16"),
    "cache": ("f32", "f16"),
    "format": tuple(WEIGHT_FORMATS),
    "prologue": PROLOGUES,
    "epilogue": EPILOGUES,
    "context": CONTEXTS,
    "gating": reference.GATINGS,
    "combine": ("none", *conditions.EXPERT_GATES, "sum"),
}
_SWITCHES = {
    *("bias", "interleaved", "batched", "paged", "runs", "greedy", "advance", "counted", "sinks", "normalise"),
    *("residual", "rounded", "scaled", "shared", "silu", "single", "grouped", "add", "bytes"),
}
_MAY_BE_ZERO = {"Hq", "Hkv", "D", "rotary"}  # heads: of a product without rope


# Layers of a model repeat their shapes. Types belong to the key: True is 1 to a dict, and not to an op.
_resolved: dict[Any, dict[str, Any]] = {}
_MAX_RESOLVED = 4096


def resolve(name: str, dims: Mapping[str, Any]) -> dict[str, Any]:
    """The full dims of an op's shape: defaults filled in, names matched in any case, values checked."""
    try:
        key = (name, *((key, type(value), value) for key, value in dims.items()))
        known = _resolved.get(key)
    except TypeError:  # a value that cannot be hashed is none of ours, and is refused in words
        return _resolve(name, dims)
    if known is None:
        known = _resolve(name, dims)
        if len(_resolved) >= _MAX_RESOLVED:
            _resolved.clear()
        _resolved[key] = known
    return dict(known)


def _resolve(name: str, dims: Mapping[str, Any]) -> dict[str, Any]:
    if name not in OPS:
        close = difflib.get_close_matches(str(name), OPS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown op {name!r}.{hint} Ops: {', '.join(OPS)}")
    declared = OPS[name].dims
    by_lower = {key.lower(): key for key in declared}
    values: dict[str, Any] = {}
    for key, value in dims.items():
        if key.lower() not in by_lower:
            raise InputError(f"{name} has no dimension {key!r}; it has {', '.join(declared)}")
        if by_lower[key.lower()] in values:
            raise InputError(f"{name}: {by_lower[key.lower()]} is given twice")
        values[by_lower[key.lower()]] = value.item() if isinstance(value, np.generic) else value
    missing = [key for key, default in declared.items() if default is REQUIRED and key not in values]
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}; given: {', '.join(values) or 'nothing'}")
    for key, default in declared.items():
        if key not in values:
            values[key] = default(values) if callable(default) else default
    for key, value in values.items():
        _check(name, key, value)
    if reason := OPS[name].wrong(values):
        raise InputError(f"{name}: {reason}")
    return {key: values[key] for key in declared}


def _check(op: str, key: str, value: Any) -> None:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise InputError(f"{op}: {key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
    elif key in _SWITCHES:
        if not isinstance(value, bool):
            raise InputError(f"{op}: {key} must be True or False, got {value!r}")
    elif key in ("eps", "scale", "factor"):
        if value is not None and not isinstance(value, (int, float)):
            raise InputError(f"{op}: {key} must be a number, got {value!r}")
    elif key in ("softcap", "cap", "dt_min", "dt_max"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or (key == "cap" and not value):
            raise InputError(f"{op}: {key} must be a number above 0{' or 0' * (key != 'cap')}, got {value!r}")
    else:
        least = (
            0
            if key in ("keys", "window", "level", "temporal", "vertical", "horizontal")
            or key.endswith("first")
            or (op == "linear" and key in _MAY_BE_ZERO)
            else 1
        )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{op}: {key} must be a whole number of at least {least}, got {value!r}")


def label(op: str, dims: Mapping[str, Any]) -> str:
    """An op for people: a product with its prologue and epilogue, as rms_norm+linear+silu_mul."""
    parts = (dims.get("prologue", "none"), op, dims.get("epilogue", "none"))
    return "+".join(part for part in parts if part not in ("none", "int16_activations"))
