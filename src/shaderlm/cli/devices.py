"""`shaderlm devices`: the adapters of this machine and what they can do."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..gpu import DeviceCaps


def size(nbytes: int) -> str:
    """Bytes in the largest whole-ish unit."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if value == int(value) or unit in ("B", "KiB") else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def _properties(caps: DeviceCaps) -> dict[str, str]:
    yes = {True: "yes", False: "no"}
    return {
        "kind": caps.kind,
        "backend": caps.backend,
        "driver": caps.driver,
        "f16": yes[caps.f16],
        "subgroups": yes[caps.subgroups],
        "timestamps": yes[caps.timestamps],
        "largest binding": size(caps.max_binding),
        "largest buffer": size(caps.max_buffer),
        "threads per workgroup": str(caps.max_invocations),
        "workgroup memory": size(caps.max_workgroup_memory),
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def devices(as_json: bool) -> None:
    """List the WebGPU adapters of this machine, the default first."""
    from rich.console import Console
    from rich.table import Table

    from ..gpu import WHAT_TO_INSTALL, adapters

    found = [adapter.caps for adapter in adapters()]
    if as_json:
        print(json.dumps([{"number": i, **asdict(caps)} for i, caps in enumerate(found)], indent=2))
        sys.exit(0 if found else 1)
    if not found:
        print(
            f"shaderlm: no WebGPU adapter was found. Install a GPU driver:\n{WHAT_TO_INSTALL}",
            file=sys.stderr,
        )
        sys.exit(1)
    # One column per adapter: fits a narrow terminal, and puts the same limit of two adapters side by side.
    table = Table(header_style="bold")
    table.add_column("adapter")
    for i, caps in enumerate(found):
        table.add_column(f"{i}: {caps.name}", overflow="fold")
    for name in _properties(found[0]):
        table.add_row(name, *(_properties(caps)[name] for caps in found))
    Console().print(table)
    if found[0].software:
        Console(stderr=True).print(
            "No GPU was found, only software adapters: kernels run right on them, but slowly.", style="yellow"
        )
