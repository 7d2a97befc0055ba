"""Loading for the commands: a bar on the terminal while files and weights move, nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine import LanguageModel

Progress = Callable[[str, int, int], None]


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A function for `load(progress=...)`, or None where nobody would see the bar. It is gone afterwards."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    # stdout is left alone: what is written there is the answer, and not for rich to wrap.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bars:

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label)
            bars.update(tasks[label], completed=done, total=total)

        yield update


def load_model(model: str | None, device: str, context: int | None, precision: str, tune: bool) -> LanguageModel:
    """The model, loaded under a progress bar."""
    from ..engine import load

    with progress_bar() as progress:
        return load(model, device=device, context=context, precision=precision, tune=tune, progress=progress)


@contextmanager
def spoken() -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal's standard error with what is being measured; nothing in a pipe."""
    from rich.console import Console

    err = Console(stderr=True)
    if not err.is_terminal:
        yield lambda text: None
        return
    # Refreshed by hand, between measurements: a thread that draws would be measured too.
    from rich.live import Live
    from rich.text import Text

    with Live(console=err, transient=True, auto_refresh=False, redirect_stdout=False) as live:
        yield lambda text: live.update(Text(f"measuring {text} …"), refresh=True)
