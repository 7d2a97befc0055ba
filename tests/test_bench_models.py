"""`shaderlm bench`: llama-bench's tests and formats, and synthetic models."""

from __future__ import annotations

import csv
import io
import json
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.speed import Result, Trial, deviation, mean, run
from shaderlm.engine.synthetic import MIXES, RandomWeights, config_of, load_synthetic, parse
from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.models.architecture import Step
from shaderlm.models.shapes import MODELS, ModelShape
from shaderlm.runtime.weights import buffer_sizes

from .command_line import shaderlm, start
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
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [("8", "0"), ("0", "4")]
    assert list(rows[0]) == list(lines[0])
    base = sqlite3.connect(":memory:")
    base.executescript(bench(tiny, "-p", 8, "-n", 4, "-o", "sql"))
    assert base.execute("SELECT n_prompt, n_gen FROM llama_bench").fetchall() == [(8, 0), (0, 4)]
    base.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-p", "8,x"), "must be whole numbers with commas"),
        (("-pg", "8"), "must be two numbers above 0"),
        (("-d", "125"), "the context holds 128"),
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


# Synthetic models ----------------------------------------------------------------------------------------

SMALL = ModelShape("small", 2, 256, 4, 2, 64, 512, 300, tied=False)


@pytest.mark.parametrize("mix", MIXES)
def test_synthetic_weights_are_of_the_size_of_real_ones(
    mix: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "small", SMALL)
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
