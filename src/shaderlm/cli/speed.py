"""The options of `shaderlm bench` and what it does with them."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .. import __version__
from .loading import progress_bar
from .options import precision_option, tune_option

if TYPE_CHECKING:
    from ..bench.guard import Speed
    from ..bench.speed import Trial
    from ..bench.tables import Subject
    from ..engine import LanguageModel
    from ..engine.report import LoadReport
    from ..runtime.session import Runner

Command = TypeVar("Command", bound=Callable[..., Any])
FORMATS = ("md", "csv", "json", "jsonl", "sql")
THRESHOLD = 5.0
_REDRAW_SECONDS = 0.1


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


def _percent(ctx: click.Context, param: click.Parameter, given: float | None) -> float | None:
    if given is not None and not 0 <= given < 100:  # nor NaN, with which every run would pass
        raise click.BadParameter(f"{given:g} must be at least 0 and below 100", ctx, param)
    return given


def speed_options(command: Command) -> Command:
    """As llama-bench has them, where it has them."""
    named = "Model, as in `generate`, or synthetic:SHAPE:FORMAT: random weights of that shape. May be repeated."
    where = "auto, cpu or an adapter. May be repeated."
    listed = click.Choice(FORMATS)
    file = click.Path(path_type=Path)
    text = "Time tokenising, sampling (temperature 0.8, top-p 0.95) and detokenising too: what a user waits for."
    against = "Compare with the rows of FILE, from --save or -o json; exit code 1 if one is slower."
    slower = f"How much slower than --against a row may be.  [default: {THRESHOLD:g}]"
    options = (
        click.option("-m", "--model", "models", multiple=True, help=named),
        click.option("-p", "--n-prompt", "prompts", default="512", callback=_numbers, help="Prompt tokens: 1,128,512."),
        click.option("-n", "--n-gen", "generated", default="128", callback=_numbers, help="Generated tokens: 1,128."),
        click.option("-pg", "both", multiple=True, callback=_pairs, help="PROMPT,GENERATED, timed as one. Repeatable."),
        click.option("-d", "--n-depth", "depths", default="0", callback=_numbers, help="Tokens already in the cache."),
        click.option("-r", "--repetitions", default=5, show_default=True, type=click.IntRange(1, 1000)),
        click.option("-o", "--output", default="md", show_default=True, type=listed, help="Format of the results."),
        click.option("--device", "devices", multiple=True, help=where),
        precision_option,
        tune_option,
        click.option("--no-warmup", is_flag=True, help="Time the first run too."),
        click.option("--with-text", is_flag=True, help=text),
        click.option("--save", type=file, metavar="FILE", help="Write the rows there as JSON, for --against."),
        click.option("--against", type=file, metavar="FILE", help=against),
        click.option("--threshold", type=float, metavar="PERCENT", callback=_percent, help=slower),
    )
    for option in reversed(options):
        command = option(command)
    return command


def measure_models(
    *,
    prompts: Sequence[int],
    generated: Sequence[int],
    both: Sequence[tuple[int, int]],
    depths: Sequence[int],
    with_text: bool,
    models: Sequence[str],
    devices: Sequence[str],
    output: str,
    save: Path | None,
    against: Path | None,
    threshold: float | None,
    **repeated: Any,
) -> None:
    """Run every test on every model and device; print a row as soon as there is one, then save and compare them."""
    from ..bench import guard
    from ..bench.saving import check_place

    trials = _trials(prompts, generated, both, depths, with_text)
    subjects = list(itertools.product(models or (None,), devices or ("auto",)))
    _check(models, with_text)
    if threshold is not None and against is None:
        raise click.UsageError("--threshold is how much slower than --against FILE a row may be; give that too")
    saved = guard.read(against) if against else None
    if save:
        check_place(save)
    rows = _Rows(output)
    interrupted = False
    try:
        _measure(subjects, trials, rows, **repeated)
    except KeyboardInterrupt:
        interrupted = True
    finally:  # also what there is before an error
        if save and rows.found:
            guard.save(save, rows.found)
        rows.end()
    if interrupted:
        undone = ", nothing was compared" if against else ""
        print(f"interrupted; what was measured is above{undone}", file=sys.stderr)
        sys.exit(130)
    if saved is not None:
        _compare(saved, rows, THRESHOLD if threshold is None else threshold)


def _trials(
    prompts: Sequence[int], generated: Sequence[int], both: Sequence[tuple[int, int]], depths: Sequence[int], text: bool
) -> list[Trial]:
    from ..bench.speed import Trial
    from ..errors import InputError

    pairs = [(p, 0) for p in prompts if p] + [(0, n) for n in generated if n] + list(both)
    if not pairs:
        raise InputError("nothing to measure: -p and -n are 0, and there is no -pg")
    return [Trial(p, n, depth, text) for depth in depths for p, n in pairs]


def _check(models: Sequence[str], with_text: bool) -> None:
    """What can be known to be wrong before anything is loaded."""
    from ..engine.synthetic import PREFIX
    from ..errors import InputError

    without = next((model for model in models if model.startswith(PREFIX)), None)
    if with_text and without is not None:
        raise InputError(f"{without} has no tokenizer, so there is no text to time; leave out --with-text")


class _Rows:
    """Rows as they are found: printed at once, and kept."""

    def __init__(self, output: str) -> None:
        from ..bench.tables import FORMATS as TABLES

        self.for_people = output == "md"
        self.found: list[dict[str, Any]] = []
        self._table = TABLES[output]

    def add(self, row: dict[str, Any]) -> None:
        self.found.append(row)  # before it is printed, which may fail
        print(self._table.row(row, len(self.found) - 1), end="", flush=True)

    def end(self) -> None:
        if self.found:
            print(self._table.end, end="", flush=True)


def _measure(
    subjects: Sequence[tuple[str | None, str]],
    trials: Sequence[Trial],
    rows: _Rows,
    *,
    repetitions: int,
    no_warmup: bool,
    precision: str,
    no_tune: bool,
) -> None:
    from ..bench.speed import check, run
    from ..bench.tables import record

    started, total = time.monotonic(), len(subjects) * len(trials) * repetitions
    done = itertools.count(0, repetitions)
    for name, device in subjects:
        with _opened(name, device, precision, not no_tune) as (runner, subject, model):
            check(runner, trials)
            for trial in trials:
                result = None
                try:
                    with _bar(trial.name, next(done), total, started) as repeated:
                        for result in run(runner, trial, repetitions, not no_warmup, model):
                            repeated(len(result.samples_ns))
                finally:  # also what there is of a trial that was interrupted
                    if result is not None:
                        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
                        rows.add(record(subject, result, when))


def _compare(saved: Sequence[Speed], rows: _Rows, percent: float) -> None:
    """Under the results for people; beside them for programs. Exit code 1 for a regression."""
    from ..bench import guard
    from ..bench.tables import compared

    now = [guard.speed(row, "this run") for row in rows.found]
    comparison = guard.compare(saved, now, percent)
    lines = ["", *compared(comparison)] if rows.for_people else compared(comparison)
    print("\n".join(lines), file=sys.stdout if rows.for_people else sys.stderr, flush=True)
    if comparison.slower:
        sys.exit(1)


@contextmanager
def _bar(name: str, before: int, total: int, started: float) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; the function is told how many repetitions are done. Gone afterwards.

    Drawn by hand, between repetitions and not after each of a thousand short ones: no thread takes time from them.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    quiet: dict[str, bool] = {"auto_refresh": False, "transient": True, "redirect_stdout": False}
    bars = Progress(*columns, console=Console(stderr=True), get_time=time.monotonic, **quiet)
    task = bars.add_task(name, completed=before, total=total)
    bars.tasks[0].start_time = started
    drawn = -math.inf

    def repeated(done: int) -> None:
        nonlocal drawn
        bars.update(task, completed=before + done)
        if time.monotonic() - drawn >= _REDRAW_SECONDS:
            bars.refresh()
            drawn = time.monotonic()

    with bars:
        yield repeated


@contextmanager
def _opened(
    model: str | None, device: str, precision: str, tune: bool
) -> Iterator[tuple[Runner, Subject, LanguageModel | None]]:
    """The runner of a model on a device, closed afterwards; and the whole model, if it is one with text."""
    from ..engine import load
    from ..engine.synthetic import PREFIX, load_synthetic

    loaded: LanguageModel | None = None
    with progress_bar() as progress:
        if model is not None and model.startswith(PREFIX):
            synthetic, report = load_synthetic(model, device, progress, precision=precision, tune=tune)
            runner: Runner = synthetic
            close = synthetic.close
        else:
            loaded = load(model, device=device, precision=precision, tune=tune, progress=progress)
            runner, report, close = loaded.runner, loaded.report, loaded.close
    try:
        yield runner, _subject(runner, report), loaded
    finally:
        close()


def _subject(runner: Runner, report: LoadReport) -> Subject:
    from ..bench.build import commit
    from ..bench.tables import Subject
    from ..runtime.gpu_model import GpuModel

    caps = runner.device.caps if isinstance(runner, GpuModel) else None
    most = next(iter(report.types))
    return Subject(
        model_filename=str(report.path),
        model_type=f"{report.name} {most.upper()}" if report.path.suffix == ".gguf" else report.name,
        model_size=report.file_bytes,
        model_n_params=report.parameters,
        backend=caps.backend if caps else "CPU",
        device=caps.name if caps else "NumPy",
        driver=caps.driver if caps else "",
        version=__version__,
        commit=commit(),
        cache=report.cache,
        precision=report.precision,
    )
