"""Models with states beside pages: what a sequence gives does not depend on how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.synthetic import config_of, parse
from shaderlm.engine import LanguageModel
from shaderlm.engine.drafts import Drafts
from shaderlm.engine.loading import load_with
from shaderlm.engine.request import EngineOptions
from shaderlm.engine.saved_prompts import restore_prompt, save_prompt
from shaderlm.engine.scheduler import SequenceState
from shaderlm.errors import DeviceError, InputError, ModelError
from shaderlm.graph.batch import PAGE
from shaderlm.graph.fuse import fuse
from shaderlm.models.config import StepSpec
from shaderlm.runtime.cache_share import MOST_EMPTY_PAGES, free_memory
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.pages import KvSequence
from shaderlm.runtime.runner import F32, Runner, SequenceChunk
from shaderlm.runtime.sampler_settings import GREEDY
from shaderlm.runtime.states import StatePool

from .checkpoints import recorded, write_gguf
from .oracles import assert_logits
from .session import Session

pytestmark = pytest.mark.xdist_group("recurrent")
MODELS = ("lfm2", "qwen35", "granitehybrid", "mamba2")
LENGTH = 120  # tokens: more than the chunks of any test

# Of what is the same for every kind of state, two kinds are in the default tier.
two_by_default = pytest.mark.parametrize(
    "path",
    [pytest.param(name, marks=() if name in {"qwen35", "mamba2"} else pytest.mark.full) for name in MODELS],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recurrent") / f"{request.param}.gguf"
    return write_gguf(file, recorded(request.param), {f"{request.param}.context_length": 4 * PAGE})


@pytest.fixture(
    scope="module", params=["numpy", *(pytest.param(name, marks=pytest.mark.full) for name in ("cpu", "device"))]
)
def model(path: Path, request: pytest.FixtureRequest) -> Any:
    device = request.getfixturevalue("device") if request.param == "device" else request.param
    with load_with(path, device=device, cache="f32", precision="exact") as made:
        yield made


@pytest.fixture(scope="module")
def runner(model: LanguageModel) -> Runner:
    return model.runner


@pytest.fixture(scope="module")
def ids(runner: Runner) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, runner.config.vocabulary, LENGTH)]


@pytest.fixture(scope="module")
def logits(runner: Runner, ids: list[int]) -> F32:
    """After each token, one token at a time."""
    session = Session(runner)
    found = np.stack([session.logits([token]) for token in ids])
    session.close()
    return found


@pytest.mark.parametrize("chunk", [7, 64, 100, LENGTH])
def test_chunks_of_a_prompt(chunk: int, runner: Runner, ids: list[int], logits: F32) -> None:
    session = Session(runner)
    for first in range(0, LENGTH, chunk):
        part = ids[first : first + chunk]
        assert_logits(session.logits(part), logits[first + len(part) - 1], f"after {first + len(part)}")
    session.close()


def test_a_slot_is_used_again(runner: Runner, ids: list[int], logits: F32) -> None:
    """The state of a sequence that is gone is not that of the next."""
    for _ in range(2):
        session = Session(runner)
        assert_logits(session.logits(ids[:3]), logits[2], "a new sequence")
        session.close()
    sequence = runner.add()
    runner.feed(sequence, ids[:50])
    assert runner.truncate(sequence, 50) == 50
    assert runner.truncate(sequence, 20) == 0 == sequence.length, "a state cannot be cut back"
    found = runner.feed(sequence, ids[:20], "logits").logits
    assert found is not None
    assert_logits(found[-1], logits[19], "after truncating")
    runner.free(sequence)


def test_a_fork_goes_its_own_way(runner: Runner, ids: list[int], logits: F32) -> None:
    parent = runner.add()
    runner.feed(parent, ids[:31])
    child = runner.fork(parent)
    runner.feed(child, ids[:9])
    found = runner.feed(parent, ids[31:40], "logits").logits
    assert found is not None
    assert_logits(found[-1], logits[39], "the parent")
    grandchild = runner.fork(parent)
    runner.free(parent)
    found = runner.feed(grandchild, ids[40:44], "logits").logits
    assert found is not None
    assert_logits(found[-1], logits[43], "a fork of what is gone")
    runner.free(child)
    runner.free(grandchild)
    assert runner.states.free == runner.states.rows


@pytest.mark.parametrize("seed", range(2))
def test_random_schedules(seed: int, runner: Runner, ids: list[int], logits: F32) -> None:
    """Sequences come, go, fork, are cut back and share steps; all of them read the same text."""
    rng = np.random.default_rng(seed)
    known = list[KvSequence]()
    for step in range(30):
        action = rng.choice(["add", "fork", "truncate", "free", "step", "step", "step", "step"])
        if action == "add" and len(known) < 5:
            known.append(runner.add())
        elif action == "fork" and known and len(known) < 5:
            known.append(runner.fork(known[rng.integers(len(known))]))
        elif action == "truncate" and known:
            sequence = known[rng.integers(len(known))]
            runner.truncate(sequence, int(rng.integers(0, sequence.length + 1)))
        elif action == "free" and len(known) > 2:
            runner.free(known.pop(rng.integers(len(known))))
        elif action == "step":
            counts = {each: min(int(rng.choice([1, 1, 1, 2, 5, 20])), LENGTH - each.length) for each in known}
            taken = [each for each in known if counts[each] and rng.random() < 0.8]
            if not taken:
                continue
            parts = [SequenceChunk(each, ids[each.length :][: counts[each]], "logits") for each in taken]
            found = runner.step(parts).logits
            assert found is not None
            for row, sequence in zip(found, taken, strict=True):
                assert_logits(row, logits[sequence.length - 1], f"step {step}, {sequence.length} tokens")
    for sequence in known:
        runner.free(sequence)


@two_by_default
def test_generations_beside_each_other(model: LanguageModel) -> None:
    """The engine batches and begins anew; texts stay the same."""
    prompts = [f"{i} is a number. " * (i + 1) for i in range(4)]
    for _ in range(2):
        alone = [model.generate(prompt, max_tokens=12, temperature=0) for prompt in prompts]
    assert model.generate(prompts, max_tokens=12, temperature=0) == alone


def begin(model: LanguageModel, **options: Any) -> None:
    """Nothing is cached."""
    model.engine.configure(EngineOptions(**options))
    with model.runner.lock:
        model.engine._cache.clear()


def generate(model: LanguageModel, prompt: list[int], tokens: int = 8) -> tuple[list[int], int]:
    """The ids that follow, and how many tokens of the prompt were cached."""
    handle = model.engine.submit(model.request(prompt, max_tokens=tokens, temperature=0, ignore_eos=True))
    found = handle.result()
    assert found is not None
    return found.ids, handle.usage.cached_tokens


@two_by_default
def test_a_prompt_begins_after_a_snapshot(model: LanguageModel) -> None:
    """The last whole page of a prompt has one; texts are those without."""
    words = [int(i) for i in np.random.default_rng(5).integers(0, model.config.vocabulary, 3 * PAGE)]
    prompts = [words[: PAGE - 1], words[:PAGE], words[: PAGE + 1], words[: 2 * PAGE + 40]]
    prompts.append([*words[:PAGE], *reversed(words[:50])])
    alone = []
    for prompt in prompts:
        begin(model)
        alone.append(generate(model, prompt)[0])
    begin(model)
    # The end of the second page is not cached before somebody reads it.
    for cached in ([0, 0, PAGE, PAGE, PAGE], [0, 0, PAGE, 2 * PAGE, PAGE]):
        assert [generate(model, prompt) for prompt in prompts] == list(zip(alone, cached, strict=True))
    states = model.runner.states
    assert len(states.snapshots) == states.rows - states.free == 3, "of what was generated, too"


@two_by_default
def test_what_was_generated_has_snapshots(model: LanguageModel) -> None:
    """A conversation goes on after the last whole page of its answer."""
    begin(model)
    words = [int(i) for i in np.random.default_rng(8).integers(0, model.config.vocabulary, PAGE - 30)]
    first, _ = generate(model, words, 60)
    text = [*words, *first, *words[:10]]
    found, cached = generate(model, text)
    assert cached == PAGE
    begin(model)
    assert generate(model, text) == (found, 0)


@two_by_default
def test_snapshots_give_way(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are few: the one that was not used for longest goes, and the text stays what it was."""
    begin(model)
    rng = np.random.default_rng(6)
    monkeypatch.setattr(type(model.runner), "max_snapshots", 2)
    prompts = [[int(i) for i in rng.integers(0, model.config.vocabulary, PAGE + 5)] for _ in range(4)]
    alone = [generate(model, prompt)[0] for prompt in prompts]
    assert len(model.runner.states.snapshots) == 2
    again = [generate(model, prompt) for prompt in reversed(prompts)]
    assert again == list(zip(reversed(alone), [PAGE, PAGE, 0, 0], strict=True))


def test_a_snapshot_that_fails_takes_no_row(
    runner: Runner, ids: list[int], logits: F32, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for it: there is none. A copy that fails: its row is free again, and the sequence is what it was."""
    sequence, states = runner.add(), runner.states
    runner.feed(sequence, ids[:30])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_grow_for_states", lambda count: failing(MemoryError("no memory")))
        assert runner.snapshot(sequence) is None
    used = states.rows - states.free
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_copy_state", lambda source, target: failing(DeviceError("lost")))
        with pytest.raises(DeviceError, match="lost"):
            runner.snapshot(sequence)
    assert states.rows - states.free == used
    found = runner.feed(sequence, ids[30:35], "logits").logits
    assert found is not None
    assert_logits(found[-1], logits[34], "after snapshots that failed")
    runner.free(sequence)


def failing(problem: BaseException) -> None:
    raise problem


@pytest.mark.long
def test_preempted_sequences_go_on(model: LanguageModel) -> None:
    """A pool for fewer tokens than the requests have: the youngest waits and is computed again."""
    rng = np.random.default_rng(7)
    pool = model.runner.pool
    count = pool.pages // 2  # each needs three pages at its end
    prompts = [[int(i) for i in rng.integers(0, model.config.vocabulary, PAGE - 9)] for _ in range(count)]
    alone = []
    for prompt in prompts:
        begin(model)
        alone.append(generate(model, prompt, PAGE + 20)[0])
    begin(model)
    before = model.engine.stats().preemptions
    requests = [model.request(prompt, max_tokens=PAGE + 20, temperature=0, ignore_eos=True) for prompt in prompts]
    with model.runner.lock:  # no step before all are there
        limits = model.engine._scheduler.limits
        pool.max_pages = limits.max_pages = pool.pages
        handles = [model.engine.submit(each) for each in requests]
    found = [handle.result() for handle in handles]
    assert [each.ids for each in found if each is not None] == alone
    assert model.engine.stats().preemptions > before
    begin(model)


@pytest.mark.full
@pytest.mark.parametrize("where", ["numpy", "device"])
def test_a_restart_finds_states_and_pages(
    where: str, path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A prompt begins after the last state on disk. Without the file of a state the one before it serves."""
    target = request.getfixturevalue("device") if where == "device" else where

    def restarted() -> Any:
        return load_with(path, device=target, cache="f32", precision="exact", cache_dir=tmp_path)

    with restarted() as model:
        words = [int(i) for i in np.random.default_rng(9).integers(0, model.config.vocabulary, 2 * PAGE + 30)]
        expected = [generate(model, words)[0], generate(model, [*words[:PAGE], *words[:40]])[0]]
        # The first page is a prompt of its own: it has a state, too.
        generate(model, words[: PAGE + 1])
    states = sorted(tmp_path.glob("*.states"))
    assert len(states) == 2
    assert list(tmp_path.glob("*.pages"))
    with restarted() as model:
        assert generate(model, words) == (expected[0], 2 * PAGE)
        assert disk_hits(model) == 2 * PAGE
        assert generate(model, words) == (expected[0], 2 * PAGE)
        assert disk_hits(model) == 2 * PAGE, "what is in memory is not read again"
    with restarted() as model:
        assert generate(model, [*words[:PAGE], *words[:40]]) == (expected[1], PAGE)
        assert generate(model, words) == (expected[0], 2 * PAGE), "a part of the record is in memory"
    for each in states:
        raw = bytearray(each.read_bytes())
        raw[-1] ^= 1
        each.write_bytes(raw)
    with restarted() as model:
        assert generate(model, words) == (expected[0], 0)
        assert not model.runner.states.snapshots or model.runner.states.free < model.runner.states.rows


@two_by_default
def test_a_saved_prompt_has_its_state(path: Path, tmp_path: Path) -> None:
    """Up to its last whole page. A file without the record of the state, or with another one, is refused."""
    file, key = tmp_path / "prompt.bin", b"key"
    with load_with(path, device="numpy", cache="f32", precision="exact") as model:
        words = [int(i) for i in np.random.default_rng(3).integers(0, model.config.vocabulary, PAGE + 20)]
        expected, _ = generate(model, words)
        assert save_prompt(model.engine.pages, words, None, file, key).ids == tuple(words[:PAGE])
        assert save_prompt(model.engine.pages, [1, 2], None, tmp_path / "empty.bin", key).ids == ()
        begin(model)
        assert restore_prompt(model.engine.pages, None, file, key).nbytes == file.stat().st_size
        assert generate(model, words) == (expected, PAGE)
        assert restore_prompt(model.engine.pages, None, file, key).ids == tuple(words[:PAGE]), "it is there already"
        assert restore_prompt(model.engine.pages, None, tmp_path / "empty.bin", key).ids == ()
        begin(model)
        raw = bytearray(file.read_bytes())
        for damaged in (raw[:-5], raw[: file.stat().st_size // 2], [*raw[:-1], raw[-1] ^ 1]):
            file.write_bytes(bytes(damaged))
            with pytest.raises(InputError, match=r"prompt\.bin holds no saved prompt"):
                restore_prompt(model.engine.pages, None, file, key)
        assert generate(model, words) == (expected, 0)


def disk_hits(model: LanguageModel) -> int:
    disk = model.engine.stats().disk
    assert disk is not None
    return disk.hits


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_rejected_drafts(rows: int, runner: Runner, ids: list[int], logits: F32) -> None:
    """However many drafts are right, the state is that after them; beside a sequence that verifies none."""
    other = runner.add()
    runner.feed(other, ids[:10])
    for right in range(rows):
        sequence, length = runner.add(), 20 + right
        runner.feed(sequence, ids[:length])
        wrong = [(i + 1) % runner.config.vocabulary for i in ids[length + 1 + right :][: rows - 1 - right]]
        tokens = [*ids[length : length + 1 + right], *wrong]
        places = runner.pool.unused_slots(rows - 1)
        chunk = SequenceChunk(sequence, tokens, "tokens", GREEDY, None, [GREEDY] * (rows - 1), places)
        before = other.length
        drawn = runner.step([chunk, SequenceChunk(other, ids[before : before + 1], "nothing")]).tokens
        assert drawn is not None
        words = drawn.wait()
        expected = logits[length : length + 1 + right].argmax(-1)
        assert [int(words[slot]) for slot in chunk.slots[: right + 1]] == expected.tolist()
        left = length + 1 + right
        assert runner.truncate(sequence, left) == left
        found = runner.feed(sequence, ids[left : left + 2], "logits").logits
        assert found is not None
        assert_logits(found[-1], logits[left + 1], f"{right} of {rows - 1} drafts are right")
        assert runner.truncate(sequence, length + 1) == 0, "the prompt's rows leave no states"
        runner.free(sequence)
    found = runner.feed(other, ids[other.length :][:1], "logits").logits
    assert found is not None
    assert_logits(found[-1], logits[other.length - 1], "beside them")
    runner.free(other)
    assert runner.states.spares == 0
    assert runner.states.free + len(runner.states.snapshots) == runner.states.rows


def test_what_drafts_left_is_of_no_use_to_another_text(runner: Runner, ids: list[int]) -> None:
    """Of a sequence that is cut back to before them. Its tokens come one by one, and overwrite no spare row."""
    sequence = runner.add()
    runner.feed(sequence, ids[:4])
    places = runner.pool.unused_slots(4)
    runner.step([SequenceChunk(sequence, ids[4:9], "tokens", GREEDY, None, [GREEDY] * 4, places)]).wait()
    assert runner.truncate(sequence, 2) == 0
    for token in ids[20:29]:
        runner.feed(sequence, [token])
    assert runner.truncate(sequence, 6) == 0 == sequence.length
    runner.free(sequence)


@two_by_default
def test_texts_with_drafts_are_those_without(path: Path) -> None:
    """A drafter that is right half of the time, across the ends of pages; then the cache is used."""
    with load_with(path, device="numpy", cache="f32", precision="exact") as model:
        words = [int(i) for i in np.random.default_rng(8).integers(0, model.config.vocabulary, PAGE - 20)]
        expected = generate(model, words, 40)[0]
        again = generate(model, [*words, *expected, *words[:5]], 10)
        begin(model)
        model.engine.use_drafts(Drafts(_HalfRight(words + expected), 6, measured=False))
        found = model.engine.submit(model.request(words, max_tokens=40, temperature=0, ignore_eos=True))
        completion = found.result()
        assert completion is not None
        assert completion.ids == expected
        assert 0 < found.accepted < found.drafted
        assert generate(model, [*words, *expected, *words[:5]], 10) == again, "the snapshot at the end of the page"
        assert again[1] == PAGE


def test_there_is_no_room_for_states_of_drafts(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is not drafted, or refused by name; a deterministic model has none."""
    runner = model.runner
    sequence = runner.add()
    runner.feed(sequence, [3, 4, 5])
    monkeypatch.setattr(type(runner), "max_snapshots", 3)
    assert runner.reserve_spares(sequence, 8) == 3
    chunk = SequenceChunk(sequence, [3] * 5, "tokens", GREEDY, None, [GREEDY] * 4, runner.pool.unused_slots(4))
    with pytest.raises(DeviceError, match="3 states of rows that verify drafts"):
        runner.step([chunk])
    monkeypatch.setattr(runner, "_grow_states", lambda rows: failing(MemoryError("no memory")))
    monkeypatch.setattr(runner.states, "take_run", lambda count: None)
    runner.free(sequence)
    other = runner.add()
    assert runner.reserve_spares(other, 2) == 0
    monkeypatch.setattr(runner, "deterministic", True)
    assert runner.max_spares == 0
    runner.free(other)
    assert runner.states.spares == 0


def test_rows_grow_to_what_sequences_and_snapshots_fill(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots have a limit of bytes: twice as many rows each time would pass it."""
    states = StatePool()
    monkeypatch.setattr(type(runner), "max_snapshots", 5)
    monkeypatch.setattr(runner, "states", states)
    monkeypatch.setattr(runner, "_grow_states", states.grow)
    runner._grow_for_states(1)
    states.take()
    assert [runner.take_snapshot() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert states.rows == 6


def test_pages_without_keys_and_values_have_a_limit(runner: Runner) -> None:
    """They take nothing of the device, and their tokens are on the host."""
    if runner.cache_pages is None:
        assert isinstance(runner, GpuRunner)
        assert free_memory(runner.device.caps, 0, loaded=True) is None, "of some GPUs nobody knows what is free"
        return
    assert (runner.cache_pages == MOST_EMPTY_PAGES) == (not runner.page_tensors)


@pytest.mark.parametrize(
    ("name", "stored", "key"),
    [("lfm2", "conv.conv", "shortconv.l_cache"), ("qwen35", "linear_attn.conv1d", "ssm.conv_kernel")],
)
def test_a_convolution_of_one_token_is_refused_by_its_key(name: str, stored: str, key: str, tmp_path: Path) -> None:
    entry = deepcopy(recorded(name))
    shapes = [shape for tensor, (shape, _) in entry["shapes"].items() if tensor.endswith(f"{stored}.weight")]
    for shape in shapes:
        shape[-1] = 1
    path = write_gguf(tmp_path / "one.gguf", entry, {f"{name}.{key}": 1})
    with pytest.raises(ModelError, match=rf"one\.gguf: {name}\.{key} must be a whole number from 2 to 16"):
        load_with(path, device="numpy")
    assert shapes


@two_by_default
@pytest.mark.parametrize("memory", [False, True])
def test_requests_wait_for_a_row_of_the_states(memory: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts have taken the last one, or there is no memory for more: nobody's request fails."""
    with load_with(path, device="numpy", cache="f32", precision="exact") as model:
        runner, grow = model.runner, model.runner._grow_states
        prompts = [[3 + i, 5, 7] for i in range(4)]
        alone = [generate(model, prompt, 8)[0] for prompt in prompts]
        rows = runner.states.rows
        monkeypatch.setattr(runner, "max_states", rows + 2)
        if memory:
            full = MemoryError("no memory")
            monkeypatch.setattr(runner, "_grow_states", lambda more: failing(full) if more > rows + 1 else grow(more))
        model.engine.configure(EngineOptions())
        model.engine.use_drafts(Drafts(_HalfRight([]), 2, measured=False))
        first, *others = (model.request(each, max_tokens=8, temperature=0, ignore_eos=True) for each in prompts)
        handles = [model.engine.submit(first)]
        assert next(iter(handles[0])) is not None
        handles += [model.engine.submit(each) for each in others]
        found = [handle.result() for handle in handles]
        assert [each.ids for each in found if each is not None] == alone
        assert memory or handles[0].drafted > 0
        assert runner.states.free == runner.states.rows <= rows + 2


class _HalfRight:
    """Drafts what comes, but every other token in turn is wrong."""

    def __init__(self, text: list[int]) -> None:
        self._text, self._turn = text, 0

    def chances(self, state: SequenceState, most: int) -> list[float]:
        return [0.5] * most

    def draft(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        drafts = []
        for state, count in wanted:
            self._turn += 1
            right = self._text[len(state.tokens) :][: min(count, self._turn % 7)]
            drafts.append([*right, *[1] * (count - len(right))])
        return drafts

    def seconds(self, longest: int) -> float:
        return 0.0

    def verified(self, state: SequenceState, drafted: int, accepted: int) -> None:
        pass

    def forget(self, state: SequenceState) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("shape", "tokens", "between"),
    [
        ("qwen3.5-4b", 1, ["short_conv_gated_delta_rule"]),
        ("qwen3.5-4b", 64, ["slice_short_conv", "slice_gated_delta_rule", "rms_norm_silu_mul"]),
        ("qwen3.5-35b-a3b", 1, ["short_conv_gated_delta_rule"]),
        ("lfm2-1.2b", 1, ["mul_short_conv_mul"]),
        ("lfm2-1.2b", 64, ["mul_short_conv_mul"]),
    ],
)
def test_what_lies_between_the_products_of_a_layer(shape: str, tokens: int, between: list[str]) -> None:
    """No slice is left, and one row needs one dispatch."""
    kind, config = config_of(*parse(shape))
    graph, _ = fuse(kind.build(config, StepSpec(tokens)))
    layer = [node.op for node in graph.nodes if node.layer == "blk.0"]
    assert layer[1 : 1 + len(between)] == between
    network = (
        ["linear", "route_experts", "linear_experts", "linear_experts"] if config.experts else ["linear", "linear"]
    )
    assert layer == ["linear", *between, "linear", *network]
    assert all(node.op != "slice" for node in graph.nodes)


def test_formats_that_differ_leave_one_dispatch_between_the_products() -> None:
    """As in llama.cpp's Q4_K_M: queries, keys and values are finer than gates and factors."""
    kind, config = config_of(*parse("qwen3.5-4b:q8_0"))
    finer = {name: "f16" if name.endswith("attn_qkv.weight") else form for name, form in config.formats.items()}
    graph, _ = fuse(kind.build(replace(config, formats=finer), StepSpec(1)))
    layer = [node.op for node in graph.nodes if node.layer == "blk.0"]
    assert layer == ["linear", "linear", "short_conv_gated_delta_rule", "linear", "linear", "linear"]


@pytest.mark.parametrize(
    "path",
    [pytest.param(name, marks=() if name == "mamba2" else pytest.mark.full) for name in MODELS],
    indirect=True,
    scope="module",
)
def test_a_prompt_leaves_snapshots_where_others_part_from_it(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near its end, if it is long, and where pages of another one end that are the same. Texts are those without."""
    words = [int(i) for i in np.random.default_rng(11).integers(0, model.config.vocabulary, 2 * PAGE + 40)]
    prompts = [words, [*words[: PAGE + 9], *words[: PAGE - 20]], [*words[: PAGE + 30], *words[50:70]]]
    alone = []
    for prompt in prompts:
        begin(model)
        alone.append(generate(model, prompt, 4)[0])
    for least, cached in ((8 * PAGE, [0, 0, PAGE]), (PAGE, [0, PAGE, PAGE])):
        monkeypatch.setattr("shaderlm.runtime.states._TOKENS_PER_STEP", least)
        begin(model)
        assert [generate(model, prompt, 4) for prompt in prompts] == list(zip(alone, cached, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_deterministic_answers_after_a_snapshot_near_the_end(device: str, tmp_path: Path) -> None:
    """Their log probabilities are those of the whole prompt, to the bit: chunks end where they do without the cache."""
    path = write_gguf(tmp_path / "long.gguf", recorded("qwen35"), {"qwen35.context_length": 12 * PAGE})
    with load_with(path, device=device, cache="f32", precision="exact", deterministic=True) as model:
        words = [int(i) for i in np.random.default_rng(12).integers(0, model.config.vocabulary, 12 * PAGE)]
        prompts = [words[: 9 * PAGE + 40], [*words[: 7 * PAGE + 5], *words[: 2 * PAGE]], [*words[: 7 * PAGE], 3, 4]]

        def answer(prompt: list[int], *, cached: bool) -> tuple[Any, int]:
            options: Any = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 5}
            handle = model.engine.submit(model.request(prompt, cache_prompt=cached, **options))
            found = handle.result()
            assert found is not None
            assert found.logprobs
            return (found.ids, found.logprobs), handle.usage.cached_tokens

        alone = [answer(prompt, cached=False)[0] for prompt in prompts]
        begin(model)
        found = [answer(prompt, cached=True) for prompt in prompts]
        assert [each[1] for each in found] == [0, 6 * PAGE, 6 * PAGE]
        assert [each[0] for each in found] == alone
