"""The command line as a person meets it: output, exit codes, typos, no adapter, Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from shaderlm import __version__
from shaderlm.bench import comparisons, measure, report
from shaderlm.cli import app, main
from shaderlm.cli.bench import OPS
from shaderlm.cli.commands import SUMMARIES
from shaderlm.cli.interrupts import LostInterrupts
from shaderlm.cli.options import with_flags
from shaderlm.compile.roofline import Roofline, uses_matrix_units
from shaderlm.compile.timing import SAMPLED, Filler
from shaderlm.compile.workload import program_of
from shaderlm.gpu import Device, adapters
from shaderlm.graph.sampling import OUTPUT

from .command_line import COMMAND, shaderlm
from .test_plan import UNITS


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300)


def test_version_and_help() -> None:
    assert _run("--version").stdout.strip() == __version__
    commands = [[name, "--help"] for name in app.commands]
    for arguments in ([], ["--help"], ["bench", "kernels", "--help"], ["bench", "rows", "--help"], *commands):
        done = CliRunner().invoke(app, arguments)
        assert "Usage:" in done.output


def test_the_summaries_of_commands_are_whole_sentences() -> None:
    for arguments in (["--help"], ["bench", "--help"]):
        # Not CliRunner: click then uses two columns more than it does at a terminal of that width.
        environment = {**os.environ, "COLUMNS": "80"}
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=environment)
        listed = done.stdout.split("Commands:")[1]
        assert "..." not in listed
        assert all(line.endswith(".") for line in listed.strip().splitlines())


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = "import sys; from shaderlm.cli import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    listed, modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.rsplit("\n", 2)[:2]
    assert "generate" in listed
    assert not {f"shaderlm.cli.{name}" for name in ("generate", "serve", "bench", "batch")} & set(modules.split())
    assert "numpy" not in modules.split()
    for name, summary in SUMMARIES.items():
        context = click.Context(app.commands[name])
        assert summary == app.commands[name].get_short_help_str(limit=100)
        assert app.commands[name].get_help(context).splitlines()[2].strip() == summary


def test_python_keywords_in_messages_become_flags() -> None:
    assert with_flags('use device="swiftshader", or raise context= (up to 9)') == (
        "use --device swiftshader, or raise --context (up to 9)"
    )
    assert with_flags("device must be given") == "device must be given"


def test_help_is_quick_because_nothing_heavy_is_imported_for_it() -> None:
    heavy = ["numpy", "wgpu", "rich", "tokenizers", "jinja2", "gguf", "shaderlm.cli.options"]
    code = f"import sys, shaderlm.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_generation_on_the_cpu_imports_no_more_than_it_uses() -> None:
    """Each of these takes 10 to 40 ms of a start that takes a second."""
    late = ["asyncio", "importlib.metadata", "shaderlm.kernels.route", "shaderlm.formats.hf.folder"]
    code = "import sys; from shaderlm.engine.cpu import cpu_runner; from shaderlm.engine import load\n"
    code += f"print([name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_devices_lists_every_adapter() -> None:
    done = _run("devices")
    assert done.returncode == 0, done.stderr
    for number, adapter in enumerate(adapters()):
        assert f"{number}:" in done.stdout
        assert adapter.caps.backend in done.stdout


def test_devices_without_a_gpu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (software := [each for each in adapters() if each.caps.software]):
        pytest.skip("there is no software adapter")
    monkeypatch.setattr("shaderlm.gpu.adapters", lambda: software)
    done = CliRunner().invoke(app, ["devices"])
    assert done.exit_code == 0
    assert "only software adapters" in done.stderr
    assert "If there is a GPU, install its driver" in done.stderr
    assert "mesa-vulkan-drivers" in done.stderr


def test_devices_json() -> None:
    listed = json.loads(shaderlm("devices", "--json").out)
    assert [entry["name"] for entry in listed] == [adapter.caps.name for adapter in adapters()]
    assert all(entry["max_binding"] > 0 and isinstance(entry["f16"], bool) for entry in listed)


def test_devices_without_an_adapter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.gpu.adapters", list)
    done = CliRunner().invoke(app, ["devices"])
    assert done.exit_code == 1
    assert "no WebGPU adapter" in done.output
    assert "mesa-vulkan-drivers" in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("devises",), 2, "No such command 'devises'"),
        (
            ("bench", "kernel"),
            2,
            "No such command 'kernel': there are serve, drafts, kernels, restore, rows; -m names a model",
        ),
        (("bench", "kernels", "--op", "rmsnorm"), 2, "'rmsnorm' is not one of 'rms_norm'"),
        (("bench", "kernels", "--modle", "x"), 2, "No such option"),
        (("bench", "kernels", "--device", "unobtainium"), 1, "no adapter matches 'unobtainium'"),
        (
            ("bench", "kernels", "--device", "cpu"),
            2,
            "bench kernels needs a WebGPU adapter, real or in software",
        ),
    ],
)
def test_mistakes_are_one_clear_message(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = shaderlm(*arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [("models >&-", 0, ""), ("models 2>&-", 0, "short names"), ("tokenize x <&-", 0, ""), ("tokenize <&-", 2, "empty")],
)
def test_closed_streams(arguments: str, code: int, words: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m shaderlm {arguments}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["models", "--help", "tokenize x", "tokenize x --json"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full(arguments: str, unbuffered: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m shaderlm {arguments} >/dev/full"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, encoding="utf-8", timeout=60, env=environment)
    assert done.stderr == "shaderlm: cannot write the output: No space left on device\n"
    assert done.returncode == 1


def test_quick_bench_prints_a_table_and_warns_on_software() -> None:
    done = _run("bench", "kernels", "--quick", "--op", "rms_norm")
    assert done.returncode == 0, done.stderr
    assert "scalar → vec4" in done.stdout
    assert "ratio: before / after" in done.stdout, "columns are explained"
    assert "1×576" in done.stdout
    assert "multiplies and adds" in " ".join(done.stdout.split()), "the roofs"
    if adapters()[0].caps.software:
        assert "say nothing about GPUs" in " ".join(done.stderr.split())


def test_bench_json_holds_every_number() -> None:
    report = json.loads(shaderlm("bench", "kernels", "--quick", "--op", "rms_norm", "--json").out)
    assert report["device"]["name"] == adapters()[0].caps.name
    roofs = report["roofline"]
    assert roofs["bytes_per_second"] > 0
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["before_us"] / row["after_us"])
        assert row["roof_share"] == pytest.approx(row["gb_per_s"] * 1e9 / roofs["bytes_per_second"])


@pytest.mark.full
def test_bench_times_sampling_with_settings_that_have_work_to_do() -> None:
    """Random bits for temperature and top_k would time something else."""
    (row,) = json.loads(shaderlm("bench", "kernels", "--quick", "--op", "sample", "--json").out)["rows"]
    assert (row["op"], row["shape"]) == ("sample", "1×49152")
    assert min(row["before_us"], row["after_us"]) > 0
    filled = Filler()("outputs", 2 * OUTPUT.itemsize, {}).view(OUTPUT)
    assert filled["row"].tolist() == [0, 1]
    assert {tuple(each) for each in filled[["temperature", "top_k", "top_p", "min_p"]].tolist()} == {
        tuple(np.array(SAMPLED, np.float32).tolist())
    }


def test_every_comparison_runs_where_a_gpu_has_all_features() -> None:
    """By routes that were named: both sides of each comparison, and which of them use matrix units."""
    assert {comparison.op for comparison in comparisons.comparisons()} == set(comparisons.FAMILIES) == set(OPS)
    for comparison in comparisons.comparisons(("llama-3.1-8b",)):
        before, after = (
            [step for routed in workload for step in program_of(routed, UNITS).steps]
            for workload in (comparison.before, comparison.after)
        )
        assert [step.source for step in before] != [step.source for step in after], comparison.what
        assert not any(map(uses_matrix_units, before))
        assert any(map(uses_matrix_units, after)) == comparison.change.endswith("→ matrix")


def test_a_route_that_a_device_has_not_is_left_out_with_its_reason(plain_device: Device) -> None:
    """Before anything is allocated; the others are measured."""
    chosen = comparisons.comparisons(("smollm2-135m",), ("linear",))
    chosen = [each for each in chosen if each.operand == "qkv" and each.phase == "batch"]
    found = list(measure.measure(plain_device, [each for each in chosen if each.change.endswith("→ matrix")]))
    assert [type(each) for each in found] == [measure.LeftOut]
    assert isinstance(found[0], measure.LeftOut)
    assert "this device has no matrix units" in found[0].reason


def test_the_share_of_a_roof() -> None:
    """512 × 576 × 960 in 1 ms are 566 GFLOP/s: of 1 TFLOP/s 57 %, of 4 TFLOP/s by matrix units 14 %."""
    (first, *_) = comparisons.comparisons(("smollm2-135m",), ("linear",))
    assert (first.change, first.shape) == ("tile_shared → matrix", "512×576×960")
    row = measure.Row(first, 5e-3, 1e-3, True, Roofline(1e12, 1e12, 2.0, 0.0, 4e12))
    assert report.cells(row)[-3:] == ("5.00", "566 GFLOP/s", "14%")
    assert report.cells(replace(row, matrix_units=False))[-1] == "57%"
    assert report.cells(replace(row, after=1e-4))[-2] == "5.7 TFLOP/s"


def test_bench_markdown_is_a_table() -> None:
    lines = shaderlm("bench", "kernels", "--quick", "--op", "rms_norm", "--markdown").out.strip().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) > 2


def test_an_interrupted_bench_prints_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.measure

    def interrupted(device: Any, chosen: list[comparisons.Comparison]) -> Iterator[measure.Row | measure.LeftOut]:
        yield from real(device, chosen[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure", interrupted)
    done = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--op", "rms_norm"])
    assert done.exit_code == 130
    assert "rms_norm decode" in done.output
    assert "interrupted after 1 of" in done.output


# Interrupts itself when the second workload is about to be timed; the first is the copy.
CHILD = """
import signal
from shaderlm.bench import measure
from shaderlm.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have tests in the background ignore it
real = measure.time_in_turns

def interrupted(*given):
    signal.raise_signal(signal.SIGINT)
    return real(*given)

measure.time_in_turns = interrupted
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_leaves_no_traceback() -> None:
    command = [sys.executable, "-c", CHILD, "bench", "kernels", "--quick", "--op", "rms_norm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "interrupted after 0 of" in done.stderr
    assert "Traceback" not in done.stderr


def test_expected_problems_have_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shaderlm.errors import InputError

    def fail() -> None:
        raise InputError("x must be even, got 3")

    monkeypatch.setattr("shaderlm.cli.app", click.command()(fail))
    monkeypatch.setattr(sys, "argv", ["shaderlm"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "shaderlm: x must be even, got 3\n"


def test_an_interrupt_that_was_lost_is_raised_again_without_waiting_in_the_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hook runs where the next interrupt may come at any moment: it must not start a thread, or wait."""
    raised: SimpleQueue[None] = SimpleQueue()
    monkeypatch.setattr("_thread.interrupt_main", lambda: raised.put(None))

    def lose_one() -> None:
        sys.unraisablehook(SimpleNamespace(exc_type=KeyboardInterrupt))

    with LostInterrupts() as lost:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
            lose_one()
        assert lost.just_now()
        raised.get(timeout=60)
        for _ in range(3):  # reports of one Ctrl-C
            lose_one()
        raised.get(timeout=60)
        with pytest.raises(Empty):  # it is raised once
            raised.get(timeout=0.2)
        lose_one()
    with pytest.raises(Empty):  # the program ends
        raised.get(timeout=0.2)
