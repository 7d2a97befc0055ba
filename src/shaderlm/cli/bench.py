"""`shaderlm bench`: the speed of models, as llama-bench tells it; and of kernels, against their baselines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..models.shapes import MODELS
from .bench_serve import serve
from .loading import spoken
from .models import described
from .options import backend_option, tune_option
from .speed import measure_models, numbers, speed_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.comparisons import Comparison
    from ..bench.measure import Row
    from ..gpu import Backend, Device


ROWS_MODELS = ("synthetic:llama-3.2-1b:q4_0", "synthetic:llama-3.1-8b:q4_0")


class _Bench(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click does, but a model may have been meant: `plan`, `tune` and others take it without -m."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(
                f"No such command {args[0]!r}: there are {', '.join(self.commands)}; -m names a model", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Bench, invoke_without_command=True)
@speed_options
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Measure the speed of models, with the tests of llama-bench.

    `bench kernels` compares single kernels with their baselines instead, `bench rows` times the products of a layer
    over the number of rows, and `bench serve` measures an HTTP server under load.
    """
    named = ctx.invoked_subcommand
    if named is None:
        measure_models(**options)
    elif any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in options):
        raise click.UsageError(f"options of `bench` say nothing to `bench {named}`; give them after its name", ctx)


bench.add_command(serve)


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
        task = progress.add_task("roofs", total=len(chosen))
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
@click.option(
    "--op", "ops", multiple=True, callback=_ops, help="Only rms_norm, linear, linear_q4gsw, attention or sample."
)
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
            err.print(f"{report.WIDE} columns would also show the rate and its share of the roof; so does --json.")
    if interrupted:
        err.print(f"interrupted after {len(rows)} of {len(chosen)} comparisons")
        sys.exit(130)


def _row_counts(ctx: click.Context, param: click.Parameter, given: str | None) -> tuple[int, ...] | None:
    """1,2,4"""
    found = None if given is None else tuple(sorted(set(numbers(ctx, param, given))))
    if found is not None and found[0] < 1:
        raise click.BadParameter(f"{given!r} must be numbers above 0", ctx, param)
    return found


@bench.command()
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    default=ROWS_MODELS,
    help="As for `bench`, for its shapes. May be repeated.",
)
@click.option("--rows", "counts", metavar="1,2,4", callback=_row_counts, help="Numbers of rows.  [default: 1 … 512]")
@click.option("--device", help="Adapter: a kind (discrete, integrated, software), a number or part of its name.")
@backend_option
@tune_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def rows(
    models: tuple[str, ...],
    counts: tuple[int, ...] | None,
    device: str | None,
    backend: Backend,
    no_tune: bool,
    as_json: bool,
) -> None:
    """Time the products of one layer over the number of rows.

    Routes are those that a model takes, with precision fast. No weight is loaded. Every number of rows is checked
    against the next larger bucket: it may take 1.15 times as long, and a row of a larger bucket must take less time.
    """
    from rich.console import Console

    from ..bench import rows as measuring
    from ..compile.tuning import read
    from ..gpu import open_device

    subjects = [(name, *described(name)) for name in models]
    opened = open_device(device, backend=backend)
    caps = opened.caps
    found = []
    for name, kind, config in subjects:
        usual = measuring.usual_rows(config, caps)
        wanted = counts or usual
        if wanted[-1] > usual[-1]:
            raise click.UsageError(f"a step takes at most {usual[-1]} rows of {name} on {caps.name}, got {wanted[-1]}")
        with spoken() as say:
            measured = measuring.measure(opened, kind, config, wanted, None if no_tune else read(caps), say)
        found.append(measuring.record(name, measured, caps))
        if not as_json:
            Console(width=None if Console().is_terminal else 140).print(measuring.table(name, measured, caps))
            print("\n".join(measuring.verdict(measured)), flush=True)
    if as_json:
        print(json.dumps(found, indent=1))
