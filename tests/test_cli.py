"""The command line as a person meets it: output, exit codes, typos, no adapter, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shaderlm import __version__
from shaderlm.bench import comparisons, measure
from shaderlm.cli import app, main
from shaderlm.gpu import adapters

from .command_line import COMMAND, shaderlm


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300)


def test_version_and_help() -> None:
    assert _run("--version").stdout.strip() == __version__
    commands = [[name, "--help"] for name in app.commands]
    for arguments in ([], ["--help"], ["bench", "kernels", "--help"], *commands):
        done = CliRunner().invoke(app, arguments)
        assert "Usage:" in done.output


def test_help_is_quick_because_nothing_heavy_is_imported_for_it() -> None:
    heavy = ["numpy", "wgpu", "rich", "tokenizers", "jinja2", "gguf"]
    code = f"import sys, shaderlm.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_devices_lists_every_adapter() -> None:
    done = _run("devices")
    assert done.returncode == 0, done.stderr
    for adapter in adapters():
        assert f"{adapter.number}:" in done.stdout
        assert adapter.caps.backend in done.stdout


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
        (("bench", "kernel"), 2, "No such command 'kernel'"),
        (("bench", "kernels", "--op", "rmsnorm"), 2, "'rmsnorm' is not one of 'rms_norm'"),
        (("bench", "kernels", "--modle", "x"), 2, "No such option"),
        (("bench", "kernels", "--device", "unobtainium"), 1, "no adapter matches 'unobtainium'"),
    ],
)
def test_mistakes_are_one_clear_message(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = shaderlm(*arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert "Traceback" not in done.err


def test_quick_bench_prints_a_table_and_warns_on_software() -> None:
    done = _run("bench", "kernels", "--quick", "--op", "rms_norm")
    assert done.returncode == 0, done.stderr
    assert "rms_norm: scalar → vec4" in done.stdout
    assert "1×576" in done.stdout
    assert "copied" in done.stdout
    if adapters()[0].caps.software:
        assert "say nothing about GPUs" in " ".join(done.stderr.split())


def test_bench_json_holds_every_number() -> None:
    report = json.loads(shaderlm("bench", "kernels", "--quick", "--op", "rms_norm", "--json").out)
    assert report["device"]["name"] == adapters()[0].caps.name
    assert report["copy_bandwidth"] > 0
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["before_us"] / row["after_us"])
        assert row["copy_share"] == pytest.approx(row["gb_per_s"] * 1e9 / report["copy_bandwidth"])


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
    assert "S0 decode" in done.output
    assert "interrupted after 1 of" in done.output


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_leaves_no_traceback() -> None:
    command = [*COMMAND, "bench", "kernels", "--everything"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr
    software = adapters()[0].caps.software
    if software:
        child.stderr.readline()  # its warning: from here on it measures
    time.sleep(0.5 if software else 3)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


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
