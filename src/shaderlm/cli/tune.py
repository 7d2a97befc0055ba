"""`shaderlm tune`: times the routes of each matmul on this device, and keeps the winners for all later loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .loading import console, spoken
from .models import described
from .options import adapter_option, backend_option, model_argument, precision_option

if TYPE_CHECKING:
    from ..compile.tuning import Entry
    from ..gpu import Backend


@click.command()
@model_argument
@adapter_option
@backend_option
@precision_option
@click.option("--again", is_flag=True, help="Also what was tuned before.")
def tune(model: str | None, device: str | None, backend: Backend, precision: str, again: bool) -> None:
    """Find the fastest kernels for a model on this device.

    Times the routes and tile sizes of each matmul of MODEL (default: smollm2-135m). No weight is loaded.
    MODEL may be synthetic:SHAPE:FORMAT, as for `bench`. The winners are kept in the cache directory; `plan --why` shows
    them. Where wgpu and Dawn both have the device, and --backend is auto, they are timed first, and auto takes the
    faster one from then on.
    """
    from rich.table import Table

    from ..engine import planning

    target = planning.open_adapter(device, "tuning", backend)
    architecture, config = described(model)
    explicit = not planning.is_auto(device)
    if explicit and not target.caps.policy.tune:
        print("shaderlm: nothing is gained by tuning a software adapter; it is done all the same", file=sys.stderr)
    entries: list[tuple[str, Entry | None]] = []
    saved_to: Path | None = None
    interrupted, choice = False, None
    with spoken(in_pipe=True) as say:
        try:
            if backend == "auto" and (explicit or target.caps.policy.tune):
                choice = planning.measure_backends(device, again, say)
            options: dict[str, Any] = {"precision": precision, "again": again, "say": say}
            options["backend"] = backend if choice is None else choice.implementation
            for key, entry, path in planning.tune(architecture, config, device=device, **options):
                entries.append((key, entry))
                saved_to = path or saved_to
        except KeyboardInterrupt:
            interrupted = True
    if choice is not None:
        print(f"backend {choice.implementation} ({choice.reason})")
    table = Table("matmul", "winner", "µs", "built-in", "µs", "gain", header_style="bold")
    for key, entry in entries:
        table.add_row(key, *(_row(entry) if entry else ("could not be timed",)))
    if entries:
        console(160).print(table)
        if saved_to is not None:
            print(f"kept in {saved_to}")
    if interrupted:
        print("interrupted; what was timed is kept", file=sys.stderr)
        sys.exit(130)


def _row(entry: Entry) -> tuple[str, ...]:
    times = entry.microseconds
    gain = f"{100 * entry.gain:.1f} %" if entry.winner != entry.built_in else "–"
    return entry.winner, f"{times[entry.winner]:.2f}", entry.built_in, f"{times[entry.built_in]:.2f}", gain
