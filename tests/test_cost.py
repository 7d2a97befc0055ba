"""What an op has to do at least: operations and bytes against numbers worked out by hand, and how plans share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shaderlm.compile.plan import Launch, Lowering, _shares
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps
from shaderlm.graph.cost import flops, part
from shaderlm.graph.graph import Builder
from shaderlm.graph.ops import OPS, resolve
from shaderlm.models.architecture import Step
from shaderlm.runtime.gpu_model import plan_of
from shaderlm.runtime.weights import buffer_sizes

from .architectures import LLAMA_1B, QWEN3, SMOLLM2, TINY, model
from .test_plan import LARGE_GPU, SOFTWARE
from .test_structure import ROUTES, launch_lists, shapes

SPLITTING = replace(WEBGPU_DEFAULT, max_binding=1 << 16, max_workgroups=7)  # matrices take several dispatches

# By hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dims", "operations"),
    [
        ("linear", {"M": 1, "K": 64, "N": 96}, 2 * 64 * 96),
        ("linear_add", {"M": 3, "K": 64, "N": 96, "format": "q4_0"}, 3 * 2 * 64 * 96),
        ("linear_silu_mul", {"M": 7, "K": 32, "N": 10}, 4480),
        ("linear_q4gsw", {"M": 2, "K": 32, "N": 8}, 1024),
        ("embedding", {"T": 5, "N": 1000, "K": 64}, 0),
        ("columns", {"rows": 3, "width": 100, "first": 10, "count": 20}, 0),
        ("kv_write", {"Hq": 4, "Hkv": 2, "D": 16, "S": 3, "C": 8}, 0),
        # A pair of a head is turned with 4 multiplications and 2 additions: 3 for each of its values.
        ("rope", {"T": 3, "H": 4, "D": 16}, 3 * 4 * 16 * 3),
        ("rope", {"T": 3, "H": 4, "D": 16, "rotary": 8}, 3 * 4 * 8 * 3),
        ("rope_kv_write", {"T": 3, "Hq": 4, "Hkv": 2, "D": 16, "C": 8}, 3 * 6 * 16 * 3),
        ("add", {"count": 12}, 12),
        ("fma_chain", {"count": 4, "rounds": 2}, 4 * 2 * 8 * 2),
    ],
)
def test_operations(op: str, dims: dict[str, Any], operations: int) -> None:
    full = resolve(op, dims)
    assert [flops(op, full, position) for position in (0, 5)] == [operations, operations]


@pytest.mark.parametrize("op", ["attention", "sdpa_kv"])
@pytest.mark.parametrize(("rows", "position"), [(1, 0), (1, 1), (1, 31), (4, 0), (4, 7), (32, 0)])
def test_attention_counts_the_keys_that_a_query_sees(op: str, rows: int, position: int) -> None:
    """Per query head: a product over D for each key that is not masked, and one more value of D per key and output."""
    dims = resolve(op, {"Hq": 6, "Hkv": 2, "D": 8, "S": rows, "C": 32})
    seen = sum(1 for s in range(rows) for c in range(32) if c <= position + s)
    assert flops(op, dims, position) == 6 * seen * (2 * 8 + 2 * 8)
    for cache in ("k_cache", "v_cache"):
        assert part(op, cache, dims, position) == (position + rows) / 32  # the last query sees them all
    assert part(op, "q", dims, position) == part(op, "out", dims, position) == 1


def test_parts_by_hand() -> None:
    assert part("embedding", "weight", resolve("embedding", {"T": 5, "N": 1000, "K": 64}), 0) == 5 / 1000
    assert part("embedding", "weight", resolve("embedding", {"T": 50, "N": 10, "K": 64}), 0) == 1
    config = resolve("columns", {"rows": 3, "width": 100, "first": 10, "count": 20})
    assert (part("columns", "x", config, 0), part("columns", "out", config, 0)) == (0.2, 1)
    joint = {"T": 3, "Hq": 4, "Hkv": 2, "D": 16, "C": 12, "positions": 24}
    dims = resolve("rope_kv_write", {**joint, **dict.fromkeys(("q_stride", "k_stride", "v_stride"), 128)})
    found = {name: part("rope_kv_write", name, dims, 9) for name in ("q", "k", "v", "k_cache", "v_cache", "table")}
    assert found == {"q": 0.5, "k": 0.25, "v": 0.25, "k_cache": 0.25, "v_cache": 0.25, "table": 0.125}
    assert part("kv_write", "v_cache", resolve("kv_write", {"Hq": 4, "Hkv": 2, "D": 16, "S": 3, "C": 12}), 9) == 0.25


# Every op -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_its_cost(op: str) -> None:
    operands = {*OPS[op].inputs, *OPS[op].outputs, ""}
    for dims in shapes(op):
        for position in {0, dims.get("C", 1) - dims.get("S", dims.get("T", 1))}:
            assert flops(op, dims, position) >= 0
            parts = {name: part(op, name, dims, position) for name in operands}
            assert all(0 < value <= 1 for value in parts.values()), (dims, position, parts)


def test_only_ops_that_move_data_compute_nothing() -> None:
    idle = {op for op in OPS if not any(flops(op, dims, 0) for dims in shapes(op))}
    assert idle == {"embedding", "kv_write", "columns", "copy"}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.op}/{route.name}")
def test_the_dispatches_of_an_op_share_all_of_it(route: Any) -> None:
    for launch_list in launch_lists(route):
        found = _shares(launch_list)
        assert len(found) == len(launch_list.dispatches)
        assert min(found) >= 0
        assert sum(found) == pytest.approx(1)


# Dispatches ---------------------------------------------------------------------------------------------------


def launched(
    op: str, caps: DeviceCaps, dims: dict[str, Any], tensors: dict[str, Any], out: str = "out"
) -> list[Launch]:
    """The dispatches of one op; a tensor is a shape, and for a weight its format."""
    builder = Builder()
    for name, shape in tensors.items():
        weight = isinstance(shape[-1], str)
        sizes = shape[:-1] if weight else shape
        caches = name in ("k_cache", "v_cache")
        role = "weight" if weight else "hidden" if name == out else "state" if caches else "input"
        builder.tensor(name, *sizes, role=role, format=shape[-1] if weight else "f32")  # type: ignore[arg-type]
    declared = OPS[op]
    inputs = {name: name for name in declared.inputs if name in tensors}
    builder.add(op, dims, inputs, "here", **{name: name for name in declared.outputs if name in tensors})
    return list(Lowering(caps).plan("one", builder.graph(out), (), 1, 1).launches)


def works(launches: Sequence[Launch], position: int = 0) -> tuple[int, int]:
    each = [launch.work(position) for launch in launches]
    return sum(nbytes for nbytes, _ in each), sum(operations for _, operations in each)


@pytest.mark.parametrize(("form", "row_bytes"), [("f32", 256 * 4), ("f16", 256 * 2), ("q8_0", 8 * 34)])
def test_a_matrix_is_read_once(form: str, row_bytes: int) -> None:
    """x and out are f32; 32 numbers of q8_0 are 32 bytes and a scale of 2."""
    tensors = {"x": (3, 256), "weight": (96, 256, form), "out": (3, 96)}
    launches = launched("linear", SOFTWARE, {"M": 3, "K": 256, "N": 96, "format": form}, tensors)
    assert works(launches) == (4 * 3 * 256 + 96 * row_bytes + 4 * 3 * 96, 2 * 3 * 256 * 96)


def test_a_matrix_over_several_bindings_is_read_once_too() -> None:
    tensors = {"x": (1, 256), "weight": (512, 256, "f32"), "out": (1, 512)}
    launches = launched("linear", SPLITTING, {"M": 1, "K": 256, "N": 512}, tensors)
    assert len(launches) > 4
    assert works(launches)[1] == pytest.approx(2 * 256 * 512, abs=len(launches))
    weights = [nbytes for launch in launches for name, nbytes in launch.operands if name == "weight"]
    assert sum(weights) == 4 * 512 * 256
    assert max(weights) <= SPLITTING.max_binding


def test_rows_of_a_table_are_read_alone() -> None:
    tensors = {"ids": (5,), "weight": (1000, 64, "f32"), "out": (5, 64)}
    launches = launched("embedding", SOFTWARE, {"T": 5, "N": 1000, "K": 64}, tensors)
    assert works(launches) == (4 * 5 + 4 * 5 * 64 + 4 * 5 * 64, 0)


def test_columns_are_read_alone() -> None:
    dims = {"rows": 3, "width": 100, "first": 10, "count": 20}
    launches = launched("columns", SOFTWARE, dims, {"x": (3, 100), "out": (3, 20)})
    assert works(launches) == (2 * 4 * 3 * 20, 0)


def test_a_turn_writes_what_is_new_in_the_caches() -> None:
    """q, k, v in; q turned, k turned and v out; a row of (cos, sin) per token, and positions."""
    dims = {"T": 2, "Hq": 4, "Hkv": 2, "D": 16, "C": 32}
    tensors = {"q": (2, 64), "k": (2, 32), "v": (2, 32), "positions": (2,), "table": (32, 8, 2)}
    tensors |= {"k_cache": (32, 2, 16), "v_cache": (32, 2, 16), "out": (2, 64)}
    launches = launched("rope_kv_write", SOFTWARE, dims, tensors)
    nbytes, operations = works(launches, position=20)
    known = 4 * 2 * (64 + 32 + 32 + 16 + 32 + 32 + 64)
    assert known < nbytes <= known + 4 * 2  # and the positions
    assert operations == 3 * 2 * 6 * 16


@pytest.mark.parametrize("caps", [SOFTWARE, LARGE_GPU], ids=["software", "GPU"])
@pytest.mark.parametrize(("rows", "position"), [(1, 0), (1, 100), (16, 0), (16, 100)])
def test_attention_reads_the_filled_part_of_the_caches(caps: DeviceCaps, rows: int, position: int) -> None:
    dims = {"Hq": 4, "Hkv": 2, "D": 64, "S": rows, "C": 256, "pos": 256 - rows}
    tensors = {"q": (rows, 256), "k_cache": (256, 2, 64), "v_cache": (256, 2, 64), "positions": (rows,)}
    launches = launched("attention", caps, dims, {**tensors, "out": (rows, 256)})
    nbytes, operations = works(launches, position)
    filled = position + rows
    needed = 2 * 4 * filled * 2 * 64 + 2 * 4 * rows * 256
    # Scores, or sums of parts of the context, are kept in between: written, used and read by up to three dispatches.
    between = 4 * 4 * 4 * rows * max(filled, 4 * 66)
    assert needed <= nbytes <= needed + between
    seen = rows * position + rows * (rows + 1) // 2
    assert operations == pytest.approx(4 * 4 * 64 * seen, abs=len(launches))
    caches = [name for launch in launches for name, _ in launch.operands if name.endswith("cache")]
    assert sorted(caches) == ["k_cache", "v_cache"]


# Plans --------------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[tuple[int, ...], dict[str, Any], DeviceCaps]] = {
    "smollm2": (SMOLLM2, {"kind": "q4_1", "formats": {"token_embd": "q8_0"}}, SOFTWARE),
    "llama-1b": (LLAMA_1B, {"kind": "q4_0"}, LARGE_GPU),
    "llama-1b on small bindings": (LLAMA_1B, {"kind": "f32"}, WEBGPU_DEFAULT),
    "qwen3": (QWEN3, {"name": "qwen3", "kind": "q8_0"}, LARGE_GPU),
}


@pytest.mark.parametrize("fusions", [None, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_reads_every_weight_once(name: str, fusions: tuple[str, ...] | None) -> None:
    """And of the embeddings, which serve as the output matrix here, one row more: besides little at position 0."""
    shape, options, caps = MODELS[name]
    made, config = model(shape, **options)
    plan = plan_of(made, config, caps, 1, 256, fusions)
    weights = sum(buffer_sizes(made.build(config, Step(1, 256)), caps).values())
    nbytes, operations = works(plan.launches)
    assert weights <= nbytes <= 1.2 * weights
    matrices = sum(rows * more[0] for rows, *more in config.shapes.values() if more)
    assert 2 * matrices <= operations <= 2.1 * matrices


def test_a_prompt_computes_for_every_row_and_reads_weights_once() -> None:
    made, config = model(SMOLLM2, "q4_0")
    one, many = (works(plan_of(made, config, LARGE_GPU, rows, 256).launches) for rows in (1, 128))
    table = 49152 * 576  # logits are wanted of the last row only
    assert many[1] - 2 * table == pytest.approx(128 * (one[1] - 2 * table), rel=0.05)
    assert one[0] < many[0] < 20 * one[0]


def test_work_grows_with_the_position_in_attention_alone() -> None:
    made, config = model(TINY)
    plan = plan_of(made, config, SOFTWARE, 1, 256)
    grown = {launch.op for launch in plan.launches if launch.work(200) != launch.work(0)}
    assert grown == {"attention"}
    assert works(plan.launches, 200)[0] - works(plan.launches, 100)[0] == pytest.approx(
        works(plan.launches, 100)[0] - works(plan.launches, 0)[0], rel=0.01
    )
