"""Neither plans nor shaders depend on the length of a prompt or on the size of the pool: a warm-up makes them all.

Rows come in buckets and contexts in classes; everything else is in buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile.lowering import Lowering
from shaderlm.compile.plan import Plan
from shaderlm.compile.plan_json import to_json
from shaderlm.compile.steps import Head, body_plan, head_plan
from shaderlm.gpu import WEBGPU_DEFAULT, Device, DeviceCaps
from shaderlm.graph.batch import CONTEXTS, PAGE
from shaderlm.graph.fuse import fuse
from shaderlm.models.config import Config, StepSpec
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.runner import FIRST_PAGES, SequenceChunk
from shaderlm.runtime.sampler_settings import SamplerSettings

from .architectures import LLAMA_1B, QWEN3, SMOLLM2, model
from .runners import runner_of
from .session import Session
from .tiny_models import write_tiny_llama

CONTEXT = 700
LENGTHS = [*range(1, 19), 31, 32, 33, 34, 63, 64, 65, 127, 128, 129, 256, 300, 319, 320, 321, 512, 600]
# GPU kernels take seconds on a software adapter where keys are split: the last length ends with one such step.
FEW_LENGTHS = [1, 2, 7, 9, 17, 33, 318]
SAMPLED = SamplerSettings(temperature=0.9, top_k=20, top_p=0.9, seed=5)
ADJUSTED = SAMPLED._replace(bias=((3, 1.0),), logprobs=2)


# What runs ------------------------------------------------------------------------------------------------------------


# The kernels of a GPU take a software adapter long. What their plans say is below.
@pytest.fixture(scope="module", params=["software", pytest.param("gpu", marks=pytest.mark.long)])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuRunner]:
    """A tiny model after its warm-up: steps of 16 rows, for few plans; a short rope table, which grows."""
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=1, context=CONTEXT, kind="q8_0")
    device: Device = request.getfixturevalue("device" if request.param == "software" else "gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shaderlm.runtime.gpu_steps.FIRST_POSITIONS", 64)
        made = runner_of(path, device)
        assert isinstance(made, GpuRunner)
        made.max_tokens, made.max_outputs = 16, 8
        made.warm_up()
        yield made
        made.close()


@pytest.fixture
def nothing_new(runner: GpuRunner) -> Iterator[None]:
    """Whatever a test does, it makes no plan and compiles no kernel."""
    before = (len(runner._plans), len(runner.device._pipelines))
    yield
    assert (len(runner._plans), len(runner.device._pipelines)) == before


def some_ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(i) for i in rng.integers(0, 256, count)]


def slow(runner: GpuRunner) -> bool:
    """Is this a software adapter that was taken for a GPU?"""
    return runner.device.caps.policy.check_bounds and not runner.device.caps.software


@pytest.mark.full
def test_a_warm_up_makes_few_plans(runner: GpuRunner) -> None:
    """Buckets × context classes, and heads: not as many as contexts. Eight decode rows have plans of their own."""
    buckets, decoded, rows, kinds = 5, 1, 4, 5
    made_by_loading = 4
    scores = 4  # of prompts
    most = len(CONTEXTS) * (buckets + 1 + decoded) + kinds * (rows + 2) + made_by_loading + scores
    assert len(runner._plans) <= most
    before = len(runner._plans)
    runner.warm_up()
    assert len(runner._plans) == before


def test_every_number_of_rows_has_its_plans(runner: GpuRunner) -> None:
    """Decode rows have plans without runs, as soon as other rows may be runs."""
    for keys in (1, 400):
        assert {runner.step_of(rows, keys, decode=False) for rows in range(1, 17)} <= set(runner._plans)
        steps = {runner.step_of(rows, keys, decode=True) for rows in range(1, 9)}
        assert steps <= set(runner._plans)
        assert [step.tokens for step in steps if step.decode] == [8]
    assert not runner.step_of(16, 1, decode=True).decode, "so many rows without tokens are rare"


@pytest.mark.usefixtures("nothing_new")
def test_no_length_of_a_prompt_makes_a_plan(runner: GpuRunner) -> None:
    rng = np.random.default_rng(1)
    for length in FEW_LENGTHS if slow(runner) else LENGTHS:
        session = Session(runner)
        settings = SAMPLED if length % 3 == 0 else SamplerSettings()
        session.sample(some_ids(rng, length), settings).wait()
        for _ in range(2):
            session.advance(settings).wait()
        session.rewind(length // 2)
        if length % 5 == 0:
            assert session.all_logits(some_ids(rng, 1 + length % 7)).shape[0] == 1 + length % 7
        else:
            assert np.isfinite(session.logits(some_ids(rng, 1 + length % 19))).all()
        session.close()


@pytest.mark.usefixtures("nothing_new")
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_no_way_to_cut_a_prompt_makes_a_plan(chunk: int, runner: GpuRunner) -> None:
    ids = some_ids(np.random.default_rng(2), 60)
    sequence = runner.add()
    for first in range(0, len(ids), chunk):
        runner.step([SequenceChunk(sequence, ids[first : first + chunk], "nothing")])
    runner.free(sequence)


@pytest.mark.usefixtures("nothing_new")
def test_no_batch_makes_a_plan(runner: GpuRunner) -> None:
    """Chunks of prompts, rows that decode, forks, all kinds of outputs; some sequences long, some short."""
    rng = np.random.default_rng(3)
    sequences = [runner.add() for _ in range(4)]
    kinds: Any = ["nothing", "token", "logits", "hidden"]

    def step() -> None:
        taken = [each for each in sequences if rng.random() < 0.7] or sequences[:1]
        rows = 16 // len(taken)
        counts = [int(rng.integers(1, rows + 1)) for _ in taken]
        how = (SAMPLED, SamplerSettings(), ADJUSTED)[rng.integers(3)]
        pairs = zip(taken, counts, strict=True)
        runner.step([SequenceChunk(each, some_ids(rng, count), kinds[rng.integers(4)], how) for each, count in pairs])

    def decode(count: int) -> None:
        runner.step([SequenceChunk(each, [7]) for each in sequences[:count]])
        batch = runner.decode_batch(sequences[:count], [(SAMPLED, SamplerSettings(), ADJUSTED)[count % 3]] * count)
        for _ in range(1 if slow(runner) and sequences[0].length > 300 else 3):
            batch.step().wait()
        batch.close()

    every = 3 if slow(runner) else 5
    for i in range(4 * every):
        step()
        if i % every == 0:
            decode(1 + i // every)
    while sequences[0].length < 320:
        runner.step([SequenceChunk(sequences[0], some_ids(rng, min(16, 320 - sequences[0].length)), "nothing")])
    runner.free(sequences[1])
    sequences[1] = runner.fork(sequences[0])
    for count in (2,) if slow(runner) else (1, 2, 3, 4):
        decode(count)
        if not slow(runner):
            step()
    for sequence in sequences:
        runner.free(sequence)


@pytest.mark.usefixtures("nothing_new")
def test_no_growth_makes_a_plan(runner: GpuRunner) -> None:
    """The pool doubles, and the rope table is made anew; on the adapter as it is, contexts change their class."""
    sequences = [runner.add() for _ in range(3)]
    pages, table = runner.pool.pages, runner._buffers["rope_table"].size
    end = 500 if slow(runner) else CONTEXT
    while sequences[0].length + 16 <= end:
        for sequence in sequences:
            runner.step([SequenceChunk(sequence, [sequence.length % 256] * 16, "nothing")])
    assert runner.pool.pages >= 3 * (end // PAGE) > FIRST_PAGES
    assert runner.pool.pages >= pages
    assert runner._buffers["rope_table"].size >= table
    assert runner._buffers["rope_table"].size >= 4 * 16 * (end // 16 * 16)
    for sequence in sequences:
        runner.free(sequence)


# What plans say -------------------------------------------------------------------------------------------------------

LARGE_GPU = replace(
    WEBGPU_DEFAULT,
    kind="discrete",
    subgroups=True,
    f16=True,
    max_invocations=1024,
    max_workgroup_memory=48 << 10,
    max_binding=2**31 - 4,
    max_buffer=2**32 - 4,
    max_storage_buffers=10,
)
SOFTWARE = replace(LARGE_GPU, kind="software")
SHAPES = {"smollm2": ("llama", SMOLLM2), "llama 1b": ("llama", LLAMA_1B), "qwen3": ("qwen3", QWEN3)}


def plans(caps: DeviceCaps, name: str, tokens: int, context: int = 8192) -> dict[str, Plan]:
    """The plans of a step of so many rows: one per context class, and those of its heads."""
    kind, shape = SHAPES[name]
    architecture, config = model((2, *shape[1:]), name=kind)
    config = replace(config, context=context)
    lowering = Lowering(caps, "fast")
    found = {each: body(lowering, architecture, config, StepSpec(tokens, each, "f16", True)) for each in CONTEXTS}
    for sampler in ("greedy", "sample", "adjusted", "logits", "hidden"):
        head = Head(min(tokens, 8), tokens, sampler)
        tail = architecture.head(config, head.rows, tokens, logits=sampler != "hidden")
        graph, rejected = fuse(tail, None, lowering.unsupported_reason)
        found[sampler] = head_plan(lowering, graph, rejected, head, config)
    return found


def body(lowering: Lowering, architecture: Any, config: Config, step: StepSpec) -> Plan:
    graph, rejected = fuse(architecture.build(config, step), None, lowering.unsupported_reason)
    return body_plan(lowering, graph, rejected, step, config)


@pytest.mark.parametrize("context", CONTEXTS)
def test_decode_plans_have_no_kernel_for_runs(context: str) -> None:
    """All others are the same."""
    architecture, config = model((2, *LLAMA_1B[1:]), name="llama")
    lowering = Lowering(LARGE_GPU, "fast")
    steps = [StepSpec(32, context, "f16", True, decode) for decode in (False, True)]
    mixed, decode = (body(lowering, architecture, config, step) for step in steps)
    assert "attention_tile" in [launch.step.label for launch in mixed.launches]
    others = [launch.step for launch in mixed.launches if launch.step.label != "attention_tile"]
    assert [(step.label, step.source) for step in others] == [
        (launch.step.label, launch.step.source) for launch in decode.launches
    ]


def sources(plan: Plan) -> set[str]:
    return {launch.step.source for launch in plan.launches}


def without_tiles(source: str) -> str:
    """A source without the values of its constants: routes choose tiles by the number of rows."""
    return re.sub(r"^(const \w+(?:\s*:\s*\w+)?\s*=).*;", r"\1", source, flags=re.M)


def numbers(source: str) -> set[int]:
    return {int(digits) for digits in re.findall(r"(?<![\w.])(\d+)u?\b(?!\.)", re.sub(r"//[^\n]*", "", source))}


@pytest.mark.parametrize("caps", [LARGE_GPU, SOFTWARE], ids=["gpu", "software"])
@pytest.mark.parametrize("name", SHAPES)
def test_two_buckets_have_the_same_shaders(name: str, caps: DeviceCaps) -> None:
    small, large = plans(caps, name, 64), plans(caps, name, 128)
    for part in small:
        assert {*map(without_tiles, sources(small[part]))} == {*map(without_tiles, sources(large[part]))}, part


@pytest.mark.parametrize("caps", [LARGE_GPU, SOFTWARE], ids=["gpu", "software"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_shader_holds_its_bucket(name: str, caps: DeviceCaps) -> None:
    """For numbers of rows that no tile has: neither they nor their products with a width are in any source."""
    _, shape = SHAPES[name]
    _, hidden, heads, kv_heads, width, ffn, vocabulary = shape
    one, other = plans(caps, name, 67), plans(caps, name, 71)
    for part in one:
        assert sources(one[part]) == sources(other[part]), f"{part}: 67 and 71 rows"
        widths = (1, hidden, heads, heads * width, kv_heads * width, ffn, vocabulary)
        held = {rows * each for rows in (67, 71) for each in widths} | {68, 72}
        for source in sources(one[part]):
            assert not numbers(source) & held, part


def test_the_numbers_of_a_source_are_seen() -> None:
    """What the test above looks for."""
    assert numbers("const ROWS: u32 = 67u; // 71\nlet a = x[4 * 128u] + 0.5 + f32(3) + vec4(9u);") == {67, 4, 128, 3, 9}
    assert without_tiles("const TILE: u32 = 64u;\nlet x = 64u;") == "const TILE: u32 =\nlet x = 64u;"


@pytest.mark.parametrize("caps", [LARGE_GPU, SOFTWARE], ids=["gpu", "software"])
def test_a_plan_does_not_know_the_context_or_the_pool(caps: DeviceCaps) -> None:
    """States and tables are given by the bytes of one row; a longer context changes no letter of a plan."""
    short, long = plans(caps, "smollm2", 32, context=640), plans(caps, "smollm2", 32, context=131_072)
    for part in short:
        assert to_json(short[part]) == to_json(long[part]), part
    kv_heads, width = SMOLLM2[3:5]
    states = short["split"].of_role("state")
    assert {spec.nbytes for spec in states.values()} == {2 * kv_heads * width}
    assert set(states) == {f"blk.{i}.{name}" for i in range(2) for name in ("k_cache", "v_cache")}
    assert short["split"].buffers["rope_table"].nbytes == 4 * width
