"""`shaderlm bench`: llama-bench's tests and formats, and synthetic models."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import sqlite3
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.bench import speed
from shaderlm.bench.speed import Result, Trial, deviation, mean, random_text, run
from shaderlm.engine import load
from shaderlm.engine.synthetic import MIXES, RandomWeights, config_of, load_synthetic, parse
from shaderlm.engine.tokenizer import Tokenizer
from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.models.architecture import Step
from shaderlm.models.shapes import MODELS, SYNTHETIC, ModelShape
from shaderlm.runtime.interpreter import _Session
from shaderlm.runtime.weights import buffer_sizes

from .command_line import Recorder, shaderlm, start
from .test_plan import LARGE_GPU
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
        assert (row["backends"], row["gpu_info"], row["model_filename"]) == ("CPU", "NumPy", str(tiny))


def test_every_format_says_the_same(tiny: Path) -> None:
    names = ["pp8", "tg4"]
    table = bench(tiny, "-p", 8, "-n", 4).splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == [
        "model", "size", "params", "backend", "device", "test", "t/s",
    ]  # fmt: skip
    assert [line.split("|")[6].strip() for line in table[2:]] == names
    lines = [json.loads(line) for line in bench(tiny, "-p", 8, "-n", 4, "-o", "jsonl").splitlines()]
    assert [(line["n_prompt"], line["n_gen"]) for line in lines] == [(8, 0), (0, 4)]
    rows = list(csv.DictReader(io.StringIO(bench(tiny, "-p", 8, "-n", 4, "-o", "csv"))))
    assert [(row["n_prompt"], row["n_gen"], row["with_text"]) for row in rows] == [("8", "0", "0"), ("0", "4", "0")]
    assert list(rows[0]) == list(lines[0])
    base = sqlite3.connect(":memory:")
    base.executescript(bench(tiny, "-p", 8, "-n", 4, "-o", "sql"))
    assert base.execute("SELECT n_prompt, n_gen, with_text FROM llama_bench").fetchall() == [(8, 0, 0), (0, 4, 0)]
    base.close()


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


def test_statistics() -> None:
    result = Result(Trial(10, 0), (1_000_000_000, 2_000_000_000))
    assert result.samples_ts == (10.0, 5.0)
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert deviation([1.0, 2.0, 6.0]) == pytest.approx(np.std([1, 2, 6], ddof=1))
    assert deviation([4.0]) == 0.0
    assert Trial(512, 128, 4096).name == "pp512+tg128 @ d4096"
    assert Trial(512, 0, 0, text=True).name == "pp512 +text"


class Watched:
    """A session that writes down what it is asked to do."""

    def __init__(self) -> None:
        self.length, self.ahead, self.said = 0, 2, list[Any]()

    def rewind(self, length: int) -> None:
        self.length = length

    def feed(self, ids: list[int]) -> None:
        self.length += len(ids)
        self.said.append(("feed", len(ids), self.length))

    def choose(self, choice: None) -> Watched:
        return self

    def advance(self, choice: None) -> Watched:
        self.length += 1
        return self

    def wait(self) -> int:
        self.said.append(("wait", self.length))
        return 0

    def close(self) -> None:
        self.said.append("closed")


def test_what_is_run_at_a_depth() -> None:
    """Every repetition begins at the depth, tokens are waited for with two under way, and the session is closed."""

    class Runner:
        config = type("Config", (), {"vocabulary": 100, "context": 1000})

        def __init__(self) -> None:
            self.watched = Watched()

        def session(self) -> Watched:
            return self.watched

    runner: Any = Runner()
    results = list(run(runner, Trial(0, 4, 10), 2, warmup=False))
    assert [len(result.samples_ns) for result in results] == [1, 2]
    once = [("feed", 1, 10), ("wait", 10), ("wait", 13), ("wait", 14), ("wait", 14), ("wait", 14)]
    assert runner.watched.said == [("feed", 10, 10), *once, *once, "closed"]


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
    test: Trial, runs: list[int], bos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repetition runs as many tokens as one without text, samples them, and begins with BOS where a prompt does."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.add_bos_token": bos})
    fed: list[list[int]] = []
    choices = []
    real_run, real_choose = _Session._run, _Session.choose

    def spy_run(self: _Session, ids: Any, *, last: bool) -> None:
        fed.append(ids.tolist())
        real_run(self, ids, last=last)

    def spy_choose(self: _Session, choice: Any) -> Any:
        choices.append(choice)
        return real_choose(self, choice)

    monkeypatch.setattr(_Session, "_run", spy_run)
    monkeypatch.setattr(_Session, "choose", spy_choose)
    with load(path, device="cpu") as model:
        (*_, result) = run(model.runner, test, 2, warmup=False, model=model)
        starts = model.tokenizer.vocabulary.bos
    assert len(result.samples_ns) == 2
    assert [len(ids) for ids in fed] == [test.depth] * (test.depth > 0) + runs * 2
    assert len(choices) == 2 * len(runs)
    assert all(choice is not None for choice in choices)
    first = fed[1 if test.depth else 0]
    assert bool(bos and test.prompt) == (first[0] == starts)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 500])
def test_a_random_text_has_the_tokens_and_hardly_more(count: int, tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(tiny)
    texts = {random_text(np.random.default_rng(seed), tokenizer, count) for seed in range(20)}
    assert len(texts) > 1
    assert all(count <= len(tokenizer.encode(text)) <= count + 3 for text in texts)


def test_a_vocabulary_without_text_cannot_make_a_prompt(tiny: Path) -> None:
    class Mute(Tokenizer):
        def decode(self, ids: Any) -> str:
            return ""

    with pytest.raises(InputError, match="no text of 8 tokens was found"):
        random_text(np.random.default_rng(0), Mute.from_file(tiny), 8)


# The bar -------------------------------------------------------------------------------------------------


def test_the_bar_is_on_a_terminals_standard_error_only(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    drawing: set[str] = set()
    done = Recorder()
    real = speed._once

    def watched(*arguments: Any) -> int:
        for thread in set(threading.enumerate()) - before:
            thread.join(1)  # that of the bar of loading has been told to end
            drawing.update([thread.name] * thread.is_alive())
        return real(*arguments)

    before = set(threading.enumerate())
    monkeypatch.setattr(speed, "_once", watched)
    command = ("bench", "-m", tiny, "--device", "cpu", "-p", "8", "-n", "4", "-r", "3", "-o", "jsonl")
    ended = shaderlm(*command, out=done)
    assert [json.loads(line)["n_prompt"] for line in done.text().splitlines()] == [8, 0]
    said = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", ended.err)
    assert re.search(r"pp8 \S+ +3/6 \d:\d\d:\d\d", said)
    assert re.search(r"tg4 \S+ +6/6 \d:\d\d:\d\d", said)
    assert not drawing, "threads that draw while something is timed"


# Synthetic models ----------------------------------------------------------------------------------------

SMALL = ModelShape("small", 2, 256, 4, 2, 64, 512, 300, tied=False)


@pytest.mark.parametrize("mix", MIXES)
def test_synthetic_weights_are_of_the_size_of_real_ones(
    mix: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYNTHETIC, "small", SMALL)
    runner, report = load_synthetic(f"synthetic:small:{mix}", device)
    try:
        session = runner.session()
        session.feed(list(range(20)))
        logits = session.logits()
        assert np.isfinite(logits).all()
        assert 0.1 < logits.std() < 10
        session.close()
        assert report.parameters == sum(int(np.prod(size)) for size in runner.config.shapes.values())
    finally:
        runner.close()


@pytest.mark.parametrize(("name", "mix", "gigabytes"), [("llama-3.2-1b", "q4_0", 0.83), ("llama-3.1-8b", "q4_0", 5.04)])
def test_synthetic_models_are_as_large_as_they_should_be(name: str, mix: str, gigabytes: float) -> None:
    kind, config = config_of(*parse(f"synthetic:{name}:{mix}"))
    graph = kind.build(config, Step(1, 1))
    assert sum(buffer_sizes(graph, LARGE_GPU).values()) / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_a_mix_has_finer_layers() -> None:
    _, config = config_of(MODELS["llama-3.1-8b"], "q4_k_m")
    finer = sum(config.formats[f"blk.{i}.attn_v.weight"] == "q6_k" for i in range(32))
    assert finer == 16
    assert config.formats["blk.0.attn_q.weight"] == "q4_k"
    assert config.formats["output.weight"] == "q6_k"


def test_random_rows_are_cut_to_size() -> None:
    _, config = config_of(MODELS["smollm2-135m"], "q4_0")
    source = RandomWeights(config)
    rows = source.rows("blk.3.ffn_up.weight", "q4_0", 10, 20)
    assert rows.shape == (10, 576 // 32 * 18)
    with pytest.raises(InputError, match="no synthetic model 'nope'"):
        parse("synthetic:nope")
