"""The file that keeps a device's tuning: whole or not at all, ignored with one line where it is of no use."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shaderlm import kernels
from shaderlm.compile import tuning
from shaderlm.compile.tuning import Entry, kernels_version, path_of, read, save
from shaderlm.gpu import backends

from .timed_devices import TIMED_GPU

KEY = "linear tokens=1 K=2048 N=8192 format=q4_0 bias=False"
FOUND = Entry("gemv/128x32x2", "gemv_int16", {"gemv/128x32x2": 4.0, "gemv_int16": 5.0, "gemv": 4.5}, True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was said so far."""
    with caplog.at_level(logging.INFO, "shaderlm"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_the_file_is_for_people_and_merges(cache: Path, lines: Any) -> None:
    assert read(TIMED_GPU).entries == {}
    path = save(TIMED_GPU, {("fast", KEY): FOUND})
    assert path == cache / "tuning" / "timed-gpu-1-vulkan.json"
    other = replace(FOUND, winner="gemv", built_in="gemv")
    save(TIMED_GPU, {("exact", KEY): other})
    assert read(TIMED_GPU).entries == {("fast", KEY): FOUND, ("exact", KEY): other}
    text = path.read_text(encoding="utf-8")
    assert json.loads(text)["entries"]["fast"][KEY]["winner"] == "gemv/128x32x2"
    assert '\n "kernels": "' in text, "a line each"
    assert os.listdir(path.parent) == [path.name]
    assert lines() == []


def _changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {**record, **changes}


def _entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(record: dict[str, Any]) -> Any:
        record["entries"]["fast"][KEY] |= changes
        return record

    return change


USELESS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other kernels": (_changed(kernels="0" * 12), "it is stale, kernels is '000000000000' there and "),
    "another device": (_changed(device="Timed GPU 2"), "it is stale, device is 'Timed GPU 2' there"),
    "another driver": (_changed(driver="driver 2"), "it is stale, driver is 'driver 2' there and 'driver 1' here"),
    "another format": (_changed(format=[]), "it is stale, format is '[]' there"),
    "a list": (lambda record: [record], "it is damaged"),
    "a number": (lambda record: 7, "it is damaged"),
    "no entries": (_changed(entries=None), "it is damaged"),
    "entries of a wrong type": (_changed(entries={"fast": [KEY]}), "it is damaged"),
    "an entry of a wrong type": (_changed(entries={"fast": {KEY: "gemv"}}), "is damaged"),
    "no winner": (_entry(winner=None), "is damaged"),
    "a winner of a wrong type": (_entry(winner=["gemv"]), "is damaged"),
    "a winner that was not timed": (_entry(winner="gemv/256x32x2"), "is damaged"),
    "a word for a time": (_entry(microseconds={"gemv/128x32x2": "4", "gemv_int16": 5}), "is damaged"),
    "times below zero": (_entry(microseconds={"gemv/128x32x2": -4, "gemv_int16": 5}), "is damaged"),
    "endless times": (_entry(microseconds={"gemv/128x32x2": float("inf"), "gemv_int16": 5}), "is damaged"),
    "huge times": (_entry(microseconds={"gemv/128x32x2": 10**400, "gemv_int16": 5}), "is damaged"),
    "no number": (_entry(microseconds={"gemv/128x32x2": float("nan"), "gemv_int16": 5}), "is damaged"),
    "a truth for a time": (_entry(microseconds={"gemv/128x32x2": True, "gemv_int16": 5}), "is damaged"),
    "an unknown route": (
        _entry(winner="gemm", microseconds={"gemm": 4.0, "gemv_int16": 5.0}),
        "names a route that there is not, 'gemm'",
    ),
    "an unknown op": (
        _changed(
            entries={"fast": {"matmul": {"winner": "a", "built_in": "a", "microseconds": {"a": 1}, "thorough": True}}}
        ),
        "the entry 'matmul' names a route that there is not, 'a'",
    ),
}


def _ignored(path: Path, lines: Callable[[], list[str]], words: str) -> None:
    assert read(TIMED_GPU).entries == {}
    (said,) = lines()
    assert said.startswith(f"the tuning file {path} is ignored: ")
    assert words in said
    save(TIMED_GPU, {("fast", KEY): FOUND})
    assert read(TIMED_GPU).entries == {("fast", KEY): FOUND}, "it is replaced"
    assert len(lines()) == 1


@pytest.mark.parametrize("name", USELESS)
def test_useless_files_are_ignored_with_one_line(name: str, lines: Any) -> None:
    change, words = USELESS[name]
    path = save(TIMED_GPU, {("fast", KEY): FOUND})
    assert path is not None
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    _ignored(path, lines, words)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe{", b"[" * 100_000, b"null", b"{}"], ids=lambda raw: repr(raw[:4]))
def test_damaged_bytes_are_ignored_with_one_line(raw: bytes, lines: Any) -> None:
    path = save(TIMED_GPU, {("fast", KEY): FOUND})
    assert path is not None
    path.write_bytes(raw)
    _ignored(path, lines, "it is damaged")


def test_a_file_that_was_cut_anywhere_is_ignored(lines: Any) -> None:
    path = save(TIMED_GPU, {("fast", KEY): FOUND})
    assert path is not None
    whole = path.read_bytes().rstrip()
    for count, end in enumerate(range(0, len(whole), 37), 1):
        path.write_bytes(whole[:end])
        assert read(TIMED_GPU).entries == {}
        assert len(lines()) == count


def test_a_directory_in_the_files_place_is_ignored(lines: Any) -> None:
    path_of(TIMED_GPU).mkdir(parents=True)
    assert read(TIMED_GPU).entries == {}
    assert len(lines()) == 1
    assert save(TIMED_GPU, {("fast", KEY): FOUND}) is None
    assert len(lines()) == 2
    assert os.listdir(path_of(TIMED_GPU).parent) == [path_of(TIMED_GPU).name], "no scratch file is left"


def test_a_cache_that_cannot_be_written_costs_one_line(cache: Path, lines: Any) -> None:
    cache.write_text("a file")
    assert save(TIMED_GPU, {("fast", KEY): FOUND}) is None
    (said,) = lines()
    assert said.startswith("the tuning could not be kept (")
    assert str(cache) in said
    assert backends.save(TIMED_GPU, {"wgpu": backends.Timing(1.0, 1.0)}) is None
    said = lines()[1]
    assert said.startswith(f"the measurement of backends could not be kept ({cache}"), "no [Errno 20]"


def test_there_may_be_no_home(monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    monkeypatch.setenv("SHADERLM_CACHE", "~nobody-of-this-name/cache")
    assert read(TIMED_GPU).entries == {}
    assert save(TIMED_GPU, {("fast", KEY): FOUND}) is None
    assert len(lines()) == 1


def test_a_file_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    path = save(TIMED_GPU, {("fast", KEY): FOUND})
    assert path is not None

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert save(TIMED_GPU, {("exact", KEY): FOUND}) is None
    assert "No space left on device" in lines()[0]
    assert read(TIMED_GPU).entries == {("fast", KEY): FOUND}
    assert os.listdir(path.parent) == [path.name]


def test_the_version_of_the_kernels_is_that_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(tuning, "kernels", SimpleNamespace(__file__=str(copied / "__init__.py")))
    version = kernels_version.__wrapped__
    assert version() == kernels_version()
    shader = copied / "pointwise" / "copy_vec4.wgsl"
    whole = shader.read_bytes()
    shader.write_bytes(whole.replace(b"\n", b"\r\n"))
    assert version() == kernels_version(), "a checkout on Windows has the same kernels"
    shader.write_bytes(whole + b"// another\n")
    assert version() != kernels_version()
