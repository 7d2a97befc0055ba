"""Text as it comes: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text, one at a time, and ends at the first stop string, also across tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain; "" while a character or a stop string is incomplete."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(self._tokenizer.token_bytes(token))
        return self._release(final=False)

    def finish(self) -> str:
        """What was held back and is not going to change any more."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        ends = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            text, self._held = self._held[: min(ends)], ""
            return text
        keep = 0 if final else max((_overlap(self._held, text) for text in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
