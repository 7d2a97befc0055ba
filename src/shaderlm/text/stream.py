"""Generated text: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer


@dataclass(frozen=True)
class LineLimits:
    """Where a text ends that is one block of code, as editors ask for it."""

    min_indent: int = 0  # at a line after the first that begins with fewer spaces and tabs
    seconds: float | None = None  # after so many since the first token, once there was a line end


class TextStream:
    """Turns token ids into text, one at a time, and ends at the first stop string, also across tokens.

    It ends at a line with a smaller indentation than `min_indent`, too.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown_ids: Iterable[int] = (), min_indent: int = 0
    ) -> None:
        self._bytes = tokenizer.bytes_by_token
        # Special tokens have no text, except for these.
        self._shown = {token: tokenizer.vocabulary.tokens[token].encode() for token in shown_ids}
        self._piece = self.bytes_of if self._shown else self._bytes.__getitem__
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = self._decoder.decode
        self._stop = [text for text in stop if text]
        self._held = ""  # the end of the text, where it may be the beginning of a stop string
        self.stopped = False
        self.stop_match: str | None = None  # the stop string that came
        self.cut_bytes = 0  # of it, and of what came after it
        self._min_indent = min_indent
        self._indent: int | None = None  # of the line, as far as it came; None: it has begun
        self.outdented = False  # a line with a smaller indentation came

    @property
    def ends(self) -> bool:
        """Can the text end the generation? Otherwise it can be made at any time, of several tokens at once."""
        return bool(self._stop or self._min_indent)

    def push(self, token: int) -> str:
        """The text that this token makes certain; "" while a character or a stop string is incomplete."""
        if self.stopped:
            return ""
        text = self._decode(self.bytes_of(token))
        text = self._release(text) if self._stop else text
        return self._indented(text) if self._min_indent else text

    def push_all(self, tokens: Iterable[int]) -> str:
        """The same for several tokens, of a text that ends nothing."""
        return self._decode(b"".join(map(self._piece, tokens)))

    def text_of(self, tokens: Iterable[int]) -> str:
        """The text of all tokens, of a text that ends nothing."""
        return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(b"".join(map(self._piece, tokens)))

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to the text."""
        return self._shown.get(token) or self._bytes[token] if self._shown else self._bytes[token]

    def finish(self) -> str:
        """The text that was held back. The beginning of a character whose end never came is left out."""
        text, self._held = self._held, ""
        return self._indented(text) if self._min_indent else text

    def _indented(self, text: str) -> str:
        """The text up to a line with a smaller indentation, which is all that is left of that line."""
        for i, character in enumerate(text):
            if self._indent is not None and character in " \t":
                self._indent += 1
            elif self._indent is not None and self._indent < self._min_indent:
                self.stopped = self.outdented = True
                return text[:i]
            else:
                self._indent = 0 if character == "\n" else None
        return text

    def _release(self, text: str) -> str:
        """What of the held text and this text is certain, and neither a stop string nor the beginning of one."""
        text = self._held + text
        ends = [(at, stop) for at, stop in ((text.find(stop), stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            end, self.stop_match = min(ends)
            self.cut_bytes = len(text[end:].encode()) + len(self._decoder.getstate()[0])
            return text[:end]
        keep = max(overlap(text, stop) for stop in self._stop)
        certain = len(text) - keep
        self._held = text[certain:]
        return text[:certain]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
