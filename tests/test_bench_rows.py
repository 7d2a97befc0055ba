"""`shaderlm bench rows`: which products are timed, with how many rows, and what must hold of the times."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shaderlm.bench import rows
from shaderlm.bench.rows import Measured, Product, checks, measure, verdict
from shaderlm.bench.synthetic import config_of, parse
from shaderlm.compile.lowering import Lowering
from shaderlm.compile.tuning import Entry, Tuning, key_of
from shaderlm.engine.planning import LARGE_GPU, step_graph
from shaderlm.gpu import Device

from .command_line import shaderlm
from .test_plan import UNITS

SMALL = "synthetic:smollm2-135m:q4_0"


def layer(us: float, count: int) -> Measured:
    return Measured(count, 1 << (count - 1).bit_length(), (Product("linear", 64, 64, "tile", us / 2),) * 2)


def test_rows_are_held_against_the_next_larger_bucket() -> None:
    found = [layer(us, count) for count, us in ((1, 10.0), (2, 12.0), (3, 23.0), (4, 20.0), (6, 20.0), (8, 40.0))]
    ratios = [(each.rows, each.next_bucket, each.time_ratio, each.per_row_ratio) for each in checks(found)]
    assert ratios == [
        (1, 2, pytest.approx(10 / 12), pytest.approx(0.6)),
        (2, 4, pytest.approx(0.6), pytest.approx(5 / 6)),
        (3, 4, pytest.approx(1.15), None),
        (4, 8, 0.5, 1.0),
        (6, 8, 0.5, None),
    ]
    assert [each.rows for each in checks(found) if each.problems] == [4]
    assert verdict(found) == ["NOT HELD: a row of 8 takes 1.00 × the time of a row of 4"]
    found[2] = layer(23.5, 3)
    assert [each.rows for each in checks(found) if each.problems] == [3, 4]
    assert verdict(found)[0] == "NOT HELD: 3 rows take 1.18 × the time of 4"
    (held,) = verdict([layer(10.0, 1), layer(12.0, 2)])
    assert held.startswith("rows take at most 0.83 × the time of the next larger bucket")


def test_the_products_of_a_layer_are_timed(device: Device) -> None:
    kind, config = config_of(*parse(SMALL))
    found = measure(device, kind, config, (1, 3))
    assert [(each.rows, each.bucket) for each in found] == [(1, 1), (3, 4)]
    for each in found:
        assert {(product.K, product.N) for product in each.products} == {
            (576, 960), (576, 576), (576, 3072), (1536, 576),
        }  # fmt: skip
        assert min(product.us for product in each.products) > 0
        assert each.us == pytest.approx(sum(product.us for product in each.products))
    record = json.loads(json.dumps(rows.record(SMALL, found, device.caps)))
    assert [each["us"] for each in record["rows"]] == [each.us for each in found]
    assert record["checks"] == []


@pytest.mark.parametrize(("caps", "routes"), [(LARGE_GPU, "tile_int16"), (UNITS, "matrix")], ids=["wgpu", "Dawn"])
def test_a_batch_has_the_rows_that_are_asked_for(caps: Any, routes: str) -> None:
    """In the kernels of its bucket, which a model takes; a route that was tuned is taken before."""
    kind, config = config_of(*parse(SMALL))
    lowering = Lowering(caps, "fast")
    graph = step_graph(kind, replace(config, layers=1), caps, 32, lowering.unsupported_reason)
    node = next(node for node in graph.nodes if node.op == "linear" and node.dims["epilogue"] == "add")
    batch: Any = rows._program(lowering, node, 19).buffers["batch"]
    assert (batch[0], batch.size) == (19, 4 * 33)
    assert lowering.route(node).route.name == routes
    entry = Entry("tile_int16", routes, {"tile_int16": 1.0, routes: 1.0}, True)
    lowering = Lowering(caps, "fast", Tuning({("fast", key_of(node.op, node.dims)): entry}))
    assert rows._product(lowering, node, 1e-6) == Product("linear+add", 576, 576, "tile_int16", 1.0)


def test_the_command(device: Device) -> None:
    where = ("bench", "rows", "-m", SMALL, "--rows", "2,1", "--device", device.caps.name)
    done = shaderlm(*where)
    assert done.code == 0
    assert "products of one layer · synthetic:smollm2-135m:q4_0" in done.out
    assert "576×960 µs" in done.out
    assert ("NOT HELD" in done.out) != ("rows take at most" in done.out)
    (found,) = json.loads(shaderlm(*where, "--json").out)
    assert (found["model"], found["device"]) == (SMALL, device.caps.name)
    assert [each["rows"] for each in found["rows"]] == [1, 2]
    assert [each["next_bucket"] for each in found["checks"]] == [2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rows", "0,1"), "must be numbers above 0"),
        (("--rows", "1,x"), "must be whole numbers with commas"),
        (("--rows", "4096"), "rows of synthetic:smollm2-135m:q4_0 on"),
        (("-m", "synthetic:nope"), "no synthetic model 'nope'"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str) -> None:
    done = shaderlm("bench", "rows", "-m", SMALL, *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
