"""What was typed in a chat, for the arrow keys of this one and of later ones.

The file has one JSON string per line, so that a message of several lines stays one entry. readline's own files are
divided at newlines, and differ between GNU readline and libedit. Only the owner can read it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ModelError
from ..files import atomic_write_text, open_private, state_directory

ENTRIES = 1000
LONGEST = 20_000  # characters of an entry: a pasted file is not worth keeping
SHORTEN_BYTES = 4_000_000


class History:
    """Entries, oldest first. `keep`: also in the file, where later chats find them."""

    def __init__(self, *, keep: bool) -> None:
        self.entries: list[str] = []
        self.problem: str | None = None  # why nothing is kept, to be told once
        self._path: Path | None = None
        if keep:
            try:
                self._path = state_directory() / "chat_history.jsonl"
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._read(self._path)
            except (OSError, ModelError) as problem:
                self._give_up(problem)
        self._show(self.entries)

    def add(self, text: str) -> None:
        """One more entry; not one that is empty, too long, or the same as the last."""
        if not text.strip() or len(text) > LONGEST or self.entries[-1:] == [text]:
            return
        self.entries.append(text)
        self._show([text])
        if self._path is not None:
            try:
                # One write at the end of the file: chats that run at the same time share it.
                with open(self._path, "ab", buffering=0, opener=open_private) as file:
                    file.write(_line(text))
            except OSError as problem:
                self._give_up(problem)

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        os.chmod(path, 0o600)
        lines = path.read_bytes().splitlines()
        for line in lines:
            with suppress(ValueError):  # one that was not written to its end
                entry = json.loads(line)
                if isinstance(entry, str):
                    self.entries.append(entry)
        del self.entries[:-ENTRIES]
        if len(lines) > 2 * ENTRIES or path.stat().st_size > SHORTEN_BYTES:
            while sum(map(len, self.entries)) > SHORTEN_BYTES // 2:
                del self.entries[: len(self.entries) // 2]
            atomic_write_text(path, b"".join(map(_line, self.entries)).decode(), private=True)

    def _give_up(self, problem: Exception) -> None:
        reason = getattr(problem, "strerror", None) or problem
        self.problem = f"what you type is not kept for later chats: {self._path or 'the history'}: {reason}"
        self._path = None

    def _show(self, entries: list[str]) -> None:
        """To readline, where there is one."""
        with suppress(ImportError):  # not on Windows
            import readline

            for entry in entries:
                readline.add_history(entry)


def _line(text: str) -> bytes:
    return (json.dumps(text) + "\n").encode()


def set_up_readline() -> None:
    """Give input() line editing. To be called before any adapter is opened.

    Opening adapters may load Mesa, which loads LLVM and with it libedit. If that comes first, readline's functions are
    libedit's, and a long line corrupts the heap.
    """
    with suppress(ImportError):  # not on Windows
        import readline

        readline.set_auto_history(False)  # `History` adds whole messages
        if "libedit" in (readline.__doc__ or "") or os.environ.get("TERM", "dumb") == "dumb":
            return
        # Python switches it off. With it a paste of several lines is one message.
        readline.parse_and_bind("set enable-bracketed-paste on")
        for enter in ("\\C-m", "\\C-j"):
            readline.parse_and_bind(f'"\\e{enter}": "\\C-v\\C-j"')  # Alt-Enter: a new line of the same message


@contextmanager
def redraw_after_stop(prompt: str) -> Iterator[None]:
    """While a line is read: after Ctrl-Z and `fg` it is drawn again, and the terminal edits it as before.

    Python has switched off readline's own signal handlers.
    """
    try:
        import readline
        import termios

        stops = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL  # not where whoever started it ignores Ctrl-Z
    except ImportError:  # Windows, which has no Ctrl-Z of this kind
        stops = False
    if not stops:
        yield
        return

    def stop(*_: object) -> None:
        with suppress(termios.error):
            modes = termios.tcgetattr(sys.stdin.fileno())  # as readline sets them; a shell has its own
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)  # stops here, until SIGCONT
            signal.signal(signal.SIGTSTP, stop)
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, modes)
        sys.stdout.write(f"\r{prompt}{readline.get_line_buffer()}")
        sys.stdout.flush()

    before = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
