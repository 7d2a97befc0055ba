"""`shaderlm tune`: times the routes of each matmul on this device, and keeps the winners for all later loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .loading import spoken
from .models import described
from .options import backend_option, model_argument, one_model, precision_option

if TYPE_CHECKING:
    from ..compile.tuning import Entry
    from ..gpu import Backend


@click.command()
@model_argument
@click.option("--device", default=None, help="Adapter: a kind, a number or part of a name (default: the best one).")
@backend_option
@precision_option
@click.option("--again", is_flag=True, help="Also what was tuned before.")
def tune(
    given: tuple[str, ...], model: str | None, device: str | None, backend: Backend, precision: str, again: bool
) -> None:
    """Find the fastest kernels for a model on this device.

    Times the routes and tile sizes of each matmul of MODEL (default: smollm2-135m). No weight is loaded.
    MODEL may be synthetic:SHAPE:FORMAT, as for `bench`. The winners are kept in the cache directory; `plan --why` shows
    them. Where wgpu and Dawn both have the device, and --backend is auto, they are timed first, and auto takes the
    faster one from then on.
    """
    from rich.console import Console
    from rich.table import Table

    from ..engine import planning

    named = one_model(given, model)
    opened = planning.open_adapter(device, "tuning", backend)
    about = described(named)
    explicit = not planning.is_auto(device)
    if explicit and not opened.caps.policy.tune:
        print("shaderlm: nothing is gained by tuning a software adapter; it is done all the same", file=sys.stderr)
    found: list[tuple[str, Entry | None]] = []
    kept: Path | None = None
    interrupted, taken = False, None
    with spoken() as say:
        try:
            if backend == "auto" and (explicit or opened.caps.policy.tune):
                taken = planning.measure_backends(device, again, say)
            options: dict[str, Any] = {"precision": precision, "again": again, "say": say}
            options["backend"] = backend if taken is None else taken.implementation
            for key, entry, path in planning.tune(*about, device=device, **options):
                found.append((key, entry))
                kept = path or kept
        except KeyboardInterrupt:
            interrupted = True
    if taken is not None:
        print(f"backend {taken.implementation} ({taken.reason})")
    table = Table("matmul", "winner", "µs", "built-in", "µs", "gain", header_style="bold")
    for key, entry in found:
        table.add_row(key, *(_row(entry) if entry else ("could not be timed",)))
    if found:
        out = Console(width=None if Console().is_terminal else 160)
        out.print(table)
        if kept is not None:
            print(f"kept in {kept}")
    if interrupted:
        print("interrupted; what was timed is kept", file=sys.stderr)
        sys.exit(130)


def _row(entry: Entry) -> tuple[str, ...]:
    times = entry.microseconds
    gain = f"{100 * entry.gain:.1f} %" if entry.winner != entry.built_in else "–"
    return entry.winner, f"{times[entry.winner]:.2f}", entry.built_in, f"{times[entry.built_in]:.2f}", gain
