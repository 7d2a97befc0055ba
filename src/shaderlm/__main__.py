"""The command `shaderlm`, also as `python -m shaderlm`. Ctrl-C during its imports ends it without a traceback."""

import gc
import os
import signal
import sys

_EXIT_CODE = 130

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where whoever started it ignores Ctrl-C
    signal.signal(signal.SIGINT, lambda *_: os._exit(_EXIT_CODE))


def main() -> None:
    """Import the command line, and run it."""
    from .cli import main as run

    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(_EXIT_CODE)
    finally:
        gc.freeze()  # Python looks for garbage several times as it ends, which took 50 ms


if __name__ == "__main__":
    main()
