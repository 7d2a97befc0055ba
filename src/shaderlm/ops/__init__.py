"""The kernels, NumPy in and out.

Every function takes `route` (one of `routes(op)`; default: the first that applies) and `device` (a kind, a number, part
of an adapter's name, or an open device; default: the best adapter; "cpu": the formula in NumPy). A route that does not
apply is an error, never another route.
"""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from ..formats.blocks import pack_q4_0, pack_q4gsw, pack_q8_0
from ..graph import resolve
from ..kernels import Verdict, routes_of, verdicts
from . import checks
from .attention import rope, sdpa_kv
from .linear import embedding, linear, linear_add, linear_q4gsw, linear_silu_mul
from .norm import add_rms_norm, rms_norm, rms_norm_mul
from .pointwise import add, argmax, mul, silu_mul

__all__ = [
    "add",
    "add_rms_norm",
    "argmax",
    "embedding",
    "explain",
    "linear",
    "linear_add",
    "linear_q4gsw",
    "linear_silu_mul",
    "mul",
    "pack_q4_0",
    "pack_q4gsw",
    "pack_q8_0",
    "rms_norm",
    "rms_norm_mul",
    "rope",
    "routes",
    "sdpa_kv",
    "silu_mul",
]


class Explanation(list[Verdict]):
    """One verdict per route, in order of preference; prints as a table."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def routes(op: str) -> list[str]:
    """Names of an op's routes in order of preference."""
    return [route.name for route in routes_of(op)]


def explain(op: str, *, device: Any = None, **shape: Any) -> Explanation:
    """For every route of an op: does it apply to this shape on this device, and if not, why.

    >>> print(explain("linear_q4gsw", tokens=1, K=2048, N=8192, group_size=32))  # doctest: +SKIP
    """
    dims = resolve(op, shape)
    on = checks.device_of(device)
    if on is None:
        raise InputError(f"the device 'cpu' computes {op} in NumPy: it has no routes to explain")
    return Explanation(verdicts(op, dims, on.caps))
