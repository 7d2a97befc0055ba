"""The command line. Thin: each command checks its arguments, calls one room, and prints."""

from __future__ import annotations

import sys

import typer

from ..errors import InputError, ShaderlmError
from . import bench, devices

app = typer.Typer(
    name="shaderlm",
    help="Large language models on any GPU, through WebGPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("devices")(devices.devices)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from .. import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: an expected problem is one line and exit code 1 (2 for a wrong argument), no traceback."""
    try:
        app()
    except ShaderlmError as problem:
        print(f"shaderlm: {problem}", file=sys.stderr)
        sys.exit(2 if isinstance(problem, InputError) else 1)
    except KeyboardInterrupt:
        print("shaderlm: interrupted", file=sys.stderr)
        sys.exit(130)
