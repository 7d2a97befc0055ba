"""`shaderlm bench --save` and `--against`: files of rows, which rows are compared, and the verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shaderlm.bench import regression, speed, tables
from shaderlm.bench.speed import Trial
from shaderlm.errors import DeviceError, InputError
from shaderlm.files import check_writable

from .command_line import shaderlm, start
from .tiny_models import write_tiny_llama

PP8 = Trial(8, 0)
SUBJECT = {
    "build_commit": "abc",
    "build_number": "0.1",
    "backends": "Vulkan",
    "gpu_info": "Card",
    "driver": "driver 1",
    "model_filename": "/models/m.gguf",
    "model_type": "M Q4_0",
    "model_size": 100,
    "model_n_params": 50,
    "type_k": "f16",
    "type_v": "f16",
    "precision": "fast",
}


def record(per_second: float = 100.0, test: Trial = PP8, **changes: Any) -> dict[str, Any]:
    """A row of this speed."""
    ns = round(test.tokens * 1e9 / per_second)
    return tables.record(SUBJECT, test, (ns,), "2000-01-01T00:00:00+00:00") | changes


def rows(*records: dict[str, Any]) -> list[regression.Speed]:
    return regression.parse(json.dumps(records), "rows")


# What is compared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "percent", "verdict"),
    [
        (100.0, 100.0, 5, "same"),
        (100.0, 100.0, 0, "same"),
        (100.0, 96.0, 5, "same"),
        (100.0, 94.0, 5, "slower"),
        (100.0, 99.0, 0, "slower"),
        (100.0, 104.0, 5, "same"),
        (100.0, 106.0, 5, "faster"),
        (100.0, 2.0, 99, "same"),
        (100.0, 0.5, 99, "slower"),
    ],
)
def test_verdicts(before: float, now: float, percent: float, verdict: str) -> None:
    found = regression.compare(rows(record(before)), rows(record(now)), percent)
    (pair,) = found.pairs
    assert pair.ratio == pytest.approx(now / before)
    assert pair.verdict == verdict
    assert bool(found.slower) == (verdict == "slower")
    assert found.notes == (f"slower by more than {percent} %: {int(verdict == 'slower')} of 1",)


@given(
    st.floats(0.01, 1e6, allow_subnormal=False),
    st.floats(0.01, 1e6, allow_subnormal=False),
    st.floats(0, 99.9, allow_subnormal=False),
)
def test_a_row_is_slower_exactly_below_the_threshold(before: float, now: float, percent: float) -> None:
    found = regression.compare(rows(record(avg_ts=before)), rows(record(avg_ts=now)), percent)
    assert bool(found.slower) == (now < (1 - percent / 100) * before)
    assert not regression.compare(rows(record(avg_ts=now)), rows(record(avg_ts=now)), percent).slower


def test_rows_of_one_side_are_named_and_the_others_compared() -> None:
    tests = [Trial(8, 0), Trial(0, 4), Trial(8, 0, 16), Trial(8, 0, 0, True)]
    found = regression.compare(
        rows(*(record(test=test) for test in tests[:3])), rows(*(record(test=test) for test in (tests[3], tests[0]))), 5
    )
    assert [pair.row.test for pair in found.pairs] == [tests[0]]
    assert found.notes[:2] == (
        "saved, but not measured now: tg4, pp8 @ d16 of M Q4_0 (m.gguf) on Card (Vulkan, cache f16, fast)",
        "measured now, but not saved: pp8 +text of M Q4_0 (m.gguf) on Card (Vulkan, cache f16, fast)",
    )


def test_a_row_that_is_there_twice_counts_by_its_mean() -> None:
    found = regression.compare(rows(record(80), record(120)), rows(record(99)), 5)
    assert [pair.before for pair in found.pairs] == pytest.approx([100])
    assert not found.slower


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_info": "Other"}, "device 'Other' → 'Card'; speeds of two devices say nothing about a regression"),
        ({"backends": "Metal"}, "backend 'Metal' → 'Vulkan'"),
        ({"model_type": "N Q4_0"}, "model 'N Q4_0' → 'M Q4_0'"),
        ({"model_filename": "/models/n.gguf"}, "file 'n.gguf' → 'm.gguf'"),
        ({"type_k": "f32", "type_v": "f32"}, "cache 'f32' → 'f16'"),
        ({"type_k": "f32"}, "cache 'f32/f16' → 'f16'"),
        ({"n_prompt": 9}, "tests 'pp9' → 'pp8'"),
        ({"n_gen": 1}, "tests 'pp8+tg1' → 'pp8'"),
        ({"n_depth": 1}, "tests 'pp8 @ d1' → 'pp8'"),
        ({"with_text": True}, "tests 'pp8 +text' → 'pp8'"),
        ({"n_parallel": 4}, "tests 'pp8 × 4' → 'pp8'"),
        ({"model_n_params": 51}, "each part is in both"),
    ],
)
def test_a_guard_that_compares_nothing_does_not_pass(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=r"nothing was compared.*--save") as problem:
        regression.compare(rows(record(**changes)), rows(record()), 5)
    assert words in str(problem.value)


def test_what_does_not_keep_rows_apart() -> None:
    """The folder, the size and all that a change of the software may change; the latter is told in one line."""
    same: dict[str, Any] = {"model_filename": "C:\\elsewhere\\m.gguf", "model_size": 7, "test_time": "later"}
    (line,) = regression.compare(rows(record(**same)), rows(record()), 5).notes
    assert line.startswith("slower by")
    changed: dict[str, Any] = {"driver": "driver 0", "build_number": 4711, "build_commit": "def"}
    notes = regression.compare(rows(record(**changed)), rows(record()), 5).notes
    assert notes[0].startswith(
        "since then: driver 'driver 0' → 'driver 1', version '4711' → '0.1', commit 'def' → 'abc'"
    )
    assert "no regression of this package" in notes[0]
    (note, _) = regression.compare(rows(record(build_commit="def")), rows(record()), 5).notes
    assert note == "since then: commit 'def' → 'abc'"
    notes = regression.compare(rows(record(), record(gpu_info="Other")), rows(record()), 5).notes
    assert "device 'Card', 'Other' → 'Card'; rows are compared on the same device only" in notes[1]


# Files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("9" * 5000, "is not JSON|must be a JSON list"),
        ("{}", "must be a JSON list of objects"),
        ("[[]]", "must be a JSON list of objects"),
        ("[]", "has no rows"),
        ("[{}]", "row 1 has no 'model_type'"),
        (json.dumps([record(), record(avg_ts=0)]), "row 2: avg_ts must be above 0, got 0"),
        (json.dumps([record(avg_ts=float("nan"))]), "NaN is no speed"),
        (json.dumps([record(stddev_ts=float("-inf"))]), "-Infinity is no speed"),
        (json.dumps([record()]).replace('"avg_ts": 1', '"avg_ts": 1e999, "x": 1'), "avg_ts must be above 0, got inf"),
        (json.dumps([record(avg_ts=True)]), "avg_ts must be above 0, got True"),
        (json.dumps([record(avg_ts=10**400)]), "avg_ts must be above 0"),
        (json.dumps([record(n_prompt=-1)]), "n_prompt must be a whole number of at least 0, got -1"),
        (json.dumps([record(n_parallel=0)]), "n_parallel must be a whole number of at least 1, got 0"),
        (json.dumps([record(n_gen=1.5)]), "n_gen must be a whole number"),
        (json.dumps([record(n_prompt=0)]), "n_prompt or n_gen must be above 0"),
        (json.dumps([record(with_text="yes")]), "with_text must be true or false"),
        (json.dumps([record(gpu_info=None)]), "gpu_info must be text, got None"),
    ],
)
def test_files_that_are_wrong(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words) as problem:
        regression.read(path)
    assert "\n" not in str(problem.value)
    assert str(path) in str(problem.value)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(record())), _VALUES)
def test_a_wrong_value_is_an_input_error_or_a_usable_row(key: str, value: Any) -> None:
    try:
        (row,) = rows(record(**{key: value}))
    except InputError:
        return
    assert regression.compare([row], [row], 0).pairs[0].ratio == 1


@given(st.text() | st.binary().map(lambda raw: raw.decode(errors="replace")) | _VALUES.map(json.dumps))
def test_any_other_text_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError):
        regression.parse(text, "rows")


def test_rows_of_llama_bench_can_be_read() -> None:
    theirs = {
        "build_commit": "1234abcd", "build_number": 6000, "cpu_info": "CPU", "gpu_info": "Card", "backends": "CUDA",
        "model_filename": "models/m.gguf", "model_type": "qwen2 7B Q4_K - Medium", "model_size": 4000000000,
        "model_n_params": 7000000000, "n_batch": 2048, "type_k": "f16", "type_v": "f16", "n_prompt": 512, "n_gen": 0,
        "n_depth": 0, "test_time": "2026-01-01T00:00:00Z", "avg_ns": 80000000, "stddev_ns": 0,
        "avg_ts": 6400.0, "stddev_ts": 0.0, "samples_ns": [80000000, 80000000], "samples_ts": [6400.0, 6400.0],
    }  # fmt: skip
    (row,) = rows(theirs)
    assert (row.key.test, row.tokens_per_second, row.version) == (Trial(512, 0), 6400.0, "6000")
    with pytest.raises(InputError, match=r"model 'qwen2 7B Q4_K - Medium' → 'M Q4_0'"):
        regression.compare([row], rows(record()), 5)


def test_saving_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    regression.save(path, [record()])
    assert regression.read(path) == rows(record())
    with pytest.raises(ValueError, match="not JSON compliant"):
        regression.save(path, [record(avg_ts=float("nan"))])
    assert regression.read(path) == rows(record())
    link = tmp_path / "link.json"
    link.symlink_to(path)
    regression.save(link, [record(50)])
    assert link.is_symlink()
    assert regression.read(path) == rows(record(50))
    assert sorted(os.listdir(tmp_path)) == ["link.json", "rows.json"]


def test_places_that_cannot_be_written_are_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new.json")
    assert not os.listdir(tmp_path)
    for wrong in (tmp_path, tmp_path / "none" / "rows.json", Path(os.devnull)):
        with pytest.raises(InputError, match="cannot write"):
            check_writable(wrong)
    regression.save(tmp_path / "old.json", [record()])
    check_writable(tmp_path / "old.json")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(InputError, match="permission denied"):
        check_writable(tmp_path / "old.json")


# The command -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0")


def edited(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps([row | change(row) for row in json.loads(path.read_text())]))


def test_save_then_against(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = ("bench", "-m", tiny, "--device", "cpu", "-p", "8", "-n", "4", "-r", 3)
    saved = shaderlm(*command, "-o", "json", "--save", path)
    assert (saved.code, json.loads(saved.out)) == (0, json.loads(path.read_text()))
    path.write_text(saved.out)  # what was redirected is as good as what was saved
    done = shaderlm(*command, "--against", path, "--threshold", 90)
    assert (done.code, done.err) == (0, "")
    results, compared = done.out.split("\n\n")[:2]
    assert len(results.splitlines()) == 4
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in compared.splitlines()]
    assert cells[0][3:] == ["test", "before t/s", "now t/s", "ratio", "verdict"]
    assert [row[3] for row in cells[2:]] == ["pp8", "tg4"]
    assert all(0.1 < float(row[6]) < 10 for row in cells[2:])
    assert done.out.endswith("slower by more than 90 %: 0 of 2\n")


def test_a_slower_run_exits_with_1_and_programs_read_on(tiny: Path, tmp_path: Path) -> None:
    """Both options with one file: the old rows are compared, then the new ones are there."""
    path = tmp_path / "rows.json"
    command = ("bench", "-m", tiny, "--device", "cpu", "-p", "8", "-n", "4", "-o", "json", "--save", path)
    assert shaderlm(*command).code == 0
    edited(path, lambda row: {"avg_ts": row["avg_ts"] * (1000 if row["n_gen"] else 1), "build_commit": "older"})
    done = shaderlm(*command, "--against", path, "--threshold", 90)
    assert done.code == 1
    assert json.loads(done.out) == json.loads(path.read_text())
    assert re.search(
        r"tg4 \|.*\| +slower \|\n\nsince then: commit 'older' → .*\nslower by more than 90 %: 1 of 2", done.err
    )
    edited(path, lambda row: {"gpu_info": "Another"})
    done = shaderlm(*command, "--against", path)
    assert done.code == 2
    assert done.err.startswith("shaderlm: nothing was compared, no saved row is of what was measured: device 'Another'")
    assert done.err.count("\n") == 1


@pytest.mark.full
def test_with_text_on_an_adapter(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = ("bench", "-m", tiny, "--device", "0", "-p", "8", "-n", "4", "-d", "0,3", "-r", 2, "--with-text")
    assert shaderlm(*command, "--save", path).code == 0
    assert [row["with_text"] for row in json.loads(path.read_text())] == [True] * 4
    done = shaderlm(*command, "--against", path, "--threshold", "95")
    assert done.code == 0
    assert done.out.count("tg4 @ d3 +text |") == 2
    done = shaderlm(*command[:-1], "--against", path)
    assert (done.code, "tests 'pp8 +text', 'tg4 +text'" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--against", "{}/none.json"), "cannot read"),
        (("--against", "{}/broken.json"), "is not JSON"),
        (("--save", "{}/none/rows.json"), "cannot write"),
        (("--save", "{}"), "it is not a file"),
        (("--threshold", "3"), "give that too"),
        (("--against", "{}/broken.json", "--threshold", "nan"), "nan must be at least 0 and below 100"),
        (("--against", "{}/broken.json", "--threshold", "100"), "100 must be at least 0 and below 100"),
        (("-m", "synthetic:smollm2-135m", "--with-text"), "synthetic:smollm2-135m has no tokenizer"),
    ],
)
def test_mistakes_are_told_before_a_model_is_looked_for(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('[{"model_type": "M')
    filled = (argument.format(tmp_path) for argument in arguments)
    done = shaderlm("bench", "-m", "/nowhere/none.gguf", *filled)
    assert (done.code, done.out) == (2, "")
    assert words in done.err.splitlines()[-1]
    assert os.listdir(tmp_path) == ["broken.json"]


def test_nothing_is_saved_where_nothing_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("kept")
    assert shaderlm("bench", "-m", "/nowhere/none.gguf", "--device", "cpu", "--save", path).code == 1
    assert path.read_text() == "kept"


def test_rows_before_an_error_are_saved_and_whole(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    real = speed.run

    def run(runner: Any, test: Trial, *rest: Any) -> Iterator[tuple[int, ...]]:
        if test.generated:
            raise DeviceError("the device is lost")
        return real(runner, test, *rest)

    monkeypatch.setattr(speed, "run", run)
    done = shaderlm("bench", "-m", tiny, "--device", "cpu", "-p", 8, "-n", 4, "-o", "json", "--save", path)
    assert (done.code, done.err) == (1, "shaderlm: the device is lost\n")
    assert [row["n_prompt"] for row in json.loads(done.out)] == [8]
    assert json.loads(done.out) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (("-m", "/nowhere/none.gguf"), 1, "/nowhere/none.gguf does not exist"),
        (("--device", "unobtainium"), 1, "no adapter matches 'unobtainium'"),
    ],
)
def test_a_second_model_or_device_that_is_not_there_is_known_before_the_first_is_measured(
    wrong: tuple[str, ...], code: int, words: str, tiny: Path
) -> None:
    done = shaderlm("bench", "-m", tiny, "--device", "cpu", "-p", 8, "-n", 0, *wrong)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


def test_ctrl_c_saves_what_there_is(tiny: Path, tmp_path: Path) -> None:
    path, base = tmp_path / "rows.json", tmp_path / "base.json"
    regression.save(base, [record()])
    tests = ("-p", "8", "-n", "100", "-r", "1000", "-o", "jsonl")
    child = start("bench", "-m", tiny, "--device", "cpu", *tests, "--save", path, "--against", base)
    assert child.stdout
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    try:
        out, err = child.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        child.kill()
        raise
    assert child.returncode == 130
    assert err == "interrupted; what was measured is above, nothing was compared\n"
    assert json.loads(path.read_text()) == [json.loads(line) for line in (first + out).splitlines()]
    assert regression.read(path)[0].key.test == Trial(8, 0)
    assert sorted(os.listdir(tmp_path)) == ["base.json", "rows.json"]
