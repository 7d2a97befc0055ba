"""`shaderlm bench`: the speed of models, as llama-bench tells it; and of kernels, against their baselines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import InputError
from ..models.shapes import MODELS
from .arguments import CommandGroup
from .bench_drafts import drafts
from .bench_images import measure_images
from .bench_serve import serve
from .loading import console, count_bar, spoken
from .models import described, load_any
from .options import adapter_option, backend_option, json_option, tune_option
from .speed import measure_models, numbers_above_0, speed_options

if TYPE_CHECKING:
    from ..bench.comparisons import Comparison
    from ..bench.measure import Row
    from ..gpu import Backend, Device


OPS = ("rms_norm", "linear", "linear_q4gsw", "attention", "sample")  # that `bench.comparisons` knows
ROWS_MODELS = ("synthetic:llama-3.2-1b:q4_0", "synthetic:llama-3.1-8b:q4_0")


class _Bench(CommandGroup):
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
def bench(ctx: click.Context, /, images: tuple[tuple[int, int], ...], **options: Any) -> None:
    """Measure the speed of models, with the tests of llama-bench.

    --image measures how fast pictures are read, instead.

    `bench kernels` compares single kernels with their baselines instead, `bench rows` times the products of a layer
    over the number of rows, `bench restore` measures the cache on disk, `bench serve` an HTTP server under load, and
    `bench drafts` what drafts gain.
    """
    named = ctx.invoked_subcommand
    if named is None and images:
        measure_images(ctx, images, **options)
    elif named is None:
        measure_models(**options)
    elif any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in options):
        raise click.UsageError(f"options of `bench` say nothing to `bench {named}`; give them after its name", ctx)


bench.add_command(serve)
bench.add_command(drafts)


def _select(ops: tuple[str, ...], models: tuple[str, ...], quick: bool) -> list[Comparison]:
    from ..bench.comparisons import comparisons

    selected = comparisons(models or (("smollm2-135m",) if quick else tuple(MODELS)), ops or OPS)
    if quick:  # the first of each change and phase
        first: dict[tuple[str, ...], Comparison] = {}
        for comparison in selected:
            first.setdefault((comparison.op, comparison.change, comparison.phase), comparison)
        selected = list(first.values())
    return selected


def _run(device: Device, chosen: list[Comparison]) -> tuple[list[Row], bool]:
    """Rows measured, and whether Ctrl-C ended it."""
    from ..bench import measure

    rows: list[Row] = []
    with count_bar(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("roofs", total=len(chosen))
        try:
            for row in measure.measure(device, chosen):
                c = row.comparison
                if isinstance(row, measure.LeftOut):
                    reason = f"left out: {c.op} {c.what}, {c.model} {c.shape}: {row.reason}"
                    progress.console.print(reason, markup=False)
                else:
                    rows.append(row)
                progress.update(task, advance=1, description=f"{c.op} {c.model}")
        except KeyboardInterrupt:
            return rows, True
    return rows, False


@bench.command()
@click.option("--op", "ops", multiple=True, type=click.Choice(OPS), help="Only this op. May be repeated.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), help="Only its shapes. Repeatable.")
@click.option("--quick", is_flag=True, help="One shape per comparison, of the smallest model.")
@adapter_option
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
    from ..engine.planning import open_adapter

    err = Console(stderr=True)
    chosen = _select(ops, models, quick)
    opened = open_adapter(device, "bench kernels", backend)
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
    rows, interrupted = _run(opened, chosen)
    if form == "json":
        print(json.dumps(report.records(rows, caps), indent=2))
    elif form == "markdown":
        print(report.markdown(rows))
    else:
        out = console(120)
        for table in report.tables(rows, caps, out.width):
            out.print(table)
        print(report.LEGEND)
        if out.width < report.WIDE:
            err.print(f"{report.WIDE} columns would also show the rate and its share of the roof; so does --json.")
    if interrupted:
        err.print(f"interrupted after {len(rows)} of {len(chosen)} comparisons")
        sys.exit(130)


@bench.command()
@click.option("-m", "--model", default=ROWS_MODELS[0], show_default=True, help="As for `bench`.")
@click.option("--device", default="auto", show_default=True, help="As for generate.")
@backend_option
@tune_option
@click.option("--tokens", type=click.IntRange(1), default=8000, show_default=True, help="Of the conversation.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, metavar="N")
@click.option("--cold", is_flag=True, help="Read files from the disk, not from the system's memory.")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="An empty folder on the disk to measure.  [default: a temporary one]",
)
@json_option
def restore(
    model: str,
    device: str,
    backend: Backend,
    no_tune: bool,
    tokens: int,
    repetitions: int,
    cold: bool,
    cache_dir: str | None,
    as_json: bool,
) -> None:
    """Time how soon a conversation is back that is on disk.

    Its prompt is computed and written to files, the model is loaded again, and the prompt is restored: to the first
    token, which must be the same.
    """
    from dataclasses import asdict
    from functools import partial
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from ..bench import restore as measuring

    load = partial(load_any, model, device, backend=backend, tune=not no_tune, context=None)
    with TemporaryDirectory(prefix="shaderlm-") as temporary, spoken() as say:
        folder = Path(cache_dir or temporary)
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"--cache-dir {folder} is not empty; give a folder that is")
        result = measuring.measure(load, folder, tokens, repetitions, cold=cold, say=say)
    if as_json:
        print(json.dumps(asdict(result), indent=1))
    else:
        print("\n".join(measuring.lines(result)))


@bench.command()
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    default=ROWS_MODELS,
    help="As for `bench`, for its shapes. May be repeated.",
)
@click.option(
    "--rows", "counts", metavar="1,2,4", callback=numbers_above_0, help="Numbers of rows.  [default: 1 … 512]"
)
@adapter_option
@backend_option
@tune_option
@json_option
def rows(
    models: tuple[str, ...],
    counts: tuple[int, ...],
    device: str | None,
    backend: Backend,
    no_tune: bool,
    as_json: bool,
) -> None:
    """Time the products of one layer over the number of rows.

    Routes are those that a model takes, with precision fast. No weight is loaded. Every number of rows is checked
    against the next larger bucket: it may take 1.15 times as long, and a row of a larger bucket must take less time.
    """
    from ..bench import rows as measuring
    from ..compile.tuning import read
    from ..engine.planning import open_adapter

    subjects = [(name, *described(name)) for name in models]
    opened = open_adapter(device, "bench rows", backend)
    caps = opened.caps
    records = []
    for name, kind, config in subjects:
        usual = measuring.usual_rows(config, caps)
        row_counts = sorted(set(counts)) or usual
        if row_counts[-1] > usual[-1]:
            most = f"a step takes at most {usual[-1]} rows of {name} on {caps.name}"
            raise click.UsageError(f"{most}, got {row_counts[-1]}")
        with spoken() as say:
            measured = measuring.measure(opened, kind, config, row_counts, None if no_tune else read(caps), say)
        records.append(measuring.record(name, measured, caps))
        if not as_json:
            console(140).print(measuring.table(name, measured, caps))
            print("\n".join(measuring.verdict(measured)), flush=True)
    if as_json:
        print(json.dumps(records, indent=1))
