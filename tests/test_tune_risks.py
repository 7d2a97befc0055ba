"""Tuning where things go wrong: words in capitals, threads that save at once, a device that cannot run a matmul."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shaderlm.compile import tuner
from shaderlm.compile.tuning import Entry, path_of, read, save
from shaderlm.engine import planning
from shaderlm.engine.loading import load_with
from shaderlm.errors import DeviceError, ModelError
from shaderlm.gpu import Device, open_device

from .command_line import shaderlm
from .tiny_models import write_tiny_llama

ENTRY = Entry("gemv", "gemv", {"gemv": 1.0}, True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q4_0", layers=1)


@pytest.mark.parametrize("word", ["auto", "AUTO", " auto "])
def test_auto_is_one_word_however_it_is_written(
    word: str, tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`adapter` takes all three for no choice of a device; a software adapter must then be refused for all three."""
    monkeypatch.setattr(planning, "open_device", lambda *_, **__: device)
    monkeypatch.setattr(planning, "tune_shapes", lambda *_: iter(()))
    monkeypatch.setattr(device, "caps", replace(device.caps, kind="software"))
    with pytest.raises(DeviceError, match="gains nothing"):
        list(planning.tune(*planning.read_header(tiny), device=word))


def test_threads_that_keep_entries_at_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Two models loaded by two threads: neither takes the other's half-written file away, and both are kept."""

    def keep(k: int) -> None:
        for n in range(1, 11):
            save(device.caps, {("fast", f"linear tokens=1 K={32 * k} N={n} format=q4_0 bias=False"): ENTRY})

    threads = [threading.Thread(target=keep, args=(k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.messages == []
    assert len(read(device.caps).entries) == 40


def test_what_could_not_be_kept_is_not_said_to_be(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else stands in the file's place: the table is shown, and a line says that nothing was kept."""

    def tune_shapes(device: Device, nodes: Any, precision: str) -> Iterator[tuple[Any, Entry | None]]:
        yield next(iter(nodes)), ENTRY

    monkeypatch.setattr(planning, "tune_shapes", tune_shapes)
    path_of(device.caps).mkdir(parents=True)
    done = shaderlm("tune", tiny, "--device", device.caps.name)
    assert (done.code, "gemv" in done.out) == (0, True)
    assert "kept in" not in done.out


@pytest.mark.parametrize("tune", [False, True])
def test_a_device_that_cannot_run_a_matmul_says_so_in_the_same_words(
    tune: bool, tiny: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong while shapes are timed, the plan is what says which layer cannot be run."""
    small = open_device(pytestconfig.getoption("--device"), limits={"max_storage_buffers": 3})
    small.caps = replace(small.caps, kind="discrete")
    monkeypatch.setattr(tuner, "BUDGET_SECONDS", 1.0)
    with pytest.raises(ModelError, match="this device cannot run"):
        load_with(tiny, device=small, tune=tune, measure=True)
