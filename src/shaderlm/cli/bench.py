"""`shaderlm bench`: the speed of models, as llama-bench tells it; and of kernels, against their baselines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..models.shapes import MODELS
from .options import backend_option
from .speed import measure_models, speed_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.comparisons import Comparison
    from ..bench.measure import Row
    from ..gpu import Backend, Device


@click.group(invoke_without_command=True)
@speed_options
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Measure the speed of models, with the tests of llama-bench.

    `bench kernels` compares single kernels with their baselines instead.
    """
    if ctx.invoked_subcommand is None:
        measure_models(**options)
    elif any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in options):
        raise click.UsageError("options of `bench` say nothing to `bench kernels`; give them after its name", ctx)


def _ops(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The ops that were named, or all of them."""
    from ..bench.comparisons import FAMILIES

    for op in given:
        if op not in FAMILIES:
            raise click.BadParameter(f"{op!r} is not one of {', '.join(map(repr, FAMILIES))}", ctx, param)
    return given or tuple(FAMILIES)


def _select(ops: tuple[str, ...], models: tuple[str, ...], quick: bool) -> list[Comparison]:
    from ..bench.comparisons import comparisons

    found = comparisons(models or (("smollm2-135m",) if quick else tuple(MODELS)), ops)
    if quick:  # the first of each change and phase
        first: dict[tuple[str, ...], Comparison] = {}
        for comparison in found:
            first.setdefault((comparison.op, comparison.change, comparison.phase), comparison)
        found = list(first.values())
    return found


def _run(device: Device, chosen: list[Comparison], err: Console) -> tuple[list[Row], bool]:
    """Rows measured, and whether Ctrl-C ended it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..bench import measure

    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("copy bandwidth", total=len(chosen))
        try:
            for row in measure.measure(device, chosen):
                c = row.comparison
                if isinstance(row, measure.LeftOut):
                    err.print(f"left out: {c.op} {c.what}, {c.model} {c.shape}: {row.reason}", markup=False)
                else:
                    rows.append(row)
                progress.update(task, advance=1, description=f"{c.op} {c.model}")
        except KeyboardInterrupt:
            return rows, True
    return rows, False


@bench.command()
@click.option("--op", "ops", multiple=True, callback=_ops, help="Only rms_norm, linear_q4gsw, attention or sample.")
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(list(MODELS)),
    help="Only its shapes. May be repeated.",
)
@click.option("--quick", is_flag=True, help="One shape per comparison, of the smallest model.")
@click.option("--device", help="Adapter: a kind (discrete, integrated, software), a number or part of its name.")
@backend_option
@click.option("--everything", is_flag=True, help="Also the large shapes on a software adapter (minutes to hours).")
@click.option("--json", "form", flag_value="json", help="Print JSON instead of a table.")
@click.option("--markdown", "form", flag_value="markdown", help="Print a Markdown table.")
def kernels(
    ops: tuple[str, ...],
    models: tuple[str, ...],
    quick: bool,
    device: str | None,
    backend: Backend,
    everything: bool,
    form: str | None,
) -> None:
    """Compare kernels with their baselines.

    A baseline and a newer route of an op are timed in turns, by GPU timestamps and over rotating weights.
    """
    from rich.console import Console

    from ..bench import measure, report
    from ..compile.workload import SOFTWARE_WARNING
    from ..gpu import open_device

    err = Console(stderr=True)
    chosen = _select(ops, models, quick)
    opened = open_device(device, backend=backend)
    caps = opened.caps
    if caps.software:
        err.print(SOFTWARE_WARNING, style="yellow")
        large = [c for c in chosen if measure.too_large(c)] if not everything else []
        if large:
            chosen = [c for c in chosen if c not in large]
            err.print(f"{len(large)} large shapes are left out on a software adapter; --everything runs them.")
    if not caps.timestamps:
        err.print(
            "This adapter has no timestamps: times are wall-clock and include the host's share.",
            style="yellow",
        )
    rows, interrupted = _run(opened, chosen, err)
    if form == "json":
        print(json.dumps(report.records(rows, caps), indent=2))
    elif form == "markdown":
        print(report.markdown(rows))
    else:
        # A pipe has no width: do not fold the tables to 80 columns.
        out = Console(width=None if Console().is_terminal else 120)
        for table in report.tables(rows, caps, out.width):
            out.print(table)
        print(report.LEGEND)
        if out.width < report.WIDE:
            err.print(f"{report.WIDE} columns would also show the rate and its share of copy; so does --json.")
    if interrupted:
        err.print(f"interrupted after {len(rows)} of {len(chosen)} comparisons")
        sys.exit(130)
