"""`shaderlm bench` on a terminal: the bar, and what is said before a long run."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from shaderlm.bench import speed
from shaderlm.bench.speed import Trial
from shaderlm.gpu import Device
from shaderlm.runtime.gpu_runner import GpuRunner

from .command_line import Recorder, shaderlm
from .conftest import taken_for
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0")


def test_the_bar_is_on_a_terminals_standard_error_only(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    drawing: list[set[str]] = []
    done = Recorder()
    real = speed._once

    def watched(*arguments: Any) -> int:
        alive = set()
        for thread in set(threading.enumerate()) - before:
            if thread.name == "interrupts":  # waits for Ctrl-C
                continue
            if thread.name != "bar":
                thread.join(1)  # that of the bar of loading has been told to end
            alive.update([thread.name] * thread.is_alive())
        drawing.append(alive)
        return real(*arguments)

    before = set(threading.enumerate())
    monkeypatch.setattr(speed, "_once", watched)
    command = ("bench", "-m", tiny, "--device", "cpu", "-p", "8", "-n", "4", "-r", "3", "-o", "jsonl")
    ended = shaderlm(*command, out=done)
    assert [json.loads(line)["n_prompt"] for line in done.text().splitlines()] == [8, 0]
    said = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", ended.err)
    assert re.search(r"pp8 \S+ +3/6 \d:\d\d:\d\d", said)
    assert re.search(r"tg4 \S+ +6/6 \d:\d\d:\d\d", said)
    assert re.search(r"tg4: warming up \S+ +3/6 \d:\d\d:\d\d", said)
    assert drawing == [{"bar"}, set(), set(), set()] * 2, "a thread draws while it warms up, none while it is timed"


def test_the_clock_of_the_bar_runs_while_it_warms_up(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is timed, where the warm-up took long."""
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shaderlm.cli.speed._CLOCK_SECONDS", 0.001)
    monkeypatch.setattr("shaderlm.cli.speed._SLOW_SECONDS", 0.0)
    redrawn = threading.Semaphore(0)
    real, once = Progress.refresh, speed._once

    def refresh(self: Progress) -> None:
        real(self)
        if threading.current_thread().name == "bar":
            redrawn.release()

    def waiting(*arguments: Any) -> int:
        for _ in range(2):
            assert redrawn.acquire(timeout=60), "nobody draws"
        return once(*arguments)

    monkeypatch.setattr(Progress, "refresh", refresh)
    monkeypatch.setattr(speed, "_once", waiting)
    done = shaderlm("bench", "-m", tiny, "--device", "cpu", "-p", 8, "-n", 0, "-r", 2)
    assert done.code == 0
    assert "pp8: warming up" in done.err
    assert "bar" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(("repetitions", "minutes"), [(5, 29), (0, None)])
def test_a_long_run_on_the_cpu_is_announced(
    repetitions: int, minutes: int | None, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama-bench's tests of SmolLM2 through a software adapter."""
    from shaderlm.cli.speed import _warn_if_long

    runner = object.__new__(GpuRunner)
    runner.device = taken_for(device, kind="software")
    loaded: Any = type("Loaded", (), {"runner": runner, "report": type("Report", (), {"parameters": 134_515_008})})
    trials = [Trial(512, 0), Trial(0, 128)]
    _warn_if_long(loaded, trials, repetitions + 1 if repetitions else 0)
    said = capsys.readouterr().err
    assert said == "" if minutes is None else f"this takes {minutes} minutes, very roughly" in said
    runner.device = taken_for(device, kind="discrete")
    _warn_if_long(loaded, trials, 1000)
    assert capsys.readouterr().err == ""
