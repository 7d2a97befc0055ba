"""Generated text on stdout, as it comes."""

from __future__ import annotations

import json
import re
import sys
import time
from itertools import chain
from typing import TYPE_CHECKING

from .loading import status

if TYPE_CHECKING:
    from ..engine import Stream

# Between two flushes. During a flush other threads take Python's lock, and this one waits to get it back: on a fast GPU
# a flush per token slows the generation down. Nobody sees 10 ms.
FLUSH_SECONDS = 0.01
# What a terminal takes for commands: a text could change its title, or what it shows.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def tell(text: str) -> None:
    """A line on stderr: for the person, not for a pipe that reads the text."""
    print(text, file=sys.stderr, flush=True)


def tell_cancelled(what: str, text: str) -> None:
    """One line on stderr after Ctrl-C. Where no text and so no newline was written, a terminal still shows ^C."""
    if not text and sys.stderr.isatty():
        print(file=sys.stderr)
    tell(f"cancelled: {what}")


def write_stream(stream: Stream, *, as_lines: bool = False) -> tuple[str, bool]:
    """Write a stream to stdout, and a newline: the text that was written, and whether Ctrl-C ended it.

    as_lines: each delta is a line of JSON, for programs. Until the first text comes, a terminal shows that the prompt
    is read. Ctrl-C before that writes nothing.
    """
    write, flush, clock = sys.stdout.write, sys.stdout.flush, time.perf_counter
    shown = sys.stdout.isatty() and not as_lines
    written: list[str] = []
    flushed = float("-inf")
    interrupted = False
    try:
        with stream:
            with status("reading the prompt", lambda: stream.prompt_progress):
                first = next(stream, None)
            for delta in () if first is None else chain((first,), stream):
                written.append(delta)
                text = _CONTROLS.sub("\ufffd", delta) if shown else delta
                write(json.dumps({"delta": delta}, ensure_ascii=False) + "\n" if as_lines else text)
                now = clock()
                if now - flushed >= FLUSH_SECONDS:
                    flush()
                    flushed = now
    except KeyboardInterrupt:
        interrupted = True
    if written or not interrupted:
        write("" if as_lines else "\n")
        flush()
    return "".join(written), interrupted
