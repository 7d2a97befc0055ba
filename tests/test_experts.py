"""Mixtures of experts: formulas against rows worked out one by one, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from shaderlm.errors import InputError
from shaderlm.graph.ops import OPS, resolve

from .cases import CASES, Case
from .operands import MAKERS

EXPERT_OPS = ("route_experts", "linear_experts", "add_gated")


# The formulas take dense weights.
_DENSE = [case for case in CASES if case.op in EXPERT_OPS and case.dims.get("format", "f32") in ("f32", "f16")]


@pytest.mark.parametrize("case", _DENSE, ids=lambda case: case.name)
def test_formulas(case: Case) -> None:
    given, expected = MAKERS[case.op](np.random.default_rng(1), {**case.dims, "batched": False})
    found = OPS[case.op].compute(case.dims, {name: value for name, value in given.items() if value is not None})
    for name, wanted in expected.items():
        assert wanted is not None
        np.testing.assert_allclose(found[name].reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-6)


def test_decode_reads_the_chosen_experts_alone() -> None:
    sizes = {"experts": 128, "used": 8, "K": 256, "N": 64}
    one, many = (resolve("linear_experts", {**sizes, "tokens": tokens}) for tokens in (1, 512))
    op = OPS["linear_experts"]
    assert op.part("weight", one, 0) == 8 / 128
    assert op.part("weight", many, 0) == pytest.approx(1)
    assert op.flops(one, 0) == 2 * 8 * 256 * 64


@pytest.mark.parametrize(
    ("op", "dims", "message"),
    [
        ("route_experts", {"tokens": 1, "experts": 4, "used": 5}, "at most experts=4"),
        ("route_experts", {"tokens": 1, "experts": 4, "used": 2, "gating": "tanh"}, "softmax, softmax_used, sigmoid"),
        (
            "linear_experts",
            {"tokens": 1, "experts": 4, "used": 2, "K": 32, "N": 3, "combine": "silu_mul"},
            "N must be even",
        ),
    ],
)
def test_shapes_that_cannot_be(op: str, dims: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(op, dims)
