"""The options of `shaderlm bench` and what it does with them."""

from __future__ import annotations

import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..version import __version__
from .completion import complete_models
from .loading import count_bar
from .models import check_device, is_synthetic, load_any, name_with_format, open_described
from .options import apply_options, backend_option, ignore_key_option, precision_option, tune_option

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..bench.regression import Speed
    from ..bench.speed import Trial
    from ..engine import LanguageModel
    from ..formats.checkpoint import Checkpoint
    from ..gpu import Backend, DeviceCaps

Command = TypeVar("Command", bound=Callable[..., Any])
FORMATS = ("md", "json", "jsonl")
THRESHOLD = 5.0
_REDRAW_SECONDS = 0.1
_CLOCK_SECONDS = 1.0
_SLOW_SECONDS = 5.0  # of a warm-up: from here on, a bar that is redrawn once a second takes no time that counts


def numbers(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """1,128,512"""
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError:
        counts = (-1,)
    if min(counts) < 0:
        raise click.BadParameter(f"{text!r} must be whole numbers with commas between them", ctx, param)
    return counts


def numbers_above_0(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """1,128,512; none where nothing is said."""
    counts = () if text is None else numbers(ctx, param, text)
    if 0 in counts:
        raise click.BadParameter(f"{text!r} must be numbers above 0", ctx, param)
    return counts


def _pairs(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """512,128"""
    pairs = []
    for text in texts:
        pair = numbers(ctx, param, text)
        if len(pair) != 2 or min(pair) < 1:
            raise click.BadParameter(f"{text!r} must be two numbers above 0, prompt,generated", ctx, param)
        pairs.append(pair)
    return tuple(pairs)


def _sizes(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[tuple[int, int], ...]:
    """1024x1024,640×480; none where nothing is said."""
    sizes = []
    for word in () if text is None else text.split(","):
        size = re.fullmatch(r"\s*(\d{1,9})\s*[x×X]\s*(\d{1,9})\s*", word)
        if size is None:
            expected = "must be the width and the height of pictures, 1024x1024, with commas between several"
            raise click.BadParameter(f"{text!r} {expected}", ctx, param)
        sizes.append((int(size[1]), int(size[2])))
    return tuple(sizes)


def _percent(ctx: click.Context, param: click.Parameter, percent: float | None) -> float | None:
    if percent is not None and not 0 <= percent < 100:  # nor NaN, with which every run would pass
        raise click.BadParameter(f"{percent:g} must be at least 0 and below 100", ctx, param)
    return percent


def speed_options(command: Command) -> Command:
    """As llama-bench has them, where it has them."""
    named = "Model, as in `generate`, or synthetic:SHAPE:FORMAT: random weights of that shape. May be repeated."
    where = "auto, cpu, numpy or an adapter. May be repeated."
    listed = click.Choice(FORMATS)
    file = click.Path(path_type=Path)
    text = "Time tokenising, sampling (temperature 0.8, top-p 0.95) and detokenising too: what a user waits for."
    at_once = "Sequences that are generated at once, each with -n tokens; t/s are those of all of them."
    pictures = "Time pictures of this size instead: pixels to features, and to the first token; -np counts pictures."
    against = "Compare with the rows of FILE, from --save or -o json; exit code 1 if one is slower."
    slower = f"How much slower than --against a row may be.  [default: {THRESHOLD:g}]"
    options = (
        click.option("-m", "--model", "models", multiple=True, shell_complete=complete_models, help=named),
        click.option("-p", "--n-prompt", "prompts", default="512", callback=numbers, help="Prompt tokens: 1,128,512."),
        click.option("-n", "--n-gen", "generated", default="128", callback=numbers, help="Generated tokens: 1,128."),
        click.option("-pg", "both", multiple=True, callback=_pairs, help="PROMPT,GENERATED, timed as one. Repeatable."),
        click.option("-np", "--parallel", default="1", callback=numbers, metavar="1,2,4", help=at_once),
        click.option("-d", "--n-depth", "depths", default="0", callback=numbers, help="Tokens already in the cache."),
        click.option("--image", "images", metavar="WxH,…", callback=_sizes, help=pictures),
        click.option("-r", "--repetitions", default=5, show_default=True, type=click.IntRange(1, 1000)),
        click.option("-o", "--output", default="md", show_default=True, type=listed, help="Format of the results."),
        click.option("--device", "devices", multiple=True, help=where),
        backend_option,
        precision_option,
        tune_option,
        ignore_key_option,
        click.option("--no-warmup", is_flag=True, help="Time the first run too."),
        click.option("--with-text", is_flag=True, help=text),
        click.option("--save", type=file, metavar="FILE", help="Write the rows there as JSON, for --against."),
        click.option("--against", type=file, metavar="FILE", help=against),
        click.option("--threshold", type=float, metavar="PERCENT", callback=_percent, help=slower),
    )
    return apply_options(options, command)


def measure_models(
    *,
    prompts: Sequence[int],
    generated: Sequence[int],
    both: Sequence[tuple[int, int]],
    parallel: Sequence[int],
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
    from ..bench import regression
    from ..files import check_writable

    trials = _trials(prompts, generated, both, parallel, depths, with_text)
    subjects = list(itertools.product(models or (None,), devices or ("auto",)))
    if threshold is not None and against is None:
        raise click.UsageError("--threshold is how much slower than --against FILE a row may be; give that too")
    saved = regression.read(against) if against else None
    if save:
        check_writable(save)
    rows = Rows(output, parallel != (1,))
    interrupted = False
    try:
        with ExitStack() as opened:
            checkpoints = _check(models, devices, repeated["backend"], trials, repeated["ignore_keys"], opened)
            _measure(subjects, trials, rows, checkpoints=checkpoints, **repeated)
    except KeyboardInterrupt:
        interrupted = True
    finally:  # also what there is before an error
        if save and rows.records:
            regression.save(save, rows.records)
        rows.end()
    if interrupted:
        undone = ", nothing was compared" if against else ""
        print(f"interrupted; what was measured is above{undone}", file=sys.stderr)
        sys.exit(130)
    if saved is not None:
        _compare(saved, rows, THRESHOLD if threshold is None else threshold)


def _trials(
    prompts: Sequence[int],
    generated: Sequence[int],
    both: Sequence[tuple[int, int]],
    parallel: Sequence[int],
    depths: Sequence[int],
    text: bool,
) -> list[Trial]:
    from ..bench.speed import Trial
    from ..errors import InputError

    several = max(parallel) > 1
    if min(parallel) < 1:
        raise InputError(f"--parallel counts sequences: numbers above 0, got {','.join(map(str, parallel))}")
    if several and text:
        raise InputError("--with-text times one sequence; leave it out, or --parallel")
    if several and not any(generated):
        raise InputError("--parallel is for generated tokens, and -n is 0")
    shapes = [(p, 0, 1) for p in prompts if p]
    shapes += [(0, n, sequences) for n in generated if n for sequences in parallel]
    shapes += [(p, n, 1) for p, n in both]
    if not shapes:
        raise InputError("nothing to measure: -p and -n are 0, and there is no -pg")
    return [Trial(p, n, depth, text, sequences) for depth in depths for p, n, sequences in shapes]


def _check(
    models: Sequence[str],
    devices: Sequence[str],
    backend: Backend,
    trials: Sequence[Trial],
    ignore_keys: Sequence[str],
    opened: ExitStack,
) -> dict[str | None, Checkpoint]:
    """What can be known to be wrong before any weight is loaded, of all models and devices.

    The checkpoints of the models, by their names: they stay open as long as `opened`.
    """
    from ..bench.speed import check
    from ..errors import InputError

    without = next((model for model in models if is_synthetic(model)), None)
    if trials[0].text and without is not None:
        raise InputError(f"{without} has no tokenizer, so there is no text to time; leave out --with-text")
    if ignore_keys and without is not None:
        raise InputError(f"{without} has no metadata; leave out --ignore-key")
    for device in devices:
        check_device(device, backend)
    checkpoints: dict[str | None, Checkpoint] = {}
    for model in models or (None,):
        if model in checkpoints:
            continue
        _, config, checkpoint = open_described(model, ignore_keys)
        if checkpoint is not None:
            checkpoints[model] = opened.enter_context(checkpoint)
        check(config.context, trials)
    return checkpoints


class Rows:
    """Rows as they are measured: printed at once, and kept."""

    def __init__(self, output: str, parallel: bool) -> None:
        self.output, self._parallel = output, parallel
        self.records: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """One more."""
        from ..bench.tables import printed

        self.records.append(row)  # before it is printed, which may fail
        print(printed(self.output, row, len(self.records) - 1, parallel=self._parallel), end="", flush=True)

    def end(self) -> None:
        """There are no more."""
        if self.records and self.output == "json":
            print("\n]", flush=True)


def _measure(
    subjects: Sequence[tuple[str | None, str]],
    trials: Sequence[Trial],
    rows: Rows,
    *,
    repetitions: int,
    no_warmup: bool,
    precision: str,
    no_tune: bool,
    backend: Backend,
    ignore_keys: Sequence[str],
    checkpoints: Mapping[str | None, Checkpoint],
) -> None:
    from ..bench.speed import check, run
    from ..bench.tables import record

    started, total = time.monotonic(), len(subjects) * len(trials) * repetitions
    done = itertools.count(0, repetitions)
    for name, device in subjects:
        options: dict[str, Any] = {
            "precision": precision,
            "tune": not no_tune,
            "measure": True,
            "ignore_keys": ignore_keys,
        }
        with load_any(name, device, backend=backend, checkpoint=checkpoints.get(name), **options) as loaded:
            subject = subject_of(loaded)
            check(loaded.config.context, trials)  # a device may hold less than the model's
            _warn_if_long(loaded, trials, repetitions + (not no_warmup))
            for trial in trials:
                samples: tuple[int, ...] = ()
                try:
                    with bar(trial.name, next(done), total, started, warming=not no_warmup) as repeated:
                        for samples in run(loaded, trial, repetitions, not no_warmup):
                            repeated(len(samples))
                finally:  # also what there is of a trial that was interrupted
                    if samples:
                        when = datetime.now(UTC).isoformat(timespec="seconds")
                        rows.add(record(subject, trial, samples, when))


def _compare(saved: Sequence[Speed], rows: Rows, percent: float) -> None:
    """Under the results for people; beside them for programs. Exit code 1 for a regression."""
    from ..bench import regression
    from ..bench.tables import compared

    now = [regression.speed(row, "this run") for row in rows.records]
    comparison = regression.compare(saved, now, percent)
    for_people = rows.output == "md"
    lines = ["", *compared(comparison)] if for_people else compared(comparison)
    print("\n".join(lines), file=sys.stdout if for_people else sys.stderr, flush=True)
    if comparison.slower:
        sys.exit(1)


# Multiply-adds per second on a CPU, roughly: with SmolLM2 on 2 slow cores.
_CPU_FLOPS = {"cpu (NumPy)": 6e9, "cpu (LLVM)": 30e9, "WGSL kernels in software": 0.6e9}
_LONG_SECONDS = 120


def _warn_if_long(loaded: LanguageModel, trials: Sequence[Trial], runs: int) -> None:
    """Where the CPU computes, say roughly how long it will take."""
    from ..runtime.gpu_runner import GpuRunner

    runner = loaded.runner
    on_gpu = isinstance(runner, GpuRunner)
    if isinstance(runner, GpuRunner) and not runner.device.caps.software:
        return
    how = "WGSL kernels in software" if on_gpu else loaded.report.device
    tokens = runs * sum(trial.depth + trial.tokens for trial in trials)
    seconds = 2 * loaded.report.parameters * tokens / _CPU_FLOPS[how]
    if seconds >= _LONG_SECONDS:
        print(
            f"shaderlm: the CPU computes ({how}): this takes {seconds / 60:,.0f} minutes, very roughly. "
            "Fewer tokens take less: -p 32 -n 16 -r 1",
            file=sys.stderr,
        )


@contextmanager
def bar(name: str, before: int, total: int, started: float, *, warming: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; the function is told how many repetitions are done. Gone afterwards.

    While it warms up, and where a repetition takes seconds, a thread redraws the bar once a second, so that its clock
    runs. Otherwise it is drawn between repetitions: no thread takes time from short ones.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    bars = count_bar(get_time=time.monotonic, auto_refresh=False)
    task = bars.add_task(f"{name}: warming up" if warming else name, completed=before, total=total)
    bars.tasks[0].start_time = started
    began, drawn = time.monotonic(), -math.inf
    over = threading.Event()
    clock = threading.Thread(target=_redraw, args=(bars, over), name="bar", daemon=True)

    def repeated(done: int) -> None:
        nonlocal drawn
        if done == 0 and time.monotonic() - began < _SLOW_SECONDS:
            over.set()
            clock.join()
        bars.update(task, completed=before + done, description=name)
        if time.monotonic() - drawn >= _REDRAW_SECONDS:
            bars.refresh()
            drawn = time.monotonic()

    with bars:
        if warming:
            clock.start()
        try:
            yield repeated
        finally:
            over.set()
            if warming:
                clock.join()


def _redraw(bars: Progress, over: threading.Event) -> None:
    while not over.wait(_CLOCK_SECONDS):
        bars.refresh()


def subject_of(loaded: LanguageModel) -> dict[str, Any]:
    """The keys of a row that say what was measured."""
    from ..runtime.gpu_runner import GpuRunner
    from .build import commit

    runner, report = loaded.runner, loaded.report
    caps = runner.device.caps if isinstance(runner, GpuRunner) else None
    return {
        "build_commit": commit(),
        "build_number": __version__,
        "backends": _backend(caps) if caps else "CPU",
        "gpu_info": caps.name if caps else report.device,
        "driver": caps.driver if caps else "",
        "model_filename": str(report.path),
        "model_type": name_with_format(loaded),
        "model_size": report.tensor_bytes,
        "model_n_params": report.parameters,
        "type_k": report.cache,
        "type_v": report.cache,
        "precision": report.precision,
    }


def _backend(caps: DeviceCaps) -> str:
    """The API of the driver, and the implementation of WebGPU where it is not wgpu."""
    return caps.backend if caps.implementation == "wgpu" else f"{caps.backend} Dawn"
