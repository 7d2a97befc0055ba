"""`shaderlm serve` in a process of its own, for as long as it is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import InputError, ModelError

_LISTENING = "listening on "
_END_SECONDS = 10.0
# The options are those given here: none of a file, and none of the environment.
_COMMAND = (sys.executable, "-m", "shaderlm", "--config", os.devnull)


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("SHADERLM_SERVE_", "SHADERLM_BENCH_"))
    }


class ServerProcess:
    """A server that was started. What it says on standard error goes to ours, except for its address."""

    def __init__(self, options: Sequence[str]) -> None:
        command = [*_COMMAND, "serve", "--port", "0", "--drain", "0"]
        command += ["--log-file", os.devnull, *options]
        # Ctrl-C of a terminal goes to all of its processes: this one must outlive the report of what was measured.
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        self._process = subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            **apart,
        )
        self._url, self._url_known = "", threading.Event()
        self._reader = threading.Thread(target=self._read, name="server's words", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith(_LISTENING):
                self._url = line.removeprefix(_LISTENING).strip()
                self._url_known.set()
            elif " is ready on " not in line:
                print(line, end="", file=sys.stderr, flush=True)
        self._url_known.set()

    def is_alive(self) -> bool:
        """Does it run?"""
        return self._process.poll() is None

    def url(self) -> str:
        """Its address, when it listens."""
        self._url_known.wait()
        if not self._url:
            raise self.failure()
        return self._url

    def failure(self) -> Exception:
        """That it ended; the reason is on standard error already."""
        code = self._process.wait()
        kind = InputError if code == 2 else ModelError
        return kind(f"the server ended with exit code {code} before it could be measured")

    def stop(self) -> None:
        """End it, and wait for its end."""
        if self.is_alive():
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextmanager
def server_process(options: Sequence[str]) -> Iterator[ServerProcess]:
    """A server that ends with the block, also if Ctrl-C or SIGTERM end this process, whenever they come.

    Both wait while the server is started or ended. Within the block, both are what SIGINT was.
    """
    waiting: list[int] = []

    def wait(number: int, _: object) -> None:
        waiting.append(number)

    before = {each: signal.signal(each, wait) or signal.SIG_DFL for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = ServerProcess(options)
        try:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
            if waiting:
                raise KeyboardInterrupt
            yield process
        finally:
            for each in before:
                signal.signal(each, wait)
            process.stop()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def bench_decode(options: Sequence[str]) -> float:
    """Tokens per second of `shaderlm bench`'s tg128, in a process of its own."""
    command = [*_COMMAND, "bench", "-p", "0", "-n", "128", "-r", "3", "-o", "json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        kind = InputError if done.returncode == 2 else ModelError
        raise kind(f"`bench` ended with exit code {done.returncode}")
    return float(json.loads(done.stdout)[0]["avg_ts"])
