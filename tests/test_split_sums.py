"""Products whose k is split, and what adds up their parts: the next product where it rounds them, or a dispatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lowering as lowering_module
from shaderlm.compile.lowering import Lowering
from shaderlm.compile.plan import Plan
from shaderlm.gpu import Array, Device, Program
from shaderlm.graph import resolve
from shaderlm.graph.graph import Builder, Graph
from shaderlm.kernels import choose
from shaderlm.kernels.linear.matrix import FewConfig, MatrixConfig
from shaderlm.kernels.route import batch_bytes

from .cases import Case, make
from .test_matrix import FEW, ROUTE, SMALL, launches

TOKENS, ROWS = 19, 17  # rows that there is room for, and those of the batch
SPLIT = replace(SMALL, split=2)


def pair(epilogue: str, prologue: str) -> tuple[Graph, list[Case]]:
    """x · w1 (+ residual) → between → its norm · w2 → out, and between · between → squares, who reads it later."""
    common = {"tokens": TOKENS, "format": "q8_0", "batched": True}
    first = Case("linear", tuple({**common, "K": 352, "N": 96, "epilogue": epilogue}.items()))
    second = Case("linear", tuple({**common, "K": 96, "N": 38, "prologue": prologue, "eps": 1e-5}.items()))
    b = Builder()
    b.tensor("batch", 1 + TOKENS, 4, role="input", format="u32")
    b.tensor("x", TOKENS, 352, role="input")
    b.tensor("w1", 96, 352, role="weight", format="q8_0")
    b.tensor("w2", 38, 96, role="weight", format="q8_0")
    b.tensor("norm", 96, role="weight")
    b.tensor("residual", TOKENS, 96, role="input")
    between, out, squares = (
        b.tensor("between", TOKENS, 96),
        b.tensor("out", TOKENS, 38),
        b.tensor("squares", TOKENS, 96),
    )
    more = {"residual": "residual"} if epilogue == "add" else {}
    b.add("linear", first.dims, {"x": "x", "weight": "w1", "batch": "batch", **more}, "first", out=between)
    more = {"norm_weight": "norm"} if prologue == "rms_norm" else {}
    b.add("linear", second.dims, {"x": between, "weight": "w2", "batch": "batch", **more}, "second", out=out)
    b.add("mul", {"count": TOKENS * 96}, {"a": between, "b": between}, "later", out=squares)
    return b.graph(out, squares), [first, second]


def plan_of(graph: Graph, cases: list[Case], config: MatrixConfig | FewConfig, device: Device) -> Plan:
    lowering = Lowering(device.caps, "fast")
    configs = (config, SMALL)
    routes = [
        lowering.routed(ROUTE, case.dims, launches(own, case.dims, device))
        for case, own in zip(cases, configs, strict=True)
    ]
    mul = resolve("mul", {"count": TOKENS * 96})
    later = choose("mul", mul, device.caps, None, "fast")
    routes.append(lowering.routed(later, mul, later.launch_list(mul, device.caps)))
    return lowering.plan("pair", graph, routes=routes)


def run(plan: Plan, operands: dict[str, Array], device: Device) -> dict[str, Any]:
    contents = {
        name: np.array(spec.words, np.uint32) if spec.role == "params" else operands.get(name, spec.nbytes)
        for name, spec in plan.buffers.items()
    }
    return device.run(Program(contents, plan.program.steps, plan.outputs))


def operands_of(cases: list[Case], device: Device) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for case, weight in zip(cases, ("w1", "w2"), strict=True):
        made, _ = make(case)
        given = {key: array for key, array in made.items() if array is not None}
        packed = ROUTE.pack["weight"](given["weight"], case.dims, device.caps)
        found |= {f"{weight}/{key}" if "." in key else weight: array for key, array in packed.items()}
        names = {"residual": "residual", "norm_weight": "norm"} | ({"x": "x"} if weight == "w1" else {})
        found |= {name: given[key] for key, name in names.items() if key in given}
    batch = np.zeros(batch_bytes(TOKENS) // 4, np.uint32)
    batch[0] = ROWS
    return {**found, "batch": batch}


@pytest.mark.parametrize("config", [SPLIT, replace(FEW, subgroups=1, split=3)], ids=str)
@pytest.mark.parametrize(("epilogue", "prologue"), [("add", "rms_norm"), ("none", "none")])
def test_parts_are_added_up_where_they_are_rounded(
    epilogue: str, prologue: str, config: MatrixConfig | FewConfig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dispatch less, and the same numbers, for those who read the sums later, too."""
    graph, cases = pair(epilogue, prologue)
    together = plan_of(graph, cases, config, device)
    monkeypatch.setattr(lowering_module, "add_while_rounding", lambda graph, routes, caps: (graph, routes))
    alone = plan_of(graph, cases, config, device)
    kernels = [[launch.step.label for launch in plan.launches] for plan in (together, alone)]
    assert kernels[1].count("linear_matrix_merge") == 1
    assert kernels[0] == [label for label in kernels[1] if label != "linear_matrix_merge"]
    operands = operands_of(cases, device)
    found, wanted = (run(plan, operands, device) for plan in (together, alone))
    for name, columns in (("out", 38), ("squares", 96)):
        rows, expected = (each[name].view(np.float32).reshape(TOKENS, columns)[:ROWS] for each in (found, wanted))
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_parts_that_somebody_else_wants(device: Device) -> None:
    """Sums that the caller wants are stored by the product itself."""
    graph, cases = pair("add", "rms_norm")
    wanted = Graph(graph.tensors, graph.nodes, (*graph.outputs, "between"))
    labels = [launch.step.label for launch in plan_of(wanted, cases, SPLIT, device).launches]
    assert labels.count("linear_matrix_merge") == 1
