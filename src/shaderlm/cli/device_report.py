"""What `shaderlm devices --report` prints: Markdown for an issue, with nothing about the user."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..version import __version__

if TYPE_CHECKING:
    from ..gpu import Adapter

_PACKAGES = ("wgpu", "wgpudawn", "numpy", "tokenizers", "gguf", "cffi")


def device_report(listed: Sequence[Adapter], problem: str | None = None) -> str:
    """Versions, system and every adapter by each implementation; `problem` is why there may be none."""
    lines = [f"### Devices of shaderlm {__version__}", "", *_table(("", ""), _machine())]
    if problem is not None:
        lines += ["", problem]
    elif not listed:
        lines += ["", "No WebGPU adapter was found."]
    for number, adapter in enumerate(listed):
        lines += ["", f"#### {number}: {adapter.caps.name}", "", *_adapter(adapter)]
    return _without_home("\n".join(lines))


def _machine() -> list[tuple[str, str]]:
    return [
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", _system()),
        ("machine", f"{platform.machine()}, {os.cpu_count()} logical processors"),
        *((name, _version(name)) for name in _PACKAGES),
    ]


def _system() -> str:
    names = [f"{platform.system()} {platform.release()}"]
    if sys.platform == "darwin":
        names.append(f"macOS {platform.mac_ver()[0]}")
    elif sys.platform == "win32":
        names.append(platform.version())
    else:
        with suppress(OSError):
            names.append(platform.freedesktop_os_release().get("PRETTY_NAME", ""))
        names.append(" ".join(platform.libc_ver()))
    return ", ".join(name for name in names if name.strip())


def _version(package: str) -> str:
    from ..gpu.packages import version_of

    return version_of(package) or "not installed"


def _adapter(adapter: Adapter) -> list[str]:
    """A row for each capability, a column for each implementation; the first is the one that `auto` takes."""
    each = [caps for caps in (adapter.caps, adapter.other) if caps is not None]
    rows = [
        (field.name.replace("_", " "), *(_shown(getattr(caps, field.name)) for caps in each))
        for field in fields(each[0])
    ]
    rows = [("`--backend auto`", adapter.reason, *("" for _ in each[1:])), *rows]
    return _table(("", *(caps.implementation for caps in each)), rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in cells]


def _without_home(text: str) -> str:
    """Paths in errors may lie below the home directory, whose name is the user's."""
    with suppress(RuntimeError):
        home = str(Path.home())
        if len(home) > 1:
            return text.replace(home, "~")
    return text
