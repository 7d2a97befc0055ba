"""Generated text on stdout, as it comes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine import Stream

# Between two flushes. During a flush other threads take Python's lock, and this one waits to get it back: on a fast GPU
# a flush per token slows the generation down. Nobody sees 10 ms.
FLUSH_SECONDS = 0.01


def write_stream(stream: Stream) -> tuple[str, bool]:
    """Write a stream to stdout, and a newline: the text that was written, and whether Ctrl-C ended it."""
    write, flush, clock = sys.stdout.write, sys.stdout.flush, time.perf_counter
    written: list[str] = []
    flushed = float("-inf")
    interrupted = False
    try:
        with stream:
            for delta in stream:
                written.append(delta)
                write(delta)
                now = clock()
                if now - flushed >= FLUSH_SECONDS:
                    flush()
                    flushed = now
    except KeyboardInterrupt:
        interrupted = True
    write("\n")
    flush()
    return "".join(written), interrupted
