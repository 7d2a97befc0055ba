"""Plans: the list of dispatches as text, and that buffers are shared without anyone noticing."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.synthetic import config_of
from shaderlm.compile.lowering import Lowering
from shaderlm.compile.plan import NONE, Plan, concat
from shaderlm.compile.plan_json import contents
from shaderlm.compile.plan_text import describe
from shaderlm.compile.steps import Head, step_plan
from shaderlm.compile.tuning import Tuning
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import DeviceError, ModelError
from shaderlm.gpu import WEBGPU_DEFAULT, Device, DeviceCaps, MatrixShape, Program
from shaderlm.graph import interpret
from shaderlm.graph.batch import CONTEXTS
from shaderlm.graph.graph import Builder, Graph
from shaderlm.models.architecture import Architecture
from shaderlm.models.config import Config, StepSpec
from shaderlm.models.shapes import SYNTHETIC
from shaderlm.runtime.sizes import cache_format, weights_of

from .architectures import LLAMA_1B, LLAMA_8B, QWEN3, SMOLLM2, TINY, model

SNAPSHOTS = Path(__file__).parent / "data" / "plans"
DIGESTS = SNAPSHOTS / "digests.json"
UNITS = replace(
    LARGE_GPU,
    name="a large GPU with matrix units",
    implementation="dawn",
    matrix_shapes=(MatrixShape("f16", "f32", 16, 16, 16),),
    subgroup_min=32,
    subgroup_reported=32,
    subgroup_max=32,
)
H200 = replace(UNITS, name="NVIDIA H200", dot4=True, processors=132)
SOFTWARE = replace(WEBGPU_DEFAULT, name="software", kind="software", subgroups=True)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], DeviceCaps]] = {
    "smollm2-135m on a large GPU": (SMOLLM2, {"kind": "q4_1", "formats": {"token_embd": "q8_0"}}, LARGE_GPU),
    "llama-3.2-1b on WebGPU's default limits": (LLAMA_1B, {"kind": "q4_0"}, WEBGPU_DEFAULT),
    "llama-3.1-8b q4_k_m on a large GPU": (
        LLAMA_8B,
        {"kind": "q4_k", "formats": {"attn_v": "q6_k", "ffn_down": "q6_k", "token_embd": "q6_k"}},
        LARGE_GPU,
    ),
    "llama-3.2-1b on a large GPU with matrix units": (LLAMA_1B, {"kind": "q4_0"}, UNITS),
    "qwen3-0.6b on a large GPU": (
        QWEN3,
        {"name": "qwen3", "kind": "q4_0", "formats": {"token_embd": "q8_0"}},
        LARGE_GPU,
    ),
    "smollm2-135m in software": (SMOLLM2, {"kind": "q4_1", "formats": {"token_embd": "q8_0"}}, SOFTWARE),
}


def plan_of(
    made: Architecture,
    config: Config,
    caps: DeviceCaps,
    tokens: int,
    fusions: Sequence[str] | None = None,
    *,
    context: str = CONTEXTS[0],
    kind: str = "greedy",
    precision: str = "fast",
    tuning: Tuning | None = None,
) -> Plan:
    """A step as a runner has it, from the batch to a token: pages for several rows, none for one; one row of logits."""
    lowering = Lowering(caps, precision, tuning)
    step = StepSpec(tokens, context, cache_format(caps), paged=tokens > 1)
    head = Head(1, tokens, kind, paged=tokens > 1)
    return step_plan(lowering, made, config, step, head, fusions)


def short(name: str) -> tuple[Architecture, Config, DeviceCaps]:
    """The model of a case with two layers: the others are like them."""
    shape, options, caps = CASES[name]
    return *model((2, *shape[1:]), **options), caps


def plans(shape: tuple[int, ...], options: dict[str, Any], caps: DeviceCaps) -> list[Plan]:
    made, config = model(shape, **options)
    return [plan_of(made, config, caps, 128), plan_of(made, config, caps, 1)]


@pytest.mark.parametrize("name", CASES)
def test_plans_are_as_recorded(name: str) -> None:
    """A refactor must not change them; a change that is meant is recorded with `python -m tests.record_plans`."""
    text = "\n\n".join(map(describe, plans(*CASES[name]))) + "\n"
    assert text == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")


def digests(name: str) -> dict[str, str]:
    """Of all that a device gets for a synthetic shape: texts of shaders, buffers, parameters, grids and their order."""
    shape, shared = SYNTHETIC[name], "attention.shared_kv_layers"
    shallow = replace(shape, layers=2)
    heads = shape.further.get("attention.head_count_kv")
    if isinstance(heads, list):  # as far as the first layer that attends
        layers = heads.index(max(heads)) + 1
        shallow = replace(shape, layers=layers, further={**shape.further, "attention.head_count_kv": heads[:layers]})
    if shared in shape.further:  # with and without a window, before and after the keys and values that they read
        shallow = replace(shape, layers=12, further={**shape.further, shared: 6})
    made, config = config_of(shallow, "q4_0")
    found = {}
    for caps, tokens in itertools.product((LARGE_GPU, UNITS, WEBGPU_DEFAULT), (1, 16, 128)):
        plan = plan_of(made, config, caps, tokens)
        steps = [(step.source, [slot.buffer for slot in step.slots], step.grid) for step in plan.program.steps]
        text = repr((steps, [(buffer, spec.nbytes, contents(spec)) for buffer, spec in plan.buffers.items()]))
        found[f"{tokens} tokens on {caps.name}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


@pytest.mark.parametrize("name", SYNTHETIC)
def test_what_a_device_gets_is_as_recorded(name: str) -> None:
    """As above, for shaders as well. A change of kernels that is meant is recorded with the same command."""
    assert digests(name) == json.loads(DIGESTS.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize(
    ("context", "local", "last"),
    # Of a layer with a window and of one without, which make keys and values and which read those of others.
    [("single_pass", (9, 9), (9, 9)), ("long_split", (9, 11), (9, 10))],
)
def test_dispatches_of_a_decode_step(context: str, local: tuple[int, int], last: tuple[int, int]) -> None:
    """Gemma 4, at the start of a text and past its window of 512, which the depth of a text changes nothing for."""
    further = {**SYNTHETIC["gemma-4-4b"].further, "attention.shared_kv_layers": 6}
    made, config = config_of(replace(SYNTHETIC["gemma-4-4b"], layers=12, further=further), "q4_0")
    launches = Counter(launch.layer for launch in plan_of(made, config, H200, 1, context=context).launches)
    found = [launches[f"blk.{i}"] for i in range(12)]
    assert found == [*[local[0]] * 5, local[1], *[last[0]] * 5, last[1]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["greedy", "sample", "adjusted", "logits", "hidden"])
def test_buffers_are_shared_without_anyone_noticing(name: str, fused: bool, kind: str) -> None:
    """Replays a plan on names alone: what a dispatch reads is what was last meant to be there."""
    made, config, caps = short(name)
    context = CONTEXTS[-1] if kind == "sample" else CONTEXTS[0]  # scratch for splits of the keys
    plan = plan_of(made, config, caps, 5, None if fused else (), context=context, kind=kind)
    holds: dict[str, str] = {}
    checked = 0
    for launch in plan.launches:
        written = [slot.buffer for slot in launch.step.slots if slot.access == "storage"]
        read = [slot.buffer for slot in launch.step.slots if slot.access == "read-only-storage"]
        assert not set(written) & set(read), f"{launch.op} of {launch.layer} writes what it reads"
        assert len(written) == len(set(written)), f"{launch.op} of {launch.layer} binds a buffer twice for writing"
        slots = [s for s in launch.step.slots if s.access != "uniform" and s.buffer != NONE]
        slots = [s for s in slots if not s.buffer.split("/")[-1].startswith("scales")]
        for slot, tensor in zip(slots, launch.buffers, strict=True):
            if plan.buffers[slot.buffer].role != "scratch":
                continue
            if slot.access == "read-only-storage":
                assert holds[slot.buffer] == tensor, f"{launch.op} of {launch.layer} finds {holds[slot.buffer]}"
                checked += 1
            else:
                holds[slot.buffer] = tensor
    assert checked > 10


def _columns(tokens: int) -> Graph:
    """Columns of what is made, of these columns, and some that begin between two multiples of 256 bytes."""
    b = Builder()
    b.tensor("x", tokens, 256, role="input")
    b.tensor("wide", tokens, 256)
    b.add("scale", {"tokens": tokens, "count": tokens * 256, "factor": 2.0}, {"x": "x"}, "l", out="wide")
    for name, of, width, first, count in (
        ("half", "wide", 256, 64, 192),
        ("part", "half", 192, 64, 64),
        ("odd", "wide", 256, 3, 64),
    ):
        b.tensor(name, tokens, count)
        b.add("slice", {"tokens": tokens, "width": width, "first": first, "count": count}, {"x": of}, "l", out=name)
    for a, other, out in (("part", "odd", "sum"), ("sum", "part", "out")):
        b.tensor(out, tokens, 64)
        b.add("add", {"tokens": tokens, "count": tokens * 64}, {"a": a, "b": other}, "l", out=out)
    return b.graph("out")


@pytest.mark.smoke
def test_columns_of_one_row_are_bound_where_they_lie(device: Device) -> None:
    caps = replace(device.caps, offset_alignment=256)
    for tokens, views, slices in ((1, True, 1), (1, False, 3), (2, True, 3)):
        graph = _columns(tokens)
        plan = Lowering(caps, views=views).plan("columns", graph)
        assert Counter(launch.op for launch in plan.launches) == {"scale": 1, "add": 2, "slice": slices}
        offsets = {slot.offset for step in plan.program.steps for slot in step.slots}
        assert offsets == ({0, 512} if slices == 1 else {0})
        contents: dict[str, Any] = {
            name: np.array(spec.words, np.uint32) if spec.role == "params" else spec.nbytes
            for name, spec in plan.buffers.items()
        }
        x = np.arange(tokens * 256, dtype=np.float32).reshape(tokens, 256)
        found = device.run(Program({**contents, "x": x}, plan.program.steps, plan.outputs))["out"].view(np.float32)
        np.testing.assert_array_equal(found[: tokens * 64], interpret.run(graph, {"x": x})["out"].ravel())


def test_scratch_is_much_smaller_than_its_tensors() -> None:
    plan = plans(*CASES["llama-3.2-1b on WebGPU's default limits"])[0]
    sizes = [spec.nbytes for spec in plan.of_role("scratch").values()]
    assert 1e6 < sum(sizes) < 40e6  # 16 layers of 128 rows would be 400 MB
    assert max(sizes) <= WEBGPU_DEFAULT.max_operand


@pytest.mark.parametrize("name", CASES)
def test_plans_of_all_steps_read_the_same_weights(name: str) -> None:
    """Weights are uploaded for two plans; others find them under the same names and in the same layouts."""
    made, config, caps = short(name)
    for fusions in (None, ()):
        known = weights_of(plan_of(made, config, caps, tokens, fusions) for tokens in (1, 32))
        for tokens, context, kind in ((1, "split", "sample"), (2, "long_split", "logits"), (512, "split", "greedy")):
            plan = plan_of(made, config, caps, tokens, fusions, context=context, kind=kind)
            for buffer, spec in plan.of_role("weight").items():
                assert known[buffer] == spec, f"{buffer} of {tokens} tokens"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_lists_every_buffer_with_its_role(name: str) -> None:
    made, config, caps = short(name)
    for tokens in (128, 1):
        plan = plan_of(made, config, caps, tokens, kind="sample")
        bound = {slot.buffer for launch in plan.launches for slot in launch.step.slots}
        assert bound == set(plan.buffers)
        inputs = {"batch", "outputs", "tokens"} | ({"page_table"} if tokens > 1 else set())
        assert {*plan.of_role("input")} == inputs
        assert {*plan.of_role("output")} == {"hidden", "logits"}
        assert plan.outputs == ("hidden", "logits")
        caches = {f"blk.{i}.{kind}_cache" for i in range(config.layers) for kind in "kv"}
        assert {*plan.of_role("state")} == caches
        row = config.kv_heads * config.head_width * {"f16": 2, "f32": 4}[cache_format(caps)]
        assert {spec.nbytes for spec in plan.of_role("state").values()} == {row}, "one row, however long the pool is"
        (table,) = plan.of_role("table").values()
        assert (table.nbytes, table.table["formula"]) == (4 * config.rope.rotary, "rope")
        for spec in plan.of_role("params").values():
            assert spec.nbytes == 4 * len(spec.words)


@pytest.mark.parametrize("caps", [LARGE_GPU, SOFTWARE, WEBGPU_DEFAULT], ids=lambda caps: caps.name)
def test_shaders_hold_no_bucket_and_steps_of_many_rows_share_them(caps: DeviceCaps) -> None:
    """After steps of a few buckets no longer prompt compiles anything: sources depend on no number of rows above 16."""
    made, config = model((2, *LLAMA_1B[1:]), "q4_0")

    def sources(tokens: int, context: str) -> set[str]:
        launches = plan_of(made, config, caps, tokens, context=context).launches
        return {launch.step.source for launch in launches}

    for context in CONTEXTS:
        known = sources(512, context) | sources(32, context) | sources(128, context)
        for tokens in (64, 256):
            assert sources(tokens, context) <= known, f"{tokens} rows, {context}"


def test_what_a_plan_needs_is_checked_by_name() -> None:
    made, config = model(SMOLLM2, "q4_0")
    plan = plan_of(made, config, LARGE_GPU, 1)
    assert plan.needs.features == ("subgroups",)  # a cache of f16 is read as words
    plan.check(LARGE_GPU)
    with pytest.raises(DeviceError, match="the plan 'decode' cannot run here: the plan needs the feature subgroups"):
        plan.check(replace(LARGE_GPU, subgroups=False))
    most = plan.needs.limits["max_binding"]
    assert most == max(spec.nbytes for spec in plan.buffers.values())
    with pytest.raises(DeviceError, match=re.escape(f"max_binding of {most:,}; a large GPU has 1,024")):
        plan.check(replace(LARGE_GPU, max_binding=1024))
    with pytest.raises(DeviceError, match="max_storage_buffers"):
        plan.check(replace(LARGE_GPU, max_storage_buffers=plan.needs.limits["max_storage_buffers"] - 1))


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_binds_more_than_ten_storage_buffers(name: str) -> None:
    for plan in plans(*CASES[name]):
        assert plan.needs.limits["max_storage_buffers"] <= (8 if CASES[name][2] is WEBGPU_DEFAULT else 10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_dispatch_binds_an_operand_once(name: str, tokens: int) -> None:
    """Queries, keys and values that are columns of one product; what is not there is bound for each."""
    made, config, caps = short(name)
    for launch in plan_of(made, config, caps, tokens).launches:
        read = [slot.buffer for slot in launch.step.slots if slot.access == "read-only-storage"]
        there = [buffer for buffer in read if buffer != NONE]
        assert len(there) == len(set(there)), f"{launch.op} of {launch.layer}"
        if launch.step.label == "linear_rows" and launch.dims["epilogue"] != "add":
            assert read.count(NONE) == 2, "neither bias nor residual"


def test_joined_plans_share_parameters_and_keep_what_each_needs() -> None:
    made, config = model(TINY)
    body, tail = (plan_of(made, config, LARGE_GPU, tokens) for tokens in (1, 8))
    both = concat("both", (body, tail))
    assert len(both.launches) == len(body.launches) + len(tail.launches)
    words = [spec.words for spec in both.of_role("params").values()]
    assert len(words) == len(set(words)), "equal parameters are one buffer"
    for before, after in zip((*body.launches, *tail.launches), both.launches, strict=True):
        of = body if before in body.launches else tail
        for old, new in zip(before.step.slots, after.step.slots, strict=True):
            if of.buffers[old.buffer].role == "params":
                assert contents(of.buffers[old.buffer]) == contents(both.buffers[new.buffer])
            else:
                assert old == new
                assert both.buffers[new.buffer].nbytes >= of.buffers[old.buffer].nbytes
    for name, limit in both.needs.limits.items():
        assert limit == max(body.needs.limits[name], tail.needs.limits[name])


def test_widths_that_kernels_cannot_read_are_refused() -> None:
    made, config = model((1, 48, 2, 1, 24, 96, 40), "f32")
    with pytest.raises(ModelError, match="48 columns; on a GPU they must be a multiple of 32"):
        plan_of(made, config, LARGE_GPU, 1)
    made, config = model((1, 64, 16, 16, 6, 96, 40), "f32")
    with pytest.raises(ModelError, match="heads have 6 values; on a GPU they must be a multiple of 4"):
        plan_of(made, config, LARGE_GPU, 1)


def test_a_device_that_is_too_small_is_refused_before_anything_is_allocated() -> None:
    made, config = model(TINY)
    small = replace(WEBGPU_DEFAULT, max_storage_buffers=4)
    with pytest.raises(ModelError, match="this device cannot run"):
        plan_of(made, config, small, 1)
