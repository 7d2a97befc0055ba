"""The command line. Thin: each command checks its arguments, calls one room, and prints."""

from __future__ import annotations

import io
import sys

import click

from .. import __version__
from ..errors import InputError, ShaderlmError
from .bench import bench
from .devices import devices


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
def app() -> None:
    """Large language models on any GPU, through WebGPU."""


app.add_command(devices)
app.add_command(bench)


def main() -> None:
    """Entry point: an expected problem is one line and exit code 1 (2 for a wrong argument), no traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Windows pipe may be cp1252, which has no →
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        app()
    except ShaderlmError as problem:
        print(f"shaderlm: {problem}", file=sys.stderr)
        sys.exit(2 if isinstance(problem, InputError) else 1)
