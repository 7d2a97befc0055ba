"""`shaderlm bench`: llama-bench's tests and formats, several sequences, and text."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.speed import Trial, random_text, run
from shaderlm.bench.tables import printed, record
from shaderlm.engine import load
from shaderlm.engine.tokenizer import Tokenizer
from shaderlm.errors import InputError
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.runner import SequenceChunk

from .command_line import shaderlm, start
from .tiny_models import write_tiny_llama

KEYS = [
    "build_commit",
    "build_number",
    "backends",
    "gpu_info",
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "n_prompt",
    "n_gen",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "samples_ns",
    "samples_ts",
    "driver",
    "with_text",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0")


def bench(tiny: Path, *more: object) -> str:
    done = shaderlm("bench", "-m", tiny, "--device", "cpu", "-r", 3, *more)
    assert (done.code, done.err) == (0, "")
    return done.out


def test_rows_for_programs(tiny: Path) -> None:
    rows = json.loads(bench(tiny, "-p", "8,16", "-n", "4", "-pg", "6,3", "-d", "0,20", "-o", "json"))
    shapes = [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows]
    assert shapes == [(p, n, d) for d in (0, 20) for p, n in ((8, 0), (16, 0), (0, 4), (6, 3))]
    for row in rows:
        assert set(KEYS) <= set(row)
        tokens = row["n_prompt"] + row["n_gen"]
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 3
        assert row["samples_ts"] == pytest.approx([tokens * 1e9 / ns for ns in row["samples_ns"]])
        assert row["avg_ts"] == pytest.approx(np.mean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(np.std(row["samples_ts"], ddof=1))
        assert row["avg_ns"] == pytest.approx(np.mean(row["samples_ns"]), abs=1)
        assert (row["backends"], row["gpu_info"], row["model_filename"]) == ("CPU", "cpu (LLVM)", str(tiny))


def test_every_format_says_the_same(tiny: Path) -> None:
    names = ["pp8", "tg4"]
    table = bench(tiny, "-p", 8, "-n", 4).splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == [
        "model", "size", "params", "backend", "device", "test", "t/s",
    ]  # fmt: skip
    assert [line.split("|")[6].strip() for line in table[2:]] == names
    lines = [json.loads(line) for line in bench(tiny, "-p", 8, "-n", 4, "-o", "jsonl").splitlines()]
    assert [(line["n_prompt"], line["n_gen"]) for line in lines] == [(8, 0), (0, 4)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-p", "8,x"), "must be whole numbers with commas"),
        (("-pg", "8"), "must be two numbers above 0"),
        (("-d", "125"), "the context holds 128"),
        (("-p", "0", "-n", "128"), "tg128 needs 129 positions"),
        (("-m", "synthetic:llama-3.2-2b:q4_0"), "Did you mean 'llama-3.2-1b'?"),
        (("-m", "synthetic:smollm2-135m:q4_2"), "no synthetic format 'q4_2'. Did you mean 'q4_0'?"),
        (("--parallel", "0,2"), "--parallel counts sequences: numbers above 0, got 0,2"),
        (("-p", "0", "-n", "4", "--parallel", "257"), "a step samples for at most 256 sequences at once"),
        (("--parallel", "2", "--with-text"), "--with-text times one sequence"),
        (("--parallel", "2", "-n", "0"), "--parallel is for generated tokens, and -n is 0"),
        (("-m", "synthetic:smollm2-135m", "-m", "synthetic:nope"), "no synthetic model 'nope'"),
        (("-p", "8", "kernels"), "say nothing to `bench kernels`"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str, tiny: Path) -> None:
    named = () if "-m" in arguments else ("-m", tiny)
    done = shaderlm("bench", *named, *(() if "kernels" in arguments else ("--device", "cpu")), *arguments)
    assert done.code == 2
    assert words in done.err
    assert done.out == ""


def test_ctrl_c_prints_what_there_is(tiny: Path) -> None:
    child = start("bench", "-m", tiny, "--device", "cpu", "-p", "8", "-n", "100", "-r", "1000", "-o", "jsonl")
    assert child.stdout
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    try:
        out, err = child.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        child.kill()
        raise
    rows = [json.loads(line) for line in (first + out).splitlines()]
    assert rows[0]["n_prompt"] == 8
    assert len(rows) <= 2
    assert child.returncode == 130
    assert b"interrupted" in (err if isinstance(err, bytes) else err.encode())


def test_long_names_stay_inside_their_columns() -> None:
    long = "A Model With A Very Long Name Instruct 8B Q4_K"
    subject = {"model_type": long, "model_size": 1, "model_n_params": 1, "backends": "Vulkan", "gpu_info": "D" * 30}
    row = record(subject, Trial(8, 0), (1,), "now")
    (head, rule, line) = printed("md", row, 0).splitlines()
    assert len(head) == len(rule) == len(line)
    model, *_ = (cell.strip() for cell in line.strip("|").split("|"))
    assert model.startswith("A Model With")
    assert model.endswith("… 8B Q4_K"[1:])
    assert json.loads(printed("jsonl", row, 0))["model_type"] == long


def test_statistics() -> None:
    row = record({}, Trial(10, 0), (1_000_000_000, 2_000_000_000), "now")
    assert row["samples_ts"] == [10.0, 5.0]
    assert (row["avg_ns"], row["avg_ts"]) == (1_500_000_000, 7.5)
    assert row["stddev_ts"] == pytest.approx(np.std([10, 5], ddof=1))
    assert record({}, Trial(10, 0), (7,), "now")["stddev_ts"] == 0.0
    assert Trial(512, 128, 4096).name == "pp512+tg128 @ d4096"
    assert Trial(512, 0, 0, text=True).name == "pp512 +text"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[SequenceChunk]]:
    """What NumPy runs, as it runs it; with the lengths that sequences had."""
    steps: list[list[SequenceChunk]] = []
    real = NumpyRunner.step

    def spy(self: NumpyRunner, parts: Any) -> Any:
        steps.append([part._replace(sequence=copy.copy(part.sequence)) for part in parts])
        return real(self, parts)

    monkeypatch.setattr(NumpyRunner, "step", spy)
    return steps


@pytest.mark.parametrize(
    ("test", "runs"),
    [
        (Trial(8, 0, 0), [(0, 8)]),
        (Trial(8, 0, 5), [(5, 8)]),
        (Trial(6, 3, 5), [(5, 6), (11, 1), (12, 1), (13, 1)]),
        (Trial(0, 3, 5), [(4, 1), (5, 1), (6, 1), (7, 1)]),
        (Trial(0, 3, 0), [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (Trial(0, 3, 125), [(124, 1), (125, 1), (126, 1), (127, 1)]),
    ],
    ids=lambda value: value.name if isinstance(value, Trial) else "",
)
def test_what_is_run_at_a_depth(
    test: Trial, runs: list[tuple[int, int]], tiny: Path, steps: list[list[SequenceChunk]]
) -> None:
    """Every repetition begins at the depth. Without a prompt, a token to go on from is generated first."""
    with load(tiny, device="cpu") as model:
        results = list(run(model, test, 2, warmup=False))
        assert model.engine.stats().pages_used == 0
    assert [len(samples) for samples in results] == [1, 2]
    found = [(part.sequence.length, part.rows) for (part,) in steps]
    assert found == ([(0, test.depth)] * (test.depth > 0) + runs) * 2


# Several sequences ---------------------------------------------------------------------------------------


def test_parallel_sequences_are_counted_together(tiny: Path) -> None:
    rows = json.loads(bench(tiny, "-p", 8, "-n", 4, "-pg", "6,3", "-d", "0,5", "--parallel", "1,3", "-o", "json"))
    shapes = [(row["n_prompt"], row["n_gen"], row["n_depth"], row["n_parallel"]) for row in rows]
    assert shapes == [(p, n, d, b) for d in (0, 5) for p, n, b in ((8, 0, 1), (0, 4, 1), (0, 4, 3), (6, 3, 1))]
    for row in rows:
        tokens = row["n_parallel"] * (row["n_prompt"] + row["n_gen"])
        assert row["samples_ts"] == pytest.approx([tokens * 1e9 / ns for ns in row["samples_ns"]])


def test_the_table_has_a_column_for_parallel_sequences_where_they_are_asked_for(tiny: Path) -> None:
    lines = bench(tiny, "-p", 0, "-n", 4, "--parallel", "1,2").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][5:7] == ["parallel", "test"]
    assert [row[5:7] for row in cells[2:]] == [["1", "tg4"], ["2", "tg4"]]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("depth", [0, 5, 70])
def test_parallel_sequences_are_all_run_from_their_depth(
    depth: int, tiny: Path, steps: list[list[SequenceChunk]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three repetitions, of which the first warms up: in each, all sequences start in one step."""
    monkeypatch.setattr(NumpyRunner, "max_tokens", 64)
    with load(tiny, device="cpu") as model:
        results = list(run(model, Trial(0, 4, depth, parallel=3), 2))
        assert model.engine.stats().pages_used == 0
    assert [len(samples) for samples in results] == [0, 1, 2]
    assert Trial(0, 4, depth, parallel=3).name == "tg4" + (f" @ d{depth}" if depth else "") + " × 3"
    found = [[(part.sequence.length, part.rows, part.gives) for part in step] for step in steps]
    first = max(0, depth - 1)
    timed = [[(first + i, 1, "token")] * 3 for i in range(5)]
    ends = [i for i, step in enumerate(found, 1) if step == timed[-1]]
    assert [found[end - 5 : end] for end in ends] == [timed] * 3
    cached = sum(part.rows for step in steps for part in step) - 3 * 15
    assert cached == (3 * depth + 2 * 3 if depth else 0), "prefixes are computed once, but for their last tokens"


# Text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "runs"),
    [
        (Trial(8, 0, 0, True), [8]),
        (Trial(8, 0, 5, True), [8]),
        (Trial(6, 3, 5, True), [6, 1, 1, 1]),
        (Trial(0, 4, 5, True), [1, 1, 1, 1]),
        (Trial(0, 4, 0, True), [1, 1, 1, 1]),
        (Trial(128, 0, 0, True), [128]),
        (Trial(0, 3, 125, True), [1, 1, 1]),
    ],
    ids=lambda value: value.name if isinstance(value, Trial) else "",
)
@pytest.mark.parametrize("bos", [False, True])
def test_text_is_timed_over_as_many_steps(
    test: Trial, runs: list[int], bos: bool, tmp_path: Path, steps: list[list[SequenceChunk]]
) -> None:
    """A repetition runs as many tokens as one without text, samples them, and begins with BOS where a prompt does."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.add_bos_token": bos})
    with load(path, device="cpu") as model:
        (*_, samples) = run(model, test, 2, warmup=False)
        starts = model.tokenizer.vocabulary.bos
    assert len(samples) == 2
    parts = [part for (part,) in steps]
    assert [part.rows for part in parts] == ([test.depth] * (test.depth > 0) + runs) * 2
    parts = parts[len(parts) // 2 + (test.depth > 0) :]  # of the second repetition
    assert all(part.gives == "token" and not part.settings.greedy for part in parts)
    assert parts[0].ids is not None
    assert bool(bos and test.prompt) == (parts[0].ids[0] == starts)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 500])
def test_a_random_text_has_the_tokens_and_hardly_more(count: int, tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(tiny)
    texts = {random_text(np.random.default_rng(seed), tokenizer, count) for seed in range(20)}
    assert len(texts) > 1
    assert all(count <= len(tokenizer.encode(text)) <= count + 3 for text in texts)


def test_a_vocabulary_without_text_cannot_make_a_prompt(tiny: Path) -> None:
    class Mute(Tokenizer):
        def decode(self, ids: Any, *, skip_special: bool = False, clean_spaces: bool = False) -> str:
            return ""

    with pytest.raises(InputError, match="no text of 8 tokens was found"):
        random_text(np.random.default_rng(0), Mute.from_file(tiny), 8)
