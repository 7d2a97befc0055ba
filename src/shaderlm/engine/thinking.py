"""A limit of what a model thinks: after so many tokens its thought is ended for it."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Literal

from ..errors import InputError
from ..runtime.adjusted import mask_words
from ..text import ChatFormat
from ..text.stream import overlap
from .request import Constraint, ConstraintFactory, ForkableConstraint

if TYPE_CHECKING:
    from ..text import Tokenizer


class ThinkingBudget:
    """Makes constraints that allow so many tokens of a thought, around others, if there are any."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: int, output: ChatFormat, tokens: int, inner: ConstraintFactory | None
    ) -> None:
        self._tokenizer, self._output, self._tokens, self._inner = tokenizer, output, tokens, inner
        self._words = mask_words(vocabulary)

    def start(self) -> Constraint:
        """For one generation."""
        inner = None if self._inner is None else self._inner.start()
        return _LimitedThought(self._tokenizer, self._output, self._tokens, self._words, inner)


class _LimitedThought:
    """Where a generation is: before its thought, within it, at its end, which is given, or after it."""

    def __init__(
        self, tokenizer: Tokenizer, output: ChatFormat, tokens: int, words: int, inner: Constraint | None
    ) -> None:
        self._piece, self._inner, self._words = tokenizer.piece, inner, words
        self._begin, self._end = (tag.encode() for tag in output.tags)
        self._encode, self._end_ids = tokenizer.encode, list[int]()
        self._remaining = tokens
        self._state: Literal["before", "thinking", "ending", "after"] = "thinking" if output.thinking else "before"
        self._text = b""  # the beginning before a thought, the last bytes within it
        self._check_budget()

    def mask(self) -> bytes | None:
        """All tokens, or the next one of the end of the thought."""
        if self._state != "ending":
            return b"\xff" * (4 * self._words) if self._inner is None else self._inner.mask()
        mask, token = bytearray(4 * self._words), self._end_ids[0]
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)

    def accept(self, token: int) -> bool | None:
        """This token came."""
        self._note(token)
        return True if self._inner is None else self._inner.accept(token)

    def fork(self) -> Constraint:
        """Another one in the same state. What is around it must be able to do so, too."""
        fork = copy(self)
        if self._inner is not None:
            if not isinstance(self._inner, ForkableConstraint):
                raise InputError("the constraint around a thought cannot be forked")
            fork._inner = self._inner.fork()
        return fork

    def is_complete(self, dropped: int, prefix: bytes) -> bool:
        """What is around it says so."""
        return self._inner is None or self._inner.is_complete(dropped, prefix)

    def _note(self, token: int) -> None:
        if self._state == "before":
            self._text = (self._text + self._piece(token)).lstrip()
            if self._text.startswith(self._begin):
                self._state, self._text = "thinking", self._text.removeprefix(self._begin)
                self._check_budget()
            elif not self._begin.startswith(self._text):
                self._state = "after"
        elif self._state == "thinking":
            self._text += self._piece(token)
            self._remaining -= 1
            if self._end in self._text:
                self._state = "after"
            else:
                self._text = self._text[-len(self._end) :]
                self._check_budget()
        elif self._state == "ending":
            self._end_ids = self._end_ids[1:]
            self._state = "ending" if self._end_ids else "after"

    def _check_budget(self) -> None:
        if self._state == "thinking" and self._remaining <= 0:
            self._state = "ending"
            written = overlap(self._text.decode(errors="replace"), self._end.decode())
            self._end_ids = self._encode(self._end.decode()[written:], parse_special=True)
