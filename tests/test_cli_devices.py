"""`shaderlm devices --report`: Markdown for an issue, which says nothing about the user."""

from __future__ import annotations

import platform
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from shaderlm import __version__
from shaderlm.cli.device_report import device_report
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps, MatrixShape
from shaderlm.gpu.adapters import Adapter

from .command_line import shaderlm

CAPS = replace(
    WEBGPU_DEFAULT, name="A | card", driver="1.2", matrix_shapes=(MatrixShape("f16", "f32", 16, 16, 16),), heap=1 << 34
)
NATIVE: Any = None


def rows(report: str) -> dict[str, list[str]]:
    """The cells of all tables, by the first of each row."""
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in report.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


def test_every_capability_is_there_by_each_implementation() -> None:
    dawn = replace(CAPS, implementation="dawn", f16=True)
    report = device_report([Adapter(CAPS, NATIVE, "measured: a, b", dawn)])
    table = rows(report)
    assert {field.name.replace("_", " ") for field in fields(DeviceCaps)} < set(table)
    assert table["f16"] == ["no", "yes"]
    assert table["max storage buffers"] == ["8", "8"]
    assert table["matrix shapes"] == ["f16 → f32 16×16×16"] * 2
    assert table["name"] == ["A \\| card"] * 2
    assert table["`--backend auto`"] == ["measured: a, b", ""]
    assert table["Python"][0].startswith(platform.python_version())
    assert f"### Devices of shaderlm {__version__}" in report


def test_without_an_adapter_it_says_why() -> None:
    assert "No WebGPU adapter was found." in device_report([])
    assert device_report([], "the library is broken").endswith("the library is broken")


def test_nothing_private_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    report = device_report([Adapter(CAPS, NATIVE)], f"{tmp_path}/lib/libwgpu.so cannot be loaded")
    assert "~/lib/libwgpu.so cannot be loaded" in report
    assert str(tmp_path) not in report


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from shaderlm import gpu

    monkeypatch.setattr(gpu, "adapters", lambda: [Adapter(CAPS, NATIVE)])
    done = shaderlm("devices", "--report")
    assert (done.code, done.err) == (0, "")
    assert "#### 0: A | card" in done.out
    both = shaderlm("devices", "--report", "--json")
    assert (both.code, "exclude each other" in both.err) == (2, True)
