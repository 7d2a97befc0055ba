"""`shaderlm batch`: a file of requests in OpenAI's batch format → a file of results. Many requests run at once."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import DeviceError, InputError, ModelError
from ..install import install_command
from .batch_files import Line, Requests, ResultFile, Results, request_file
from .batch_parquet import PARQUET, ParquetResults, parquet_requests
from .batch_ray import ray_engines
from .cache_options import cache_options
from .completion import complete_files
from .draft_options import draft_options
from .loading import count_bar, load_model
from .options import ModelOptions, model_options
from .streaming import tell

if TYPE_CHECKING:
    from ..server.batch import BatchResult
    from ..server.served import ModelNames, ServedModel

SYNC_SECONDS = 1.0


@click.command()
@click.argument("requests", metavar="REQUESTS", shell_complete=complete_files)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Where results are appended; - prints them."
)
@model_options
@cache_options
@draft_options
@click.option("--parallel", type=click.IntRange(1), metavar="N", help="Sequences that run at once.")
@click.option("--alias", "names", multiple=True, metavar="NAME", help="A name of the model in requests. Repeatable.")
@click.option("-n", "--max-tokens", type=click.IntRange(1), metavar="N", help="Limit for requests that have none.")
@click.option("--seed", type=int, metavar="N", help="Seed of requests that have none.")
@click.option("--retry-failed", is_flag=True, help="Run requests again whose result is an error.")
@click.option("--ray", "by_ray", is_flag=True, help="Run on several engines, by Ray Data. Takes Parquet, too.")
@click.option(
    "--replicas", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Engines with --ray."
)
@click.option("--ray-address", metavar="ADDR", help="With --ray: run on this cluster, such as auto or HOST:6379.")
def batch(
    requests: str,
    output: Path,
    model_options: ModelOptions,
    parallel: int | None,
    names: tuple[str, ...],
    max_tokens: int | None,
    seed: int | None,
    retry_failed: bool,
    by_ray: bool,
    replicas: int,
    ray_address: str | None,
) -> None:
    """Run a file of requests, many at once.

    REQUESTS has a request per line in the format of OpenAI's batches: custom_id, method, url (/v1/chat/completions,
    /v1/completions, /v1/embeddings) and body. Results are in the order in which they come. The same command goes on
    where a run was ended. Exit code 1: some results are errors.
    """
    _check_packages()
    if not by_ray and (replicas != 1 or ray_address is not None):
        raise click.UsageError("--replicas and --ray-address are for --ray; give it, too.")
    printed = str(output) == "-"
    if not printed and requests != "-" and output.exists() and Path(requests).exists() and output.samefile(requests):
        raise InputError(f"-o must be another file than the requests, got {output} for both")
    with _requests(requests, by_ray) as batch_requests, closing(_results(output, by_ray)) as results:
        _check_results(batch_requests, results)
        done = results.ids.keys() - results.failed if retry_failed else results.ids.keys()
        todo = [line for line in batch_requests.lines if line.custom_id not in done]
        if done:
            tell(f"{len(done):,} of {len(batch_requests.lines):,} requests have a result already")
        if todo and by_ray:
            options = {"aliases": names, "n_predict": max_tokens, "seed": seed, "parallel": parallel}
            engines = ray_engines(model_options, options, replicas, ray_address)
            _check_models(batch_requests, results, engines.names)
            with engines.started():
                if retry_failed:
                    results.drop_failed()
                _write_all(engines.results(batch_requests, todo), batch_requests, todo, results)
        elif todo:
            with load_model(model_options) as loaded:
                from ..engine import EngineOptions
                from ..formats.default_model import NAME
                from ..server.limits import Limits
                from ..server.served import ServedModel

                trusted = Limits(choices=1 << 20, stop_strings=1 << 20, tools=1 << 20)  # the file is the user's own
                source = model_options.model or NAME
                served = ServedModel(loaded, names, max_tokens, seed, embedding=True, limits=trusted, source=source)
                _check_models(batch_requests, results, served.model_names)
                if parallel is not None:
                    loaded.engine.configure(EngineOptions(parallel=parallel))
                if retry_failed:
                    results.drop_failed()
                _run(batch_requests, todo, results, served)
        failed = len(results.failed)
        hint = f", {failed:,} of them failed; --retry-failed runs those again" if failed else ""
        tell(f"{results.name} has the results of {_counted(len(batch_requests.lines))}{hint}")
    if failed:
        sys.exit(1)


def _requests(path: str, by_ray: bool) -> AbstractContextManager[Requests[Any]]:
    return parquet_requests(path) if by_ray and path.endswith(PARQUET) else request_file(path)


def _results(output: Path, by_ray: bool) -> Results:
    if str(output) == "-":
        return Results()
    return ParquetResults(output) if by_ray and output.suffix == PARQUET else ResultFile(output)


def _check_packages() -> None:
    try:
        import msgspec  # noqa: F401
    except ImportError:
        raise ModelError(f"`shaderlm batch` needs the package msgspec: {install_command('serve')}") from None


def _check_results(requests: Requests[Any], results: Results) -> None:
    """Results of other requests are an InputError: the file belongs to another batch."""
    lines = {line.custom_id: line for line in requests.lines}
    for custom_id, request_id in results.ids.items():
        line = lines.get(custom_id)
        if line is None or line.id != request_id:
            name = requests.name
            where = f"{name} does not have" if line is None else f"has changed in {name}, {requests.unit} {line.number}"
            raise InputError(
                f"{results.name} has a result of the request {custom_id!r}, which {where}. "
                "Give another -o, or remove the file"
            )


def _check_models(requests: Requests[Any], results: Results, names: ModelNames) -> None:
    """A name that is not this model's is an error at once, not one per line. Results of two models are not mixed."""
    for name, number in requests.models.items():
        if not names.know(name):
            where = f"{requests.name} {requests.unit} {number}"
            raise InputError(
                f"{where} asks for the model {name!r}, and this one is {names.name!r}; "
                f"--alias {name} gives it that name, and may be repeated"
            )
    if results.model not in (None, names.name):
        raise InputError(
            f"{results.name} has results of the model {results.model!r}, and this one is {names.name!r}. "
            "Give the same -m and --alias, or another -o"
        )


# Running -------------------------------------------------------------------------------------------------


def _run(requests: Requests[Any], todo: Sequence[Line], results: Results, served: ServedModel) -> None:
    """Each request to its result, on this machine."""
    from ..server.batch import POLL_SECONDS, BatchEngine

    engine = served.model.engine
    came = BatchEngine(served).run_or_wait((line.custom_id, requests.read(line)) for line in todo)
    blocks = ([] if each is None else [each] for each in came)
    _write_all(blocks, requests, todo, results, lambda: engine.stats().generation_tokens, POLL_SECONDS)


def _write_all(
    came: Iterator[Sequence[tuple[str, BatchResult]]],
    requests: Requests[Any],
    todo: Sequence[Line],
    results: Results,
    tokens: Callable[[], int] = lambda: 0,
    poll_seconds: float | None = None,
) -> None:
    """Write results as they come. Ctrl-C ends the program; what is finished is written.

    tokens: generated so far, where that is known here. poll_seconds: how long to wait where nothing has come; None:
    `came` waits, and Ctrl-C ends that.
    """
    began = synced = time.monotonic()
    total = len(requests.lines)
    try:
        with _progress(total, total - len(todo), tokens) as progress, _Interrupt() as interrupt:
            while True:
                interrupt.at_once = poll_seconds is None
                block = next(came, None)
                interrupt.at_once = False
                if block is None:
                    break
                for custom_id, result in block:
                    if custom_id not in results.ids:  # a request may run twice where an actor was lost
                        results.add(custom_id, result.line, failed=result.failed)
                interrupt.check()
                if not block and poll_seconds is not None:
                    time.sleep(poll_seconds)
                progress(len(results.ids))
                if time.monotonic() - synced > SYNC_SECONDS:
                    results.sync()
                    synced = time.monotonic()
    except KeyboardInterrupt:
        tell(f"interrupted: {len(results.ids):,} of {total:,} results are written{results.hint}")
        sys.exit(130)
    except DeviceError as problem:
        done = f"{len(results.ids):,} of {total:,} results are written{results.hint}"
        raise DeviceError(f"{problem}. {done}") from problem
    results.sync()
    seconds, count = time.monotonic() - began, tokens()
    speed = f"{count:,} tokens, {count / seconds:.1f} tok/s" if count else f"{len(todo) / seconds:.1f} requests/s"
    tell(f"{_counted(len(todo))} in {seconds:.1f} s: {speed}")


class _Interrupt:
    """Ctrl-C is raised by `check`: between results, never while one is written and not yet counted.

    A second Ctrl-C does not wait.
    """

    def __init__(self) -> None:
        self.at_once = False  # raise it where the program is: it waits
        self._noted = False

    def check(self) -> None:
        """Raise what has come."""
        if self._noted:
            raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        if self._noted or self.at_once:
            raise KeyboardInterrupt
        self._noted = True

    def __enter__(self) -> _Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


@contextmanager
def _progress(total: int, done: int, tokens: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error, gone afterwards; the function is told how many results there are."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import TimeRemainingColumn

    began = time.monotonic()
    bars = count_bar(TimeRemainingColumn())
    task = bars.add_task("", total=total, completed=done)

    def update(done: int) -> None:
        count = tokens()
        speed = f"{count / max(1e-9, time.monotonic() - began):,.0f} tok/s" if count else ""
        bars.update(task, completed=done, description=speed)

    with bars:
        yield update


def _counted(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"
