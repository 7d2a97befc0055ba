"""`shaderlm tune`, `plan --why` and `--no-tune`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shaderlm import engine
from shaderlm.bench import synthetic
from shaderlm.cli.loading import spoken
from shaderlm.compile import tuner
from shaderlm.compile.tuning import Entry, path_of, read
from shaderlm.engine import loading, planning
from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.kernels import options

from .command_line import shaderlm
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q4_0", layers=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is timed: of two candidates, the one that is not built in takes half as long. The ops asked for.

    As on a software adapter, where every product has two candidates.
    """
    asked: list[str] = []
    monkeypatch.setattr(device, "caps", replace(device.caps, kind="software"))
    monkeypatch.setattr(planning, "open_device", lambda *_, **__: device)

    def tune_shapes(device: Device, nodes: Any, precision: str) -> Iterator[tuple[Any, Entry | None]]:
        for node in nodes:
            first, other = [each.name for each in options(node.op, node.dims, device.caps, precision)][:2]
            asked.append(node.op)
            yield node, Entry(other, first, {first: 20.0, other: 10.0}, True)

    monkeypatch.setattr(planning, "tune_shapes", tune_shapes)
    return asked


def test_tune_shows_and_keeps_the_winners(tiny: Path, device: Device, timed: list[str]) -> None:
    where = ("--device", device.caps.name)
    done = shaderlm("tune", tiny, *where)
    assert done.code == 0
    assert len(timed) == 5
    rows = [line for line in done.out.splitlines() if line.startswith("│")]
    assert len(rows) == 5
    assert all("10.00" in row and "20.00" in row and "50.0 %" in row for row in rows)
    path = path_of(device.caps)
    assert done.out.endswith(f"kept in {path}\n")
    assert len(read(device.caps).entries) == 5
    assert done.err.startswith("shaderlm: nothing is gained by tuning a software adapter")
    again = shaderlm("tune", "-m", tiny, *where)
    assert again.out == done.out
    assert len(timed) == 5, "what is known is not timed again"
    shaderlm("tune", tiny, *where, "--again")
    assert len(timed) == 10
    shaderlm("tune", tiny, *where, "--precision", "exact")
    assert len(timed) == 15


def test_plans_take_the_winners_and_say_why(tiny: Path, device: Device, timed: list[str]) -> None:
    where = ("--device", device.caps.name)
    before = shaderlm("plan", tiny, *where, "--why")
    assert f"(fast; there is no {path_of(device.caps)}; `shaderlm tune` makes it):" in before.out
    assert before.out.count("built-in order: not tuned") == 5
    shaderlm("tune", tiny, *where)
    after = shaderlm("plan", tiny, *where, "--why")
    assert after.code == 0
    prefill, decode, why = after.out.split("\n\n")
    assert decode != before.out.split("\n\n")[1]
    assert why.count("10.00 µs: 50.0 % less than the built-in") == 5
    assert shaderlm("plan", tiny, *where).out == f"{prefill}\n\n{decode}\n"
    untuned = shaderlm("plan", tiny, *where, "--why", "--no-tune").out.replace("--no-tune", "")
    assert untuned.split("\n\n")[:2] == before.out.split("\n\n")[:2]


def test_without_a_gpu_tune_says_that_nothing_is_gained(
    tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "caps", replace(device.caps, kind="software"))
    monkeypatch.setattr(planning, "open_device", lambda *_, **__: device)
    for named in ((), ("--device", "auto")):
        done = shaderlm("tune", tiny, *named)
        assert done.code == 1
        assert "tuning a software adapter gains nothing; --device software does it nevertheless" in done.err
        assert len(done.err.splitlines()) == 1


def test_wrong_arguments(tiny: Path, device: Device) -> None:
    for arguments, words in (
        (("--device", "cpu"), "tuning needs a WebGPU adapter"),
        (("-m", "other.gguf"), "expected one model, got "),
        (("--precision", "half"), "Invalid value for '--precision'"),
    ):
        done = shaderlm("tune", tiny, *arguments)
        assert done.code == 2
        assert words in done.err
    assert "no synthetic model 'llama'" in shaderlm("tune", "synthetic:llama", "--device", device.caps.name).err


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = 0.0
    monkeypatch.setattr("shaderlm.cli.loading.time", SimpleNamespace(monotonic=lambda: seconds))
    with spoken(in_pipe=True) as say:
        for seconds in (0.0, 3.0, 9.9, 10.0, 11.0, 30.0):
            say(f"at {seconds:g} s")
    assert capsys.readouterr().err == "".join(f"measuring at {each} s …\n" for each in (0, 10, 30))
    with spoken() as say:
        say("nothing")
    assert not capsys.readouterr().err


def test_ctrl_c_keeps_what_was_timed(
    tiny: Path, device: Device, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Any = vars(planning)["tune_shapes"]

    def interrupted(*given: Any) -> Iterator[Any]:
        for i, found in enumerate(whole(*given)):
            if i == 2:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(planning, "tune_shapes", interrupted)
    done = shaderlm("tune", tiny, "--device", device.caps.name)
    assert done.code == 130
    assert done.err.splitlines()[-1] == "interrupted; what was timed is kept"
    assert sum(line.startswith("│") for line in done.out.splitlines()) == 2
    assert len(read(device.caps).entries) == 2


def test_a_useless_file_costs_one_line_and_none_with_no_tune(tiny: Path, device: Device) -> None:
    path = path_of(device.caps)
    path.parent.mkdir(parents=True)
    path.write_text("{", encoding="utf-8")
    command = ("plan", tiny, "--device", device.caps.name)
    assert shaderlm(*command).err == f"shaderlm: the tuning file {path} is ignored: it is damaged\n"
    assert shaderlm(*command, "--no-tune").err == ""


@pytest.mark.parametrize(
    "command",
    [("generate", "Hi"), ("chat",), ("bench", "-p", "8", "-n", "0"), ("profile", "-p", "8")],
    ids=lambda c: c[0],
)
def test_no_tune_reaches_the_load(
    command: tuple[str, ...], tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(*_: Any, tune: bool, **__: Any) -> None:
        asked.append(tune)
        raise InputError("enough")

    monkeypatch.setattr(engine, "load", load)
    monkeypatch.setattr(loading, "load_with", load)
    monkeypatch.setattr(loading, "load_drafting", load)
    monkeypatch.setattr(synthetic, "load_synthetic", load)
    models = [tiny] + (["synthetic:smollm2-135m:q4_0"] if command[0] in ("bench", "profile") else [])
    for name in models:
        for more in ((), ("--no-tune",)):
            done = shaderlm(*command, "-m", name, "--device", device.caps.name, *more)
            assert done.err.splitlines()[-1] == "shaderlm: enough"
    assert asked == [True, False] * len(models)


def test_the_synthetic_models_of_bench_are_known_to_tune_and_plan(device: Device, timed: list[str]) -> None:
    where = ("synthetic:smollm2-135m:q4_0", "--device", device.caps.name)
    assert shaderlm("tune", *where).code == 0
    assert len(timed) == len(set(read(device.caps).entries)) > 3
    assert shaderlm("plan", *where, "--why").out.count("10.00 µs") > 3


def test_a_tuner_that_measures_is_what_tune_calls() -> None:
    assert vars(planning)["tune_shapes"] is tuner.tune_shapes
