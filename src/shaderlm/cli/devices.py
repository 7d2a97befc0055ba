"""`shaderlm devices`: the adapters of this machine and what they can do."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .options import json_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..gpu import Adapter, Implementation


def _properties(adapter: Adapter, versions: Mapping[Implementation, str | None]) -> dict[str, str]:
    from ..gpu.caps import size
    from ..gpu.processors import known_processors

    yes = {True: "yes", False: "no"}
    caps = adapter.caps
    both = {each.implementation: each for each in (caps, adapter.other) if each is not None}
    known = max(both.values(), key=lambda each: (len(each.matrix_shapes), each.heap))  # wgpu tells neither
    return {
        "WebGPU by": ", ".join(f"{name} {versions[name]}" for name in sorted(both)),
        "--backend auto": f"{caps.implementation}: {adapter.reason}",
        "kind": caps.kind,
        "processors": str(known_processors(caps) or "not known"),
        "backend": caps.backend,
        "driver": caps.driver,
        "f16": yes[caps.f16],
        "subgroups": yes[caps.subgroups],
        "timestamps": yes[caps.timestamps],
        "matrix shapes": ", ".join(map(str, known.matrix_shapes)) or "none known",
        "memory": size(known.heap) if known.heap else "not known",
        "largest binding": f"{caps.max_binding:,} bytes",
        "largest buffer": f"{caps.max_buffer:,} bytes",
        "threads per workgroup": str(caps.max_invocations),
        "workgroup memory": f"{caps.max_workgroup_memory:,} bytes",
    }


def _record(number: int, adapter: Adapter, versions: Mapping[Implementation, str | None]) -> dict[str, Any]:
    other = None if adapter.other is None else asdict(adapter.other)
    return {"number": number, **asdict(adapter.caps), "reason": adapter.reason, "versions": versions, "other": other}


def _print_report(as_json: bool) -> None:
    from ..errors import DeviceError
    from ..gpu import adapters
    from .device_report import device_report

    if as_json:
        raise click.UsageError("--report and --json exclude each other.")
    try:
        print(device_report(adapters()))
    except DeviceError as problem:
        print(device_report((), str(problem)))


@click.command()
@json_option
@click.option(
    "--report", is_flag=True, help="Print Markdown for an issue: adapters, versions and system; nothing private."
)
def devices(as_json: bool, report: bool) -> None:
    """List the WebGPU adapters of this machine, the default first."""
    if report:
        _print_report(as_json)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..gpu import WHAT_TO_INSTALL, adapters, backend_missing, implementation_versions

    listed, versions = adapters(), implementation_versions()
    if as_json:
        print(json.dumps([_record(i, adapter, versions) for i, adapter in enumerate(listed)], indent=2))
        sys.exit(0 if listed else 1)
    if not listed:
        print(
            f"shaderlm: no WebGPU adapter was found. Install a GPU driver:\n{WHAT_TO_INSTALL}",
            file=sys.stderr,
        )
        sys.exit(1)
    # One column per adapter: fits a narrow terminal, and puts the same limit of two adapters side by side.
    table = Table(header_style="bold")
    table.add_column("adapter")
    columns = [_properties(adapter, versions) for adapter in listed]
    for i, adapter in enumerate(listed):
        table.add_column(Text(f"{i}: {adapter.caps.name}"), overflow="fold")
    for name in columns[0]:
        table.add_row(name, *(Text(column[name]) for column in columns))  # not markup: names may have brackets
    Console().print(table)
    missing = backend_missing("dawn")
    if missing is not None:
        print(f"--backend dawn: {missing}")
    if listed[0].caps.software:
        Console(stderr=True).print(
            "No GPU was found, only software adapters: kernels run correctly on them, but slowly.", style="yellow"
        )
        print(f"If there is a GPU, install its driver:\n{WHAT_TO_INSTALL}", file=sys.stderr)
