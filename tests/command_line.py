"""Runs `shaderlm` for tests: in this process, which is quick, or in one of its own, which can be interrupted."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from shaderlm.cli import main

# A shell that runs the tests in the background (`./dev test &` in a script) has them ignore Ctrl-C: not so a command.
_HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{_HEARS}; from shaderlm.cli import main; main()"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Recorder(io.TextIOWrapper):
    """A standard stream in memory, which remembers what had been written at each flush."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="\n")
        self.flushed: list[str] = []

    def flush(self) -> None:
        super().flush()
        if not self.buffer.closed:
            self.flushed.append(self.text())

    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


def shaderlm(*arguments: object, given: str | bytes = b"", out: io.TextIOWrapper | None = None) -> Done:
    """`shaderlm ARGUMENTS` in this process; `given` is its standard input."""
    stdin = io.TextIOWrapper(io.BytesIO(given.encode() if isinstance(given, str) else given))
    stdout, stderr = out or Recorder(), Recorder()
    streams = (redirect_stdout(stdout), redirect_stderr(stderr), patch.object(sys, "stdin", stdin))
    with streams[0], streams[1], streams[2], patch.object(sys, "argv", ["shaderlm", *map(str, arguments)]):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    stderr.flush()
    if isinstance(stdout, Recorder):
        stdout.flush()
    return Done(code, stdout.text() if isinstance(stdout, Recorder) else "", stderr.text())


def start(*arguments: object) -> subprocess.Popen[str]:
    """`shaderlm ARGUMENTS` in a process of its own, with pipes for its streams."""
    pipe = subprocess.PIPE
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", bufsize=0)
