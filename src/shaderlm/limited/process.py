"""A process that works within limits. `pool.py` runs this file as a program, and loses the process at any time.

Some work has a cost that nobody can tell before it is done, and libraries that cannot be interrupted do it. Here the
time ends the process, whatever it computes, and its memory is limited where the system can do that. Time is that of
the processor, so that a busy machine refuses nothing; on Windows it is the clock's.

Requests and answers are frames: four bytes of length, then as many bytes. A request is JSON. An answer is a word that
says what it is, the seconds that it took, a line end, and text. Only the standard library is imported, and what the
program itself imports.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import IO, Any

READY, MEMORY = "ready", "memory"
GROWN = "+"  # after a word: the process has more memory than at its beginning, and is not to be used again
HAS_TIMER = hasattr(signal, "setitimer")  # of processor time: its signal ends a process
PATIENCE = 10  # times as long by the clock as by the processor's time
_READ_BYTES = 256 << 20  # for a request that is read
_BYTES_PER_BYTE = 12  # of a request: its JSON, and its text with four bytes per character, twice

Answer = Callable[[dict[str, Any]], tuple[str, str]]


def read_frame(stream: IO[bytes], most: int = 1 << 31) -> bytes | None:
    """The next frame; None: there is none any more, or it has more bytes than that."""
    head = stream.read(4)
    size = int.from_bytes(head, "little")
    if len(head) < 4 or size > most:
        return None
    frame = stream.read(size)
    return frame if len(frame) == size else None


def write_frame(stream: IO[bytes], *parts: bytes) -> None:
    """One frame of these bytes."""
    stream.write(sum(map(len, parts)).to_bytes(4, "little"))
    for part in parts:
        stream.write(part)
    stream.flush()


def _write_answer(stream: IO[bytes], kind: str, text: str = "", seconds: float = 0.0) -> None:
    write_frame(stream, f"{kind} {seconds:.6f}\n".encode(), text.encode(errors="surrogatepass"))


def _limit_time(seconds: float, nowhere: IO[str]) -> None:
    """End the process after so long, whatever it computes."""
    if HAS_TIMER:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        seconds *= PATIENCE
    # From a thread that does not wait for the interpreter.
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


def _end_limit() -> None:
    faulthandler.cancel_dump_traceback_later()
    if HAS_TIMER:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Memory:
    """The memory of this process. Where the system does not tell it, nothing is limited."""

    def __init__(self) -> None:
        self._statm = -1
        with suppress(ImportError, OSError, ValueError):
            import resource

            self._page, self._set = os.sysconf("SC_PAGE_SIZE"), resource.setrlimit
            self._kind, self._hard = resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1]
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._first = self._size()

    def _size(self) -> int:
        return int(os.pread(self._statm, 64, 0).split()[0]) * self._page if self._statm >= 0 else 0

    def limit(self, more: int) -> None:
        """So many bytes beside those of the beginning."""
        if self._statm >= 0:
            self._set(self._kind, (self._first + more, self._hard))

    def has_grown(self, most: int) -> bool:
        """Does it have so many bytes more than at the beginning? Then the next request would have less for itself."""
        return self._size() > self._first + most


def _run(answer: Answer, requests: IO[bytes], answers: IO[bytes]) -> None:
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(60, exit=True, file=nowhere)  # the stack of its thread is there from now on
        faulthandler.cancel_dump_traceback_later()
        memory = _Memory()
        _write_answer(answers, READY)
        while (frame := read_frame(requests)) is not None:
            try:
                size = _BYTES_PER_BYTE * len(frame)
                memory.limit(_READ_BYTES + size)
                request = json.loads(frame)
                most = request["memory"]
                memory.limit(most + size)
                del frame
                _limit_time(request["seconds"], nowhere)
                started = time.process_time()
                kind, text = answer(request["question"])
                took = time.process_time() - started
                _end_limit()
                del request
                _write_answer(answers, kind + (GROWN if memory.has_grown(most // 2) else ""), text, took)
            except MemoryError:
                _end_limit()
                _write_answer(answers, MEMORY)
            memory.limit(_READ_BYTES)


def _answer_of(path: str) -> Answer:
    """What the program of this file answers with: its function `make` makes it."""
    spec = spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    answer: Answer = module.make()
    return answer


if __name__ == "__main__":
    if HAS_TIMER:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whoever started this may ignore it
    threading.stack_size(256 << 10)  # of the thread that ends the process; the system's own may be all there is
    program, *folders = sys.argv[1:]
    sys.path += folders  # of the packages that it imports: this interpreter knows of none
    with suppress(OSError):  # nobody reads the answer
        _run(_answer_of(program), sys.stdin.buffer, sys.stdout.buffer)
