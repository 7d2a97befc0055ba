"""Processes that work within limits, kept for the next request: `process.py` is what they run."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from ..errors import InputError, ShaderlmError
from . import process
from .process import GROWN, HAS_TIMER, MEMORY, PATIENCE, read_frame, write_frame

# All that a process gets of the environment: for dates, for Windows, and for Pythons whose library is elsewhere.
_ENVIRONMENT = ("TZ", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_LARGE_BYTES = 1 << 20  # of a frame: a process that had one is not kept, for Python keeps memory that it once had


class Answer(NamedTuple):
    """A word that says what it is, a text, and the seconds that it took."""

    kind: str
    text: str
    seconds: float


class LimitedProgram:
    """A program, in as many processes as are needed at the same time, up to a limit. For several threads.

    path: a file of Python whose `make()` gives a function from a request to an answer: a word and a text. It imports
    the standard library and `packages`.
    """

    def __init__(self, path: str, packages: Sequence[str], *, processes: int = 4, memory: int = 40 << 20) -> None:
        self._path, self._packages, self._most, self._memory = path, packages, processes, memory
        self._forget()
        _programs.add(self)

    def _forget(self) -> None:
        """Begin anew. After a fork the processes are still those of the parent: they are neither used nor ended."""
        self._of_parent = getattr(self, "_idle", [])
        self._changed = threading.Condition()
        self._idle, self._count, self._starting = list[_Process](), 0, False

    def start(self) -> None:
        """Start a process in another thread, for a first question that is expected soon."""
        with self._changed:
            if self._count or self._starting:
                return
            self._starting = True
        try:
            threading.Thread(target=self._start, name="limited", daemon=True).start()
        except RuntimeError:  # no more threads
            self._starting = False

    def _start(self) -> None:
        with suppress(ShaderlmError), self._process(first=True):  # the question will meet the same error
            pass

    def ask(self, question: Mapping[str, Any], seconds: float, most: int) -> Answer:
        """What the program says, in at most so many bytes; or one of these words.

        time: it took more than these seconds, of the processor where the system can tell them. memory: it needed too
        much. ended: the process did, whatever the reason. How long one waits for a process does not count.
        """
        try:
            request = {"seconds": seconds, "memory": self._memory, "question": question}
            frame = json.dumps(request, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as problem:
            raise InputError(f"values must be JSON; {problem}") from None
        with self._process() as process:
            started = time.monotonic()
            answer = process.answer(frame, most)
            if answer is None:
                late = time.monotonic() - started >= seconds * (PATIENCE if HAS_TIMER else 1)
                return Answer("time" if late or process.was_timed_out() else "ended", "", seconds)
        head, _, text = answer.partition(b"\n")
        kind, took = head.decode().split()
        return Answer(kind.removesuffix(GROWN), text.decode(errors="surrogatepass"), float(took))

    @contextmanager
    def _process(self, first: bool = False) -> Iterator[_Process]:
        """One that is idle, or a new one; waits where there are enough. One that is interrupted is not used again."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or (self._count < self._most and self._starting == first))
            process = self._idle.pop() if self._idle else None
            self._count += process is None
        try:
            if process is not None and process.has_ended():
                process.end()
                process = None
            if process is None:
                process = _Process(self._path, self._packages)
            yield process
        except BaseException:
            if process is not None:
                process.end()
            raise
        finally:
            with self._changed:
                if first:
                    self._starting = False
                if process is not None and process.is_alive:
                    self._idle.append(process)
                else:
                    self._count -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """End the processes that are idle."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._count -= len(idle)
        for each in idle:
            each.end()


class _Process:
    """A process that answers one request at a time."""

    def __init__(self, path: str, packages: Sequence[str]) -> None:
        specs = map(find_spec, packages)
        folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin)
        # -I and -S: it imports nothing that the environment or a folder brings.
        command = [sys.executable, "-I", "-S", process.__file__, path, *folders]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # A group of its own: Ctrl-C of a terminal is for whoever started this, and could end it while Python starts.
        if sys.platform == "win32":
            pipes["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
        else:
            pipes["process_group"] = 0
        try:
            self._process = subprocess.Popen(command, env=environment, **pipes)
        except OSError as problem:
            raise ShaderlmError(f"a process could not be started ({' '.join(command)}): {problem}") from None
        self.is_alive = True
        try:
            self._read(1 << 10)
        except BaseException:
            self.end()
            raise
        if not self.is_alive:
            raise ShaderlmError(f"a process ended at once: {' '.join(command)}")

    def answer(self, frame: bytes, most: int) -> bytes | None:
        """What it says, in at most so many bytes; None: it ended."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, frame)
            answer = self._read(most)
        except OSError:  # it ended while it read
            answer = None
        word = b"" if answer is None else answer.split(maxsplit=1)[0]
        if word in (b"", MEMORY.encode()) or word.endswith(GROWN.encode()) or len(frame) > _LARGE_BYTES:
            self.end()
        return answer

    def _read(self, most: int) -> bytes | None:
        assert self._process.stdout is not None
        frame = read_frame(self._process.stdout, most)
        if frame is None:
            self.end()
        return frame

    def has_ended(self) -> bool:
        """Did it end by itself? The system may end processes where memory is short."""
        return self._process.poll() is not None

    def was_timed_out(self) -> bool:
        """Did the timer of the processor's time end it?"""
        return HAS_TIMER and self._process.returncode == -signal.SIGPROF

    def end(self) -> None:
        """End it, whatever it does."""
        self.is_alive = False
        self._process.kill()
        with suppress(OSError, ValueError):  # what was not written; ended before
            self._process.communicate()


def _plain(value: Any) -> Any:
    """What JSON has for other kinds of mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} is not")


_programs = WeakSet[LimitedProgram]()


def _each(method: str) -> Any:
    def run() -> None:
        for program in list(_programs):
            getattr(program, method)()

    return run


atexit.register(_each("end"))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_each("_forget"))
