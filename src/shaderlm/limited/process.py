"""A process that works within limits. `pool.py` runs this file as a program, and loses the process at any time.

Some work has a cost that nobody can tell before it is done, and libraries that cannot be interrupted do it. Here the
time ends the process, whatever it computes, and its memory is limited where the system can do that.

Requests and answers are frames: four bytes of length, then as many bytes. A request is JSON. An answer is a word that
says what it is, a line end, and text. Only the standard library is imported, and what the program itself imports.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import IO, Any

READY, MEMORY = "ready", "memory"
_BYTES_PER_BYTE = 12  # of a request: its JSON, and its text with four bytes per character, twice

Answer = Callable[[dict[str, Any]], tuple[str, str]]


def read_frame(stream: IO[bytes], most: int = 1 << 31) -> bytes | None:
    """The next frame; None: there is none any more, or it has more bytes than that."""
    head = stream.read(4)
    size = int.from_bytes(head, "little")
    if len(head) < 4 or size > most:
        return None
    found = stream.read(size)
    return found if len(found) == size else None


def write_frame(stream: IO[bytes], *parts: bytes) -> None:
    """One frame of these bytes."""
    stream.write(sum(map(len, parts)).to_bytes(4, "little"))
    for part in parts:
        stream.write(part)
    stream.flush()


def _write_answer(stream: IO[bytes], kind: str, text: str = "") -> None:
    write_frame(stream, kind.encode(), b"\n", text.encode(errors="surrogatepass"))


def _memory_limit() -> Callable[[int], None]:
    """Limits the memory of the process to what it has now and so many bytes; does nothing where that is not known."""
    try:
        import resource

        page, statm = os.sysconf("SC_PAGE_SIZE"), os.open("/proc/self/statm", os.O_RDONLY)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        return lambda size: None

    def limit(size: int) -> None:
        now = int(os.pread(statm, 64, 0).split()[0]) * page
        resource.setrlimit(resource.RLIMIT_AS, (now + size, hard))

    return limit


def _run(answer: Answer, requests: IO[bytes], answers: IO[bytes]) -> None:
    limit = _memory_limit()
    with open(os.devnull, "w") as nowhere:
        _write_answer(answers, READY)
        while (frame := read_frame(requests)) is not None:
            try:
                limit(_BYTES_PER_BYTE * len(frame) + (1 << 20))
                request = json.loads(frame)
                limit(_BYTES_PER_BYTE * len(frame) + request["memory"])
                del frame
                # Ends the process from a thread that does not wait for the interpreter.
                faulthandler.dump_traceback_later(request["seconds"], exit=True, file=nowhere)
                kind, text = answer(request["asked"])
                faulthandler.cancel_dump_traceback_later()
                del request
                _write_answer(answers, kind, text)
            except MemoryError:
                _write_answer(answers, MEMORY)


def _answer_of(path: str) -> Answer:
    """What the program of this file answers with: its function `make` makes it."""
    spec = spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Answer = module.make()
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    program, *folders = sys.argv[1:]
    sys.path += folders  # of the packages that it imports: this interpreter knows of none
    with suppress(OSError):  # nobody reads the answer
        _run(_answer_of(program), sys.stdin.buffer, sys.stdout.buffer)
