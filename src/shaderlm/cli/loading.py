"""What a terminal shows while a command is busy for more than a second: a bar or a line. Nothing in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn

    from ..engine import GenerationOptions, LanguageModel
    from .options import ModelOptions

Progress = Callable[[str, int, int], None]
DELAY_SECONDS = 1.0  # a bar that comes and goes within a second is noise
LINE_SECONDS = 10.0  # between lines where there is no terminal
LONG_PROMPT = 4096  # tokens from which on a bar shows how many are read
BAR_WIDTH = 8  # with six digits of tokens the line has 79 columns


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A function for `load(progress=...)`, or None where nobody would see the bar. It is gone afterwards."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _DelayedBar()
    with _later(bar.show, bar.close):
        yield bar.update


@contextmanager
def status(text: str, tokens: Callable[[], tuple[int, int]] | None = None) -> Iterator[None]:
    """A line on the terminal with what is being done and for how long. It is gone afterwards.

    `tokens` says how many are done of how many; of many, a bar shows it.
    """
    if not sys.stderr.isatty():
        yield
        return
    line = _DelayedLine(text, tokens)
    with _later(line.show, line.close):
        yield


@contextmanager
def _later(show: Callable[[], None], close: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(DELAY_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        close()


def leave_line() -> None:
    """Before a process ends in the middle of a bar or a line: the cursor comes back, on a line of its own."""
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        console.show_cursor()
        console.line()


def _bar(tokens: Callable[[], tuple[int, int]] | None) -> str:
    """A bar for more than 4,096 tokens: fewer take a moment."""
    done, total = tokens() if tokens is not None else (0, 0)
    if total <= LONG_PROMPT:
        return ""
    filled = BAR_WIDTH * done // total
    return f"{'━' * filled}{'─' * (BAR_WIDTH - filled)} {done:,} of {total:,} tokens, "


class _Delayed:
    """Something live on standard error. It is drawn once `show` has been called, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: Any = None
        self._closed = False

    def _create(self) -> Any:
        """A rich `Live` or `Progress`. It leaves stdout alone: what is written there is the generated text."""
        raise NotImplementedError

    def show(self) -> None:
        with self._lock:
            if not self._closed:
                self._live = self._create()
                self._live.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._live is not None:
                self._live.stop()


class _DelayedLine(_Delayed):
    """What is being done, for how long, and how far it is."""

    def __init__(self, text: str, tokens: Callable[[], tuple[int, int]] | None) -> None:
        super().__init__()
        self._text, self._tokens, self._began = text, tokens, time.monotonic()

    def _create(self) -> Any:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        def line() -> Text:
            seconds = time.monotonic() - self._began
            return Text(f"{self._text} … {_bar(self._tokens)}{seconds:.0f} s (Ctrl-C cancels)")

        options: dict[str, Any] = {"transient": True, "refresh_per_second": 2, "redirect_stdout": False}
        return Live(get_renderable=line, console=Console(stderr=True), **options)


class _DelayedBar(_Delayed):
    """A bar for each label, with bytes; one that only moves as long as there is no label."""

    def __init__(self) -> None:
        super().__init__()
        self._progress: dict[str, tuple[int, int]] = {}
        self._tasks: dict[str, Any] = {}

    def update(self, label: str, done: int, total: int) -> None:
        with self._lock:
            self._progress[label] = (done, total)
            if self._live is not None:
                self._draw(self._live, label)

    def _create(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        bars = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
        for label in self._progress or {"loading": (0, 0)}:
            self._draw(bars, label)
        return bars

    def _draw(self, bars: Any, label: str) -> None:
        done, total = self._progress.get(label, (0, 0))
        if label != "loading" and "loading" in self._tasks:
            bars.remove_task(self._tasks.pop("loading"))
        if label not in self._tasks:
            self._tasks[label] = bars.add_task(label)
        bars.update(self._tasks[label], completed=done, total=total or None)


def load_model(model_options: ModelOptions, generation: GenerationOptions | None = None) -> LanguageModel:
    """The model, loaded under a progress bar. Options that its vocabulary refuses end the load early."""
    from ..engine.loading import load_drafting
    from ..engine.options import generation_params

    check = None if generation is None else generation_params(generation).sampling.check_vocabulary
    options = asdict(model_options)
    options["tune"], options["vision"] = not options.pop("no_tune"), not options.pop("no_vision")
    for name in ("cache_disk", "draft_tokens"):
        if options[name] is None:
            del options[name]
    with progress_bar() as progress:
        return load_drafting(**options, progress=progress, on_vocabulary=check)


def count_bar(*more_columns: ProgressColumn, **options: Any) -> RichProgress:
    """A bar on standard error with what is done of how many. It is gone afterwards, and leaves stdout alone."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *more_columns)
    return RichProgress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, **options)


def console(width_in_pipe: int) -> Console:
    """Standard output, for tables. A pipe has no width: they are not to be folded to 80 columns."""
    from rich.console import Console

    return Console(width=None if Console().is_terminal else width_in_pipe)


@contextmanager
def spoken(*, in_pipe: bool = False) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's standard error with what is being measured. In a pipe nothing, or a line now and then."""
    from rich.console import Console

    err = Console(stderr=True)
    if not err.is_terminal:
        yield _now_and_then() if in_pipe else lambda text: None
        return
    # Refreshed by hand, between measurements: a thread that draws would be measured too.
    from rich.live import Live
    from rich.text import Text

    with Live(console=err, transient=True, auto_refresh=False, redirect_stdout=False) as live:
        yield lambda text: live.update(Text(f"measuring {text} …"), refresh=True)


def _now_and_then() -> Callable[[str], None]:
    """A function that prints a line on standard error, unless it printed one a moment ago."""
    due = float("-inf")

    def say(text: str) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + LINE_SECONDS
            print(f"measuring {text} …", file=sys.stderr, flush=True)

    return say
