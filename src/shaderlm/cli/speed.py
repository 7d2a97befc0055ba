"""The options of `shaderlm bench` and what it does with them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .. import __version__
from .loading import progress_bar

if TYPE_CHECKING:
    from ..bench.speed import Trial
    from ..bench.tables import Subject
    from ..engine.report import LoadReport
    from ..runtime.session import Runner

Command = TypeVar("Command", bound=Callable[..., Any])
FORMATS = ("md", "csv", "json", "jsonl", "sql")


def _numbers(ctx: click.Context, param: click.Parameter, given: str) -> tuple[int, ...]:
    """1,128,512"""
    try:
        found = tuple(int(word) for word in given.split(","))
    except ValueError:
        found = (-1,)
    if any(number < 0 for number in found):
        raise click.BadParameter(f"{given!r} must be whole numbers with commas between them", ctx, param)
    return found


def _pairs(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """512,128"""
    found = [_numbers(ctx, param, text) for text in given]
    wrong = [text for text, pair in zip(given, found, strict=True) if len(pair) != 2 or min(pair) < 1]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} must be two numbers above 0, prompt,generated", ctx, param)
    return tuple((pair[0], pair[1]) for pair in found)


def speed_options(command: Command) -> Command:
    """As llama-bench has them, where it has them."""
    named = "Model, as in `generate`, or synthetic:SHAPE:FORMAT: random weights of that shape. May be repeated."
    where = "auto, cpu or an adapter. May be repeated."
    listed = click.Choice(FORMATS)
    options = (
        click.option("-m", "--model", "models", multiple=True, help=named),
        click.option("-p", "--n-prompt", "prompts", default="512", callback=_numbers, help="Prompt tokens: 1,128,512."),
        click.option("-n", "--n-gen", "generated", default="128", callback=_numbers, help="Generated tokens: 1,128."),
        click.option("-pg", "both", multiple=True, callback=_pairs, help="PROMPT,GENERATED, timed as one. Repeatable."),
        click.option("-d", "--n-depth", "depths", default="0", callback=_numbers, help="Tokens already in the cache."),
        click.option("-r", "--repetitions", default=5, show_default=True, type=click.IntRange(1, 1000)),
        click.option("-o", "--output", default="md", show_default=True, type=listed, help="Format of the results."),
        click.option("--device", "devices", multiple=True, help=where),
        click.option("--no-warmup", is_flag=True, help="Time the first run too."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def measure_models(
    models: Sequence[str],
    prompts: Sequence[int],
    generated: Sequence[int],
    both: Sequence[tuple[int, int]],
    depths: Sequence[int],
    repetitions: int,
    output: str,
    devices: Sequence[str],
    no_warmup: bool,
) -> None:
    """Run every test on every model and device; print a row as soon as there is one."""
    from ..bench.speed import Trial, check, run
    from ..bench.tables import FORMATS as TABLES
    from ..bench.tables import record
    from ..errors import InputError

    pairs = [(p, 0) for p in prompts if p] + [(0, n) for n in generated if n] + list(both)
    trials = [Trial(p, n, depth) for depth in depths for p, n in pairs]
    if not trials:
        raise InputError("nothing to measure: -p and -n are 0, and there is no -pg")
    table, printed, interrupted = TABLES[output], 0, False
    try:
        for model, device in itertools.product(models or (None,), devices or ("auto",)):
            with _opened(model, device) as (runner, subject):
                check(runner, trials)
                for trial in trials:
                    result = None
                    try:
                        for result in run(runner, trial, repetitions, not no_warmup):
                            _progress(trial, len(result.samples_ns), repetitions)
                    finally:  # also what there is of a trial that was interrupted
                        _progress(None, 0, 0)
                        if result is not None:
                            when = datetime.now(timezone.utc).isoformat(timespec="seconds")
                            print(table.row(record(subject, result, when), printed), end="", flush=True)
                            printed += 1
    except KeyboardInterrupt:
        interrupted = True
    if printed:
        print(table.end, end="", flush=True)
    if interrupted:
        print("interrupted; what was measured is above", file=sys.stderr)
        sys.exit(130)


def _progress(test: Trial | None, done: int, total: int) -> None:
    """One line on a terminal's standard error, wiped afterwards."""
    if sys.stderr.isatty():
        text = f"{test.name}: {done} of {total}" if test else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


@contextmanager
def _opened(model: str | None, device: str) -> Iterator[tuple[Runner, Subject]]:
    """The runner of a model on a device, closed afterwards."""
    from ..engine import load
    from ..engine.synthetic import PREFIX, load_synthetic

    with progress_bar() as progress:
        if model is not None and model.startswith(PREFIX):
            synthetic, report = load_synthetic(model, device, progress)
            runner: Runner = synthetic
            close = synthetic.close
        else:
            loaded = load(model, device=device, progress=progress)
            runner, report, close = loaded.runner, loaded.report, loaded.close
    try:
        yield runner, _subject(runner, report)
    finally:
        close()


def _subject(runner: Runner, report: LoadReport) -> Subject:
    from ..bench.tables import Subject
    from ..runtime.gpu_model import GpuModel

    facts = runner.device.facts if isinstance(runner, GpuModel) else None
    most = next(iter(report.types))
    return Subject(
        model_filename=str(report.path),
        model_type=f"{report.name} {most.upper()}" if report.path.suffix == ".gguf" else report.name,
        model_size=report.file_bytes,
        model_n_params=report.parameters,
        backend=facts.backend if facts else "CPU",
        device=facts.name if facts else "NumPy",
        driver=facts.driver if facts else "",
        version=__version__,
        commit=_commit(),
        cache=report.cache,
    )


def _commit() -> str:
    """The commit of the checkout that this package runs from, if it does."""
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return "unknown"
