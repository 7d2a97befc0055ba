"""`shaderlm bench kernels`: baseline against new route, on this machine."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench import measure, report
from ..bench.comparisons import Comparison, comparisons
from ..bench.shapes import MODELS
from ..errors import InputError
from ..gpu import Device, open_device

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

# What --op takes, and the results that it selects.
_OPS = {
    "rms_norm": ("S0", "S3"),
    "linear_q4gsw": ("S1", "S1+", "S1b", "S4"),
    "sdpa_kv": ("S2", "S2+"),
}


@app.callback()
def _group() -> None:
    """Measure speed on this machine."""


def _select(ops: list[str], models: list[str], quick: bool) -> list[Comparison]:
    for given, known, word in ((ops, list(_OPS), "--op"), (models, list(MODELS), "--model")):
        for value in given:
            if value not in known:
                raise InputError(f"{word} must be one of {', '.join(known)}; got {value!r}")
    names = tuple(models) or (("smollm2-135m",) if quick else tuple(MODELS))
    wanted = {result for op in (ops or list(_OPS)) for result in _OPS[op]}
    found = [c for c in comparisons(names) if c.result in wanted]
    if quick:  # the first of each result and phase
        first: dict[tuple[str, str], Comparison] = {}
        for comparison in found:
            first.setdefault((comparison.result, comparison.phase), comparison)
        found = list(first.values())
    return found


def _run(device: Device, chosen: list[Comparison], err: Console) -> tuple[list[measure.Row], bool]:
    rows: list[measure.Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("copy bandwidth", total=len(chosen))
        try:
            for row in measure.measure(device, chosen):
                rows.append(row)
                progress.update(task, advance=1, description=f"{row.comparison.result} {row.comparison.model}")
        except KeyboardInterrupt:
            return rows, True
    return rows, False


@app.command()
def kernels(
    op: list[str] = typer.Option([], "--op", help="Only this op: rms_norm, linear_q4gsw, sdpa_kv. May be repeated."),
    model: list[str] = typer.Option([], "--model", help="Only this model's shapes. May be repeated."),
    quick: bool = typer.Option(False, "--quick", help="One shape per result, of the smallest model."),
    device: str = typer.Option(None, "--device", help="Adapter: a kind, a number or part of its name."),
    everything: bool = typer.Option(False, "--everything", help="Also the large shapes on a software adapter."),
    json_: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    markdown: bool = typer.Option(False, "--markdown", help="Print a Markdown table."),
) -> None:
    """Time every result's baseline and new route with GPU timestamps, over weights that no cache holds."""
    err = Console(stderr=True)
    chosen = _select(op, model, quick)
    opened = open_device(device)
    facts = opened.facts
    if facts.software:
        err.print(report.SOFTWARE_WARNING, style="yellow")
        large = [c for c in chosen if measure.too_large(c)] if not everything else []
        if large:
            chosen = [c for c in chosen if c not in large]
            err.print(f"{len(large)} large shapes are left out on a software adapter; --everything runs them.")
    if not facts.timestamps:
        err.print("This adapter has no timestamps: times are wall-clock and include the host's share.", style="yellow")
    rows, interrupted = _run(opened, chosen, err)
    if json_:
        print(json.dumps(report.records(rows, facts), indent=2))
    elif markdown:
        print(report.markdown(rows, facts))
    else:
        # A pipe has no width: give the table the room it needs instead of folding it to 80 columns.
        out = Console()
        Console(width=None if out.is_terminal else 190).print(report.table(rows, facts))
    if interrupted:
        err.print(f"interrupted after {len(rows)} of {len(chosen)} comparisons")
        raise typer.Exit(130)
