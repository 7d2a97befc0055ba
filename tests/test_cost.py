"""What an op has to do at least: operations and bytes against numbers worked out by hand, and how plans share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile.lowering import Lowering
from shaderlm.compile.plan import Launch
from shaderlm.compile.routed import shares
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps
from shaderlm.graph.batch import CONTEXTS, last_key
from shaderlm.graph.cost import CACHES
from shaderlm.graph.graph import Builder, Role
from shaderlm.graph.ops import OPS, resolve

from .architectures import LLAMA_1B, QWEN3, SMOLLM2, TINY, model
from .cases import CASES
from .operands import MAKERS
from .test_plan import SOFTWARE, plan_of
from .test_structure import ROUTES, launch_lists, shapes

SPLITTING = replace(WEBGPU_DEFAULT, max_binding=1 << 16, max_workgroups=7)  # matrices take several dispatches


def flops(op: str, dims: dict[str, Any], position: int) -> int:
    return OPS[op].flops(dims, position)


def part(op: str, operand: str, dims: dict[str, Any], position: int) -> float:
    return OPS[op].part(operand, dims, position)


# By hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dims", "operations"),
    [
        ("linear", {"tokens": 1, "K": 64, "N": 96}, 2 * 64 * 96),
        ("linear", {"tokens": 3, "K": 64, "N": 96, "format": "q4_0", "epilogue": "add"}, 3 * (2 * 64 + 1) * 96),
        (
            "linear",
            {"tokens": 7, "K": 32, "N": 10, "epilogue": "silu_mul", "prologue": "rms_norm"},
            4480 + 7 * (32 * 4 + 5 * 5),
        ),
        ("linear_q4gsw", {"tokens": 2, "K": 32, "N": 8}, 1024),
        ("embedding", {"tokens": 5, "N": 1000, "K": 64}, 0),
        ("embedding", {"tokens": 5, "N": 1000, "K": 64, "factor": 2.5}, 5 * 64),
        ("rms_norm_mul", {"tokens": 3, "width": 16, "residual": True}, 3 * 16 * (4 + 1)),
        ("slice", {"tokens": 3, "width": 100, "first": 10, "count": 20}, 0),
        ("take_rows", {"tokens": 8, "rows": 3, "width": 100}, 0),
        ("kv_write", {"tokens": 3, "Hkv": 2, "D": 16}, 0),
        # A pair of a head is turned with 4 multiplications and 2 additions: 3 for each of its values.
        ("rope", {"tokens": 3, "H": 4, "D": 16}, 3 * 4 * 16 * 3),
        ("rope", {"tokens": 3, "H": 4, "D": 16, "rotary": 8}, 3 * 4 * 8 * 3),
        ("rope_kv_write", {"tokens": 3, "Hq": 4, "Hkv": 2, "D": 16}, 3 * 6 * 16 * 3),
        ("rms_norm_rope_kv_write", {"tokens": 3, "Hq": 4, "Hkv": 2, "D": 16}, 3 * 6 * 16 * (3 + 4)),
        ("rms_norm", {"tokens": 3, "heads": 4, "width": 16}, 3 * 4 * 16 * 3),
        # Two norms with their weights, and an addition.
        ("rms_norm_add_rms_norm", {"tokens": 3, "width": 16}, 3 * 16 * (4 + 1 + 4)),
        ("add", {"count": 12}, 12),
        ("fma_chain", {"count": 4, "rounds": 2}, 4 * 2 * 8 * 2),
        ("matrix_chain", {"count": 4, "rounds": 3, "rows": 2, "columns": 5, "K": 7}, 4 * 3 * 2 * 2 * 5 * 7),
        ("argmax", {"rows": 3, "width": 100}, 300),
        # A comparison for the largest; to draw also a division, an exponential and a sum.
        ("sample", {"rows": 3, "width": 100, "greedy": True}, 300),
        ("sample", {"rows": 3, "width": 100}, 1200),
    ],
)
def test_operations(op: str, dims: dict[str, Any], operations: int) -> None:
    full = resolve(op, dims)
    assert [flops(op, full, position) for position in (0, 5)] == [operations, operations]


def test_attention_with_its_norms_and_rope_takes_what_both_take() -> None:
    dims = {"tokens": 3, "Hq": 4, "Hkv": 2, "D": 16}
    found = flops("rms_norm_rope_attention", resolve("rms_norm_rope_attention", dims), 5)
    assert found == 3 * 6 * 16 * (3 + 4) + 4 * 4 * 16 * (6 + 7 + 8)
    op = "rms_norm_rope_attention_linear"
    assert flops(op, resolve(op, {**dims, "N": 40}), 5) == found + 3 * 2 * 64 * 40


@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (1, 1), (1, 31), (4, 0), (4, 7), (32, 0)])
def test_attention_counts_the_keys_that_a_query_sees(tokens: int, position: int) -> None:
    """Per query head: a product over D for each key that is not masked, and one more value of D per key and output."""
    dims = resolve("attention", {"tokens": tokens, "Hq": 6, "Hkv": 2, "D": 8})
    seen = sum(1 for t in range(tokens) for c in range(position + tokens) if c <= position + t)
    assert flops("attention", dims, position) == 6 * seen * (2 * 8 + 2 * 8)
    for cache in ("k_cache", "v_cache"):
        assert part("attention", cache, dims, position) == position + tokens, "rows: the last query sees them all"
    assert part("attention", "q", dims, position) == part("attention", "out", dims, position) == 1


def test_parts_by_hand() -> None:
    """Of tables and caches, rows; of other operands, parts."""
    assert part("embedding", "weight", resolve("embedding", {"tokens": 5, "N": 1000, "K": 64}), 0) == 5 / 1000
    assert part("embedding", "weight", resolve("embedding", {"tokens": 50, "N": 10, "K": 64}), 0) == 1
    columns = resolve("slice", {"tokens": 3, "width": 100, "first": 10, "count": 20})
    assert (part("slice", "x", columns, 0), part("slice", "out", columns, 0)) == (0.2, 1)
    taken = resolve("take_rows", {"tokens": 8, "rows": 2, "width": 100})
    assert (part("take_rows", "x", taken, 0), part("take_rows", "out", taken, 0)) == (0.25, 1)
    sizes = {"tokens": 3, "Hq": 4, "Hkv": 2, "D": 16}
    dims = resolve("rope_kv_write", {**sizes, **dict.fromkeys(("q_stride", "k_stride", "v_stride"), 128)})
    found = {name: part("rope_kv_write", name, dims, 9) for name in ("q", "k", "v", "k_cache", "v_cache", "table")}
    assert found == {"q": 0.5, "k": 0.25, "v": 0.25, "k_cache": 3, "v_cache": 3, "table": 3}
    assert part("kv_write", "v_cache", resolve("kv_write", {"tokens": 3, "Hkv": 2, "D": 16}), 9) == 3
    assert part("rope", "table", resolve("rope", {"tokens": 3, "H": 2, "D": 16}), 9) == 3
    fused = {"tokens": 1, "K": 64, "N": 128, "Hq": 4, "Hkv": 2, "D": 16, "epilogue": "rope_kv_write"}
    product = resolve("linear", fused)
    assert {part("linear", name, product, 9) for name in ("weight", "table", "k_cache", "v_cache")} == {1}


# Every op -----------------------------------------------------------------------------------------------------

ROWS = {"k_cache", "v_cache", "table"}  # operands of which rows are counted, not parts
STATES = {"state", "conv_state"}  # so with these: a row for each sequence, read and written


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_its_cost(op: str) -> None:
    operands = {*OPS[op].inputs, *OPS[op].outputs, ""}
    for dims in shapes(op):
        for position in (0, 1000):
            assert flops(op, dims, position) >= 0
            parts = {name: part(op, name, dims, position) for name in operands}
            assert all(0 < value <= 1 for name, value in parts.items() if name not in ROWS | STATES), (
                dims,
                position,
                parts,
            )
            for name in operands & STATES:
                assert parts[name] == 2 * (dims["tokens"] if dims["single"] else 1)
            # A product rotates in one epilogue; the table of rope_by_row has a row for each row of the step.
            rotated = "rope_by_row" not in op and (op != "linear" or dims["epilogue"] == "rope_kv_write")
            for name in operands & ROWS if rotated else ():
                seen = (
                    position
                    if op.endswith(("attention", "attention_linear", "attention_reach")) and name != "table"
                    else 0
                )
                assert parts[name] == seen + dims["tokens"], (dims, position, name)


def test_only_ops_that_move_data_compute_nothing() -> None:
    idle = {op for op in OPS if not any(flops(op, dims, 0) for dims in shapes(op))}
    assert idle == {"embedding", "kv_write", "slice", "take_rows", "copy", "concat", "pad_columns", "rope_rows"}


@pytest.mark.parametrize("op", sorted({*OPS} - {"linear_q4gsw"}))  # its weight is packed: below
def test_the_formula_of_an_op_gives_what_its_kernels_must(op: str) -> None:
    """The formula in NumPy, which runs models on the CPU, against the expected result of the op's smallest case."""
    cases = [case for case in CASES if case.op == op and not case.long and not case.stretches]
    case = min(cases, key=lambda case: case.flops)
    dims = case.dims | ({"format": "f32"} if "format" in case.dims else {})  # its weights are arrays
    given, expected = MAKERS[op](np.random.default_rng(0), dims)
    operands = {name: np.array(value) for name, value in given.items() if value is not None}
    found = {**operands, **OPS[op].compute(dims, operands)}  # a state is changed in place
    for name, wanted in expected.items():
        assert wanted is not None
        actual = np.asarray(found[name]).reshape(wanted.shape)
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4, err_msg=f"{op} {case.given} {name}")


def test_the_formulas_of_copy_fma_chain_and_linear_q4gsw() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8)).astype(np.float32)
    assert OPS["copy"].compute(resolve("copy", {"count": 16}), {"x": x})["out"] is x
    chain = OPS["fma_chain"].compute(resolve("fma_chain", {"count": 16, "rounds": 2}), {"x": x})["out"]
    np.testing.assert_allclose(chain, 1 + 0.75**16 * (x - 1), rtol=1e-5)  # its fixed point is 1
    whole, scales = rng.integers(-8, 8, (3, 8)), rng.standard_normal((2, 3))
    dims = resolve("linear_q4gsw", {"tokens": 2, "K": 8, "N": 3, "group_size": 4, "bias": True})
    bias = rng.standard_normal(3)
    found = OPS["linear_q4gsw"].compute(dims, {"x": x, "weight": whole, "scales": scales, "bias": bias})["out"]
    for t in range(2):
        for n in range(3):
            expected = bias[n] + math.fsum(x[t, k] * whole[n, k] * scales[k // 4, n] for k in range(8))
            assert found[t, n] == pytest.approx(expected)


@pytest.mark.xdist_group("test_structure")  # which makes the same launch lists
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.op}/{route.name}")
def test_the_dispatches_of_an_op_share_all_of_it(route: Any) -> None:
    for _, launch_list in launch_lists(route):
        found = shares(launch_list)
        assert len(found) == len(launch_list.dispatches)
        assert min(found) >= 0
        assert sum(found) == pytest.approx(1)
        idle = [each for each, dispatch in zip(found, launch_list.dispatches, strict=True) if dispatch.idle]
        assert not any(idle)


# Dispatches ---------------------------------------------------------------------------------------------------


def launched(
    op: str, caps: DeviceCaps, dims: dict[str, Any], tensors: dict[str, Any], out: str = "out"
) -> list[Launch]:
    """The dispatches of one op; a tensor is a shape, and for a weight its format. Of caches and tables one row."""
    builder = Builder()
    for name, shape in tensors.items():
        weight = isinstance(shape[-1], str)
        changed = name in CACHES or (name in OPS[op].inputs and name in OPS[op].outputs)
        role: Role = "weight" if weight else "state" if changed else "input"
        if role == "input" and name in (out, "table"):
            role = "hidden" if name == out else "table"
        builder.tensor(name, *(shape[:-1] if weight else shape), role=role, format=shape[-1] if weight else "f32")
    declared = OPS[op]
    inputs = {name: name for name in declared.inputs if name in tensors}
    builder.add(op, dims, inputs, "here", **{name: name for name in declared.outputs if name in tensors})
    return list(Lowering(caps).plan("one", builder.graph(out)).launches)


def works(launches: Sequence[Launch], position: int = 0) -> tuple[int, int]:
    each = [launch.work(position) for launch in launches]
    return sum(nbytes for nbytes, _ in each), sum(operations for _, operations in each)


@pytest.mark.parametrize(("form", "row_bytes"), [("f32", 256 * 4), ("f16", 256 * 2), ("q8_0", 8 * 34)])
def test_a_matrix_is_read_once(form: str, row_bytes: int) -> None:
    """x and out are f32; 32 numbers of q8_0 are 32 bytes and a scale of 2."""
    tensors = {"x": (3, 256), "weight": (96, 256, form), "out": (3, 96)}
    launches = launched("linear", SOFTWARE, {"tokens": 3, "K": 256, "N": 96, "format": form}, tensors)
    assert works(launches) == (4 * 3 * 256 + 96 * row_bytes + 4 * 3 * 96, 2 * 3 * 256 * 96)


def test_a_matrix_over_several_bindings_is_read_once_too() -> None:
    tensors = {"x": (1, 256), "weight": (512, 256, "f32"), "out": (1, 512)}
    launches = launched("linear", SPLITTING, {"tokens": 1, "K": 256, "N": 512}, tensors)
    assert len(launches) > 4
    assert works(launches)[1] == pytest.approx(2 * 256 * 512, abs=len(launches))
    weights = [nbytes for launch in launches for name, nbytes in launch.operands if name == "weight"]
    assert sum(weights) == 4 * 512 * 256
    assert max(weights) <= SPLITTING.max_binding


def test_rows_of_a_table_are_read_alone() -> None:
    """The batch has a record of 16 bytes per row and one before them; the last tokens are one word."""
    tensors = {"batch": (6, 4), "tokens": (1,), "weight": (1000, 64, "f32"), "out": (5, 64)}
    launches = launched("embedding", SOFTWARE, {"tokens": 5, "N": 1000, "K": 64}, tensors)
    assert works(launches) == (16 * 6 + 4 + 4 * 5 * 64 + 4 * 5 * 64, 0)


def test_columns_are_read_alone() -> None:
    dims = {"tokens": 3, "width": 100, "first": 10, "count": 20}
    launches = launched("slice", SOFTWARE, dims, {"x": (3, 100), "out": (3, 20)})
    assert works(launches) == (2 * 4 * 3 * 20, 0)


def test_rows_that_give_outputs_are_read_alone() -> None:
    tensors = {"x": (8, 100), "outputs": (2, 8), "batch": (9, 4), "out": (2, 100)}
    launches = launched("take_rows", SOFTWARE, {"tokens": 8, "rows": 2, "width": 100}, tensors)
    assert works(launches) == (2 * 4 * 2 * 100 + 32 * 2 + 16 * 9, 0)


@pytest.mark.parametrize("op", ["rope_kv_write", "kv_write"])
def test_writes_touch_what_is_new_in_the_caches(op: str) -> None:
    """q, k, v in; q rotated, k rotated and v out; a row of (cos, sin) per token, and the batch."""
    both = op == "rope_kv_write"
    dims = {"tokens": 2, "Hkv": 2, "D": 16} | ({"Hq": 4} if both else {})
    tensors = {"k": (2, 32), "v": (2, 32), "batch": (3, 4), "k_cache": (1, 2, 16), "v_cache": (1, 2, 16)}
    if both:
        tensors |= {"q": (2, 64), "table": (1, 8, 2), "out": (2, 64)}
    launches = launched(op, SOFTWARE, dims, tensors, "out" if both else "k_cache")
    for position in (0, 20):
        nbytes, operations = works(launches, position)
        assert nbytes == 16 * 3 + 4 * 2 * (32 + 32 + 32 + 32 + (64 + 16 + 64 if both else 0))
        assert operations == (3 * 2 * 6 * 16 if both else 0)


@pytest.mark.parametrize("caps", [SOFTWARE, LARGE_GPU, WEBGPU_DEFAULT], ids=["software", "GPU", "no subgroups"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (1, 100), (5, 100), (16, 0), (16, 100)])
def test_attention_reads_the_filled_part_of_the_caches(
    caps: DeviceCaps, context: str, tokens: int, position: int
) -> None:
    dims = {"tokens": tokens, "Hq": 4, "Hkv": 2, "D": 64, "context": context}
    tensors = {"q": (tokens, 256), "k_cache": (1, 2, 64), "v_cache": (1, 2, 64), "batch": (1 + tokens, 4)}
    launches = launched("attention", caps, dims, {**tensors, "out": (tokens, 256)})
    nbytes, operations = works(launches, position)
    filled = position + tokens
    needed = 2 * 4 * filled * 2 * 64 + 2 * 4 * tokens * 256
    # Sums of parts of the context are kept in between, written and read: of 64 keys, or 128 of long rows.
    chunks = (
        min(1, filled / min(last_key(context, 64), 8192)) * {"single_pass": 8, "split": 32, "long_split": 64}[context]
    )
    between = 2 * 4 * tokens * 4 * chunks * 66
    again = 3 * (16 * (1 + tokens) + 2 * 4 * tokens * 256)  # the batch; q and out by other dispatches
    assert needed <= nbytes <= needed + between + again
    seen = tokens * position + tokens * (tokens + 1) // 2
    assert operations == pytest.approx(4 * 4 * 64 * seen, abs=len(launches))
    for cache in ("k_cache", "v_cache"):
        counted = [nbytes for launch in launches for name, nbytes in launch.operands if name == cache]
        assert sum(counted) == 4 * 2 * 64, "a row counts once, however many dispatches share the rows of the step"


def test_what_leaves_runs_to_others_counts_nothing_for_a_run() -> None:
    """A prompt is a run: the kernels beside that of tiles are there for rows of other sequences."""
    dims = {"tokens": 64, "Hq": 4, "Hkv": 2, "D": 64, "context": "split"}
    tensors = {"q": (64, 256), "k_cache": (1, 2, 64), "v_cache": (1, 2, 64), "batch": (65, 4), "out": (64, 256)}
    launches = launched("attention", LARGE_GPU, dims, tensors)
    assert [launch.step.label for launch in launches] == [
        "attention_tile", "attention_single_pass", "attention_split", "attention_merge"
    ]  # fmt: skip
    works_each = [launch.work(0) for launch in launches]
    assert works_each[0][1] == 4 * 4 * 64 * 64 * 65 // 2
    assert works_each[1:] == [(0, 0)] * 3


@pytest.mark.parametrize("greedy", [True, False])
def test_sampling_reads_the_logits_and_little_else(greedy: bool) -> None:
    """Greedy once; drawing looks at them four times, and keeps at most all of them in between, beside its counts."""
    dims = {"rows": 2, "width": 50_000, "greedy": greedy, "advance": True}
    tensors = {"logits": (2, 50_000), "outputs": (2, 8), "batch": (3, 4), "tokens": (2,)}
    launches = launched("sample", LARGE_GPU, dims, tensors, "tokens")
    nbytes, operations = works(launches)
    logits = 4 * 2 * 50_000
    assert logits <= nbytes <= (1.01 if greedy else 6.2) * logits
    assert operations == pytest.approx((1 if greedy else 4) * 2 * 50_000, abs=len(launches))


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
    plan = plan_of(made, config, caps, 1, fusions)
    weights = sum(spec.nbytes for spec in plan.of_role("weight").values())
    nbytes, operations = works(plan.launches)
    assert weights <= nbytes <= 1.2 * weights
    matrices = sum(rows * more[0] for rows, *more in config.shapes.values() if more)
    assert 2 * matrices <= operations <= 2.1 * matrices


def test_a_prompt_computes_for_every_row_and_reads_weights_once() -> None:
    made, config = model(SMOLLM2, "q4_0")
    one, many = (works(plan_of(made, config, LARGE_GPU, tokens).launches) for tokens in (1, 128))
    table = 49152 * 576  # logits are wanted of the last row only
    assert many[1] - 2 * table == pytest.approx(128 * (one[1] - 2 * table), rel=0.05)
    assert one[0] < many[0] < 20 * one[0]


def test_work_grows_with_the_position_in_attention_alone() -> None:
    made, config = model(TINY)
    plan = plan_of(made, config, SOFTWARE, 1)
    grown = {launch.op for launch in plan.launches if launch.work(200) != launch.work(0)}
    assert grown == {"attention"}
    row = 2 * config.layers * config.kv_heads * config.head_width * 4  # keys and values of a position
    for position in (0, 100, 200):
        assert works(plan.launches, position + 100)[0] - works(plan.launches, position)[0] == 100 * row
