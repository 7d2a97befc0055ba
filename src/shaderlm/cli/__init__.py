"""The command line. Thin: each command checks its arguments, calls one package, and prints.

Modules here import heavy things inside their functions, and only the command that is run is imported.
"""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import sys

import click

from ..errors import InputError, ShaderlmError
from ..version import __version__
from .arguments import use_plain_words
from .commands import App
from .completion import VARIABLE, complete_files
from .config import configure, name_source, use_file, with_source
from .interrupts import LostInterrupts


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
@click.option(
    "--config",
    metavar="FILE",
    shell_complete=complete_files,
    help="Options of the commands, in TOML.  [default: ~/.config/shaderlm/config.toml]",
)
@click.pass_context
def app(context: click.Context, config: str | None) -> None:
    """Large language models on any GPU, through WebGPU."""
    use_file(context, config)


configure(app, below=False)  # those are configured when they are imported


class _Messages(logging.Handler):
    """Warnings of the packages below, and what they download, each as one line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        from .options import with_flags  # late: `--help` needs no options

        print("shaderlm:", with_flags(" ".join(record.getMessage().split())), file=sys.stderr, flush=True)


def main() -> None:
    """Entry point: exit code 0, 1 for an expected problem in one line, 2 for a wrong argument, 130 for Ctrl-C."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started it
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Windows pipe may be cp1252, which has no →
            stream.reconfigure(encoding="utf-8", errors="replace")
    if not os.environ.get("COLUMNS", "1").strip("0"):  # 0 is "not known"; tables of that width would be empty
        del os.environ["COLUMNS"]
    logging.getLogger("shaderlm").handlers[:] = [_Messages(logging.WARNING)]
    downloads = logging.getLogger("shaderlm.downloads")
    downloads.handlers[:], downloads.propagate = [_Messages()], False
    downloads.setLevel(logging.INFO)
    gc.set_threshold(100_000, 20, 20)  # loading makes objects that stay: looking for garbage took 50 ms of a start
    try:
        with LostInterrupts() as lost:
            code = _run(lost)
    except KeyboardInterrupt:  # while an error was printed
        code = 130
    sys.exit(code)


def _run(lost: LostInterrupts) -> int:
    """Run the command; its exit code."""
    try:
        # Not standalone: there click would turn Ctrl-C into exit code 1, as if something had failed.
        code = app.main(standalone_mode=False, complete_var=VARIABLE)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as problem:
        name_source(problem)
        use_plain_words(problem)
        problem.show()
        return problem.exit_code
    except click.Abort:
        return 130
    except ShaderlmError as problem:
        from .options import with_flags

        print(f"shaderlm: {with_source(with_flags(str(problem)))}", file=sys.stderr)
        return 2 if isinstance(problem, InputError) else 1
    except BrokenPipeError:  # click ends as quietly, with the same code, when a command meets one
        _drop_output()  # whoever read has seen enough
        return 1
    except OSError as problem:
        print(f"shaderlm: {_words(problem)}", file=sys.stderr)
        return 1
    except Exception:
        if lost.just_now():
            return 130
        raise


def _words(problem: OSError) -> str:
    """Of a file that the error names, or of the output, which has no name."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    full = problem.filename is None and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"cannot write the output: {problem.strerror}" if full else str(problem)


def _drop_output() -> None:
    """What is still buffered has no place to go, and Python must not try at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
