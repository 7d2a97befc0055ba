"""`shaderlm profile` as a command: what it prints and writes, mistakes, and Ctrl-C at every moment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shaderlm.compile.roofline import Roofline
from shaderlm.gpu import Device
from shaderlm.gpu.tracer import WALL, Tracer
from shaderlm.profile.files import Profile, read
from shaderlm.profile.report import counted
from shaderlm.runtime.gpu_runner import GpuDecode, GpuRunner

from .command_line import Done, shaderlm
from .policies import with_policy
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0, profiles")

CONTEXT = 128


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0", context=CONTEXT)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roofs are taken for granted."""
    monkeypatch.setattr("shaderlm.compile.roofline.measure_roofline", lambda device: Roofline(2e9, 1e10, 30.0, 0.0))


# A whole run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tiny: Path, device: Device, tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """One run with everything, and the folder it wrote to."""
    to = tmp_path_factory.mktemp("profile")
    files = ("--json", to / "a.json", "--trace", to / "trace.json", "--html", to / "a.html")
    return shaderlm("profile", "-m", tiny, "--device", device.caps.name, "-p", 16, "-n", 32, "-r", 4, *files), to


def test_a_run_writes_what_was_asked_for(ran: tuple[Done, Path], device: Device, tiny: Path) -> None:
    done, to = ran
    assert done.code == 0
    assert sorted(path.name for path in to.iterdir()) == ["a.html", "a.json", "trace.json"]
    *notes, first, second, third = done.err.splitlines()
    assert [first, second, third] == [f"wrote {to / name}" for name in ("a.json", "trace.json", "a.html")]
    slow = f"shaderlm: {device.caps.name} computes on the CPU: this may take minutes; -p 16 -n 2 -r 1 takes less"
    assert notes == [slow] * device.caps.software
    found = read(to / "a.json")
    assert [(phase.name, phase.rows, phase.steps) for phase in found.phases] == [("prefill", 16, 4), ("decode", 1, 32)]
    assert (found.model, found.device, found.clock) == ("tiny Q8_0", device.caps.name, device.clock)
    assert found.command.startswith("shaderlm profile -m ")
    kernels = {timed.kernel for phase in found.phases for timed in phase.dispatches}
    page = (to / "a.html").read_text(encoding="utf-8")
    traced = json.loads((to / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["name"] for event in traced if event.get("cat") == "GPU"} == kernels
    assert {event["name"] for event in traced if event.get("cat") == "host"} >= {"encode", "submit", "wait"}
    assert not [name for name in kernels if name not in page]


def rows_of(out: str, title: str) -> dict[str, list[str]]:
    """A table's rows by their first cell."""
    after = out.split(f"{title} ")[1].split("\n\n")[0]
    lines = [re.split(r"\s{2,}", line.strip()) for line in after.splitlines()[1:]]
    return {line[0]: line[1:] for line in lines if len(line) > 1}


def test_a_run_prints_tables(ran: tuple[Done, Path], device: Device) -> None:
    done, to = ran
    for phase in read(to / "a.json").phases:
        for word, key in (("kernel", "kernel"), ("op", "op"), ("layer", "layer")):
            rows = rows_of(done.out, f"{phase.name} by {word}")
            units = {"s": 1e6, "ms": 1e3, "µs": 1.0}
            _, unit, _, each, *_ = head = rows.pop(word)
            assert head == ["calls", unit, "share", each, "GB/s", "GFLOP/s", "% of roof"]
            assert each.removesuffix(" each") in units
            assert {name: int(row[0]) for name, row in rows.items()} == Counter(
                getattr(timed, key) for timed in phase.dispatches
            )
            assert all(len(row) == 7 for row in rows.values())
            assert sum(float(row[2].rstrip("% ")) for row in rows.values()) == pytest.approx(100, abs=0.05 * len(rows))
            total = units[unit] * sum(float(row[1].replace(",", "")) for row in rows.values())
            off = units[unit] * (0.05 * len(rows) + 0.1)  # one digit is shown
            assert total == pytest.approx(sum(timed.us for timed in phase.dispatches), abs=off)
        assert re.search(rf"^{phase.name}: {phase.rows} tokens? per step, 0 in the cache before", done.out, re.M)
    hosts = re.findall(r"^  host    (.*); without waiting [\d.]+ .?s per dispatch$", done.out, re.M)
    here, taken = ["prepare", "encode", "finish", "submit", "wait"], ["prepare", "take", "submit", "wait"]
    named = [re.findall(r"([a-z]+) [\d.,]+ .?s", host) for host in hosts]
    assert named == [here, taken if device.caps.policy.record_ahead else here]
    assert ("recorded ahead by other threads" in done.out) == device.caps.policy.record_ahead
    assert max(map(len, done.out.splitlines())) <= 150


def test_a_run_compares_with_itself(ran: tuple[Done, Path]) -> None:
    place = ran[1] / "a.json"
    done = shaderlm("profile", "--compare", place, place)
    assert (done.code, done.err) == (0, "")
    first, second = read(place).phases
    for phase in (first, second):
        (title,) = re.findall(rf"{phase.name}, .?s per step", done.out)
        rows = rows_of(done.out, title)
        assert {timed.op for timed in phase.dispatches} < set(rows)
        changes = {row[4] for name, row in rows.items() if name in {timed.op for timed in phase.dispatches}}
        assert changes == {"+0.0 %"}


def test_a_device_without_timestamps(
    tiny: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, timeless_device: Device
) -> None:
    monkeypatch.setattr("shaderlm.engine.planning.open_device", lambda *_, **__: timeless_device)
    files = ("--json", tmp_path / "a.json", "--trace", tmp_path / "t.json", "--html", tmp_path / "a.html")
    done = shaderlm("profile", tiny, "-p", 2, "-n", 2, "-r", 1, *files)
    assert done.code == 0
    assert "note: this device has no timestamps" in done.out
    assert not re.search(r"^  (GPU|traced) ", done.out, re.M)
    found = read(tmp_path / "a.json")
    assert found.clock == WALL
    for phase in found.phases:
        assert phase.gpu_us is phase.gap_us is None
        assert min(timed.us for timed in phase.dispatches) > 0
        assert {timed.kernel for timed in phase.dispatches} <= set(rows_of(done.out, f"{phase.name} by kernel"))


def test_files_are_written_although_nobody_reads_the_tables(
    tiny: Path, device: Device, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shaderlm profile --json a.json | head`: what took minutes to measure is kept."""

    def gone(found: Profile) -> list[str]:
        raise BrokenPipeError

    monkeypatch.setattr("shaderlm.profile.report.head", gone)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the standard output of the tests is needed further
    out = tmp_path / "a.json"
    with tmp_path.joinpath("out").open("w", encoding="utf-8") as stdout:  # has a descriptor
        command = ("profile", "-m", tiny, "--device", device.caps.name, "-p", 2, "-n", 0, "-r", 1, "--json", out)
        assert shaderlm(*command, out=stdout).code == 1
    assert [phase.name for phase in read(out).phases] == ["prefill"]


# Mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--unfused", "rms_nrom_mul"), "no fusion 'rms_nrom_mul'; --unfused takes all, "),
        (("--device", "cpu"), "profiling needs a WebGPU adapter"),
        (("--device", " CPU "), "profiling needs a WebGPU adapter"),
        (("--device", "unobtainium"), "unobtainium"),
        (("-p", 0, "-n", 0), "nothing to profile: -p and -n are both 0"),
        (("-p", -1), "-p"),
        (("-r", 0), "-r"),
        (("-p", 129), "129 positions are needed, the context holds 128"),
        (("-d", 120, "-p", 4, "-n", 9), "129 positions are needed, the context holds 128"),
        (("-p", 4, "-n", 128), "129 positions are needed, the context holds 128"),  # the first token is there already
        (("--json", "x.json", "--html", "x.json"), "--json, --trace and --html must name different files"),
        (("--json", "x.json", "--trace", "./y/../x.json"), "must name different files"),
        (("--json", "nowhere/x.json"), "cannot write nowhere/x.json"),
        (("--trace", "."), "directory"),
        (("--json", "readonly.json"), "cannot write readonly.json"),
        (("another.gguf",), "expected one model, got"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_mistakes(
    arguments: tuple[Any, ...], words: str, tiny: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "y").mkdir()
    (tmp_path / "readonly.json").write_text("mine", encoding="utf-8")
    real = os.access  # root may write everything
    monkeypatch.setattr(
        os, "access", lambda path, mode: (mode != os.W_OK or "readonly" not in str(path)) and real(path, mode)
    )
    before = sorted(os.listdir())
    done = shaderlm("profile", "-m", tiny, *arguments)
    assert done.code in ((1, 2) if "unobtainium" in words else (2,))
    assert words in done.err
    assert done.out == ""
    assert sorted(os.listdir()) == before
    assert (tmp_path / "readonly.json").read_text(encoding="utf-8") == "mine"


def test_a_link_to_itself_is_refused_or_replaced(tiny: Path, tmp_path: Path, quick: None) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = shaderlm("profile", tiny, "-p", 2, "-n", 0, "-r", 1, "--json", tmp_path / "loop")
    assert (done.code, (tmp_path / "loop").is_symlink()) in ((0, False), (2, True))


@pytest.mark.parametrize(
    "others", [("-p", "8"), ("-p", "0"), ("--unfused", "all"), ("--html", "x.html"), ("-m", "tiny"), ("tiny",)]
)
def test_comparing_runs_nothing_else(others: tuple[str, ...], ran: tuple[Done, Path]) -> None:
    place = ran[1] / "a.json"
    done = shaderlm("profile", "--compare", place, place, *others)
    assert (done.code, done.out) == (2, "")
    assert "--compare takes two saved profiles and nothing else" in done.err


def test_comparing_files_that_are_not_there(ran: tuple[Done, Path], tmp_path: Path) -> None:
    place = ran[1] / "a.json"
    done = shaderlm("profile", "--compare", place, tmp_path / "missing.json")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"shaderlm: .*missing\.json cannot be read: .*No such file.*\n", done.err)
    assert shaderlm("profile", "--compare", place).code == 2
    page = shaderlm("profile", "--compare", place, ran[1] / "a.html")
    assert (page.code, page.err.count("\n")) == (2, 1)


# Ctrl-C -------------------------------------------------------------------------------------------------------

STEPS = 4  # of each run, of which there are four: to warm up, wall time, GPU time, dispatches


def interrupting(real: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The same, but the user presses Ctrl-C in the `at`-th call."""
    calls = iter(range(1, 1000))

    def called(*given: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return real(*given, **named)

    return called


def interrupted(tiny: Path, device: Device, to: Path) -> tuple[Done, Profile | None]:
    """What a run prints and what it leaves in files: all of them or none, and nothing half-written."""
    files = ("--json", to / "a.json", "--trace", to / "t.json", "--html", to / "a.html")
    counts = ("-p", 2, "-r", 2, "-n", STEPS)
    done = shaderlm("profile", "-m", tiny, "--device", device.caps.name, *counts, *files)
    assert done.code == 130
    assert "Traceback" not in done.out + done.err
    left = sorted(path.name for path in to.iterdir())
    assert left in ([], ["a.html", "a.json", "t.json"])
    return done, read(to / "a.json") if left else None


@pytest.mark.parametrize("run", ["warming up", "wall time", "GPU time", "dispatches"])
def test_ctrl_c_while_tokens_are_written(
    run: str, tiny: Path, device: Device, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before the first step of a run there is one that is not timed. A GPU would warm up for a second.
    monkeypatch.setattr(device, "caps", with_policy(device.caps, warm_up_seconds=0.0))
    at = ["warming up", "wall time", "GPU time", "dispatches"].index(run) * (STEPS + 1) + 4
    monkeypatch.setattr(GpuDecode, "step", interrupting(GpuDecode.step, at))
    done, found = interrupted(tiny, device, tmp_path)
    assert found is not None
    assert "interrupted; what was measured is above" in done.err
    assert "prefill by kernel" in done.out
    assert found.phases[0].dispatches
    if run == "warming up":
        assert [phase.name for phase in found.phases] == ["prefill"]
        return
    _, decode = found.phases
    assert re.search(r"^decode: ", done.out, re.M)
    assert decode.steps == (2 if run == "wall time" else STEPS)
    assert (decode.traced_wall_us is None) == (run == "wall time")
    assert bool(decode.dispatches) == (run == "dispatches") == ("decode by kernel" in done.out)
    assert ("interrupted before single dispatches were timed" in done.out) == (run != "dispatches")


def test_ctrl_c_before_anything_was_measured(
    tiny: Path, device: Device, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuRunner, "feed", interrupting(GpuRunner.feed, 1))
    done, found = interrupted(tiny, device, tmp_path)
    assert found is None
    assert "by kernel" not in done.out


@pytest.mark.parametrize("what", ["collect", "__init__"])
def test_ctrl_c_between_runs_keeps_the_phase_before(
    what: str, tiny: Path, device: Device, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading timestamps and making sets of them takes time too: the second tracer of decoding is the fifth of all."""
    monkeypatch.setattr(Tracer, what, interrupting(getattr(Tracer, what), 5))
    done, found = interrupted(tiny, device, tmp_path)
    assert found is not None
    assert found.phases[0].name == "prefill"
    assert "prefill by kernel" in done.out


# Interrupts itself when the sixth submission under a tracer is recorded but not yet submitted.
CHILD = """
import signal
from contextlib import contextmanager
from shaderlm.gpu.webgpu_h import Encoder
from shaderlm.compile import roofline
from shaderlm.cli import main
from shaderlm.gpu import Device
from tests.policies import with_policy

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have tests in the background ignore it
traced, finish, left = Device.traced, Encoder.finish, [-1]

@contextmanager
def trace(self, grain):
    self.caps = with_policy(self.caps, record_ahead=False)  # a signal reaches the main thread alone
    with traced(self, grain) as seen:
        left[0] = 6 if grain == {grain!r} else -1
        yield seen
    left[0] = -1

def interrupted(self, *given, **named):
    left[0] -= 1
    if left[0] == 0:
        signal.raise_signal(signal.SIGINT)
    return finish(self, *given, **named)

roofline.measure_roofline = lambda device: roofline.Roofline(2e9, 1e10, 30.0, 0.0)
Device.traced, Encoder.finish = trace, interrupted
main()
"""


@pytest.mark.parametrize(
    "grain",
    [pytest.param("host", marks=pytest.mark.long), pytest.param("submission", marks=pytest.mark.long), "dispatch"],
)
def test_ctrl_c_while_a_submission_is_recorded(grain: str, tiny: Path, device: Device, tmp_path: Path) -> None:
    """Timestamps that were never submitted must not be waited for. In a process of its own, which may be ended."""
    command = [sys.executable, "-c", CHILD.format(grain=grain), "profile", "-m", tiny, "-p", "0", "-n", "8"]
    command += ["--device", device.caps.name, "--json", tmp_path / "a.json"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (130, "interrupted; what was measured is above")
    (phase,) = read(tmp_path / "a.json").phases
    assert f"decode: 1 token per step, 0 in the cache before, {counted(phase.steps, 'step')}\n" in ended.stdout
    # Steps of the interrupted pass that were read; how many more are submitted by then is the policy of the adapter.
    assert phase.steps in range(1, 6) if grain == "host" else phase.steps == 8
    assert (phase.gpu_us is None) == (grain == "host" or device.clock == WALL)
    assert bool(phase.dispatches) == (grain == "dispatch")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
