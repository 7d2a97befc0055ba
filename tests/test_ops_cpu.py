"""The functions of `ops` with device="cpu": the formulas, with the same checks and shapes as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shaderlm import ops
from shaderlm.errors import InputError, RouteError
from shaderlm.gpu import Device

from .compare import assert_close


def _floats(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _q4gsw(**on: Any) -> Any:
    weight, scales = ops.pack_q4gsw(_floats(8, 64), 32)
    return ops.linear_q4gsw(_floats(3, 64), weight, scales, 32, **on)


def _attended(**on: Any) -> Any:
    caches = np.zeros((9, 2, 8), np.float32), np.zeros((9, 2, 8), np.float32)
    out = ops.sdpa_kv(_floats(3, 4, 8), _floats(3, 2, 8), _floats(3, 2, 8), *caches, 5, **on)
    return np.concatenate([out.reshape(-1), caches[0].reshape(-1), caches[1].reshape(-1)])


CALLS: dict[str, Callable[..., Any]] = {
    "add": lambda **on: ops.add(_floats(3, 5), _floats(5), **on),
    "mul": lambda **on: ops.mul(_floats(3, 5), _floats(5), **on),
    "silu_mul": lambda **on: ops.silu_mul(_floats(3, 5), _floats(3, 5), **on),
    "argmax": lambda **on: ops.argmax(_floats(3, 5), **on),
    "rms_norm": lambda **on: ops.rms_norm(_floats(3, 8), **on),
    "rms_norm_mul": lambda **on: ops.rms_norm_mul(_floats(3, 8), _floats(8), **on),
    "add_rms_norm": lambda **on: np.stack(ops.add_rms_norm(_floats(3, 8), _floats(3, 8), _floats(8), **on)),
    "linear": lambda **on: ops.linear(_floats(3, 64), ops.pack_q4_0(_floats(6, 64)), _floats(6), format="q4_0", **on),
    "linear_add": lambda **on: ops.linear_add(_floats(3, 7), _floats(6, 7), _floats(3, 6), **on),
    "linear_silu_mul": lambda **on: ops.linear_silu_mul(_floats(3, 7), _floats(6, 7), **on),
    "linear_q4gsw": _q4gsw,
    "embedding": lambda **on: ops.embedding(np.array([2, 0, 1]), ops.pack_q8_0(_floats(4, 32)), format="q8_0", **on),
    "rope": lambda **on: ops.rope(_floats(3, 2, 8), np.array([0, 5, 1]), **on),
    "sdpa_kv": _attended,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_cpu_agrees_with_the_adapter(name: str, device: Device) -> None:
    found, expected = CALLS[name](device="cpu"), CALLS[name](device=device)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert_close(found, expected, "linear", name)


def test_there_are_no_routes_on_the_cpu() -> None:
    with pytest.raises(RouteError, match="has no routes"):
        ops.add(_floats(3), _floats(3), device="cpu", route="vec4")
    with pytest.raises(InputError, match="no routes to explain"):
        ops.explain("add", count=4, device="cpu")


def test_rows_whose_squares_overflow_are_refused() -> None:
    with pytest.raises(InputError, match="squares of x must fit float32"):
        ops.rms_norm(np.full((1, 4), 1e30, np.float32), device="cpu")
    assert np.isnan(ops.rms_norm(np.array([[np.nan, 1.0]], np.float32), device="cpu")).all()
