"""`Dry`: what the sampler DRY ("don't repeat yourself") subtracts from logits, by the tokens of one sequence.

If the last n tokens are somewhere before, too, the token that came next there would make a repetition longer. From
`allowed_length` on, multiplier · base^(n − allowed_length) is subtracted from its logit. Repetitions do not reach over
a sequence breaker, such as a newline, and tokens that contain one are never penalised. Names are llama.cpp's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)


class DrySettings(NamedTuple):
    """`penalty_last_n`: of how many tokens; −1: of all."""

    multiplier: float
    base: float
    allowed_length: int
    penalty_last_n: int
    sequence_breakers: tuple[str, ...]


class Dry:
    """Of one sequence. A token takes time in proportion to the tokens that are looked at, whatever they are."""

    def __init__(self, settings: DrySettings, tokens: Sequence[int], piece: Callable[[int], bytes]) -> None:
        """`piece`: the bytes of a token."""
        self._settings, self._piece = settings, piece
        self._window = settings.penalty_last_n if settings.penalty_last_n >= 0 else 1 << 62
        window = tokens[max(0, len(tokens) - self._window) :]
        self._ids = np.array(window, np.int64)
        self._repeats = np.array(repeats(window), np.int64)
        self._breakers = [text.encode() for text in settings.sequence_breakers]
        pieces = [piece(token) for token in window]
        self._text = b"".join(pieces)  # the end of it, in which breakers may begin
        self._unbroken = self._since_breaker(pieces)  # tokens since the last breaker
        self._exempt = dict[int, bool]()  # tokens: does it contain a breaker?
        self._shorten()
        self.penalties = self._penalties()

    def accept(self, token: int) -> None:
        """One more token of the sequence. Then `penalties` has what is subtracted from logits of the next one."""
        before = len(self._repeats)
        if before:
            longer = np.concatenate([[1], self._repeats[:-1] + 1])
            self._repeats = np.where(self._ids == token, longer, 0)
        self._repeats = np.append(self._repeats, 0)[-self._window :]
        self._ids = np.append(self._ids, token)[-self._window :]
        piece = self._piece(token)
        text = self._text + piece
        # A breaker that ends in this token began in so many bytes before it.
        begin = len(self._text)
        ends = any(each in text[max(0, begin - len(each) + 1) :] for each in self._breakers)
        self._unbroken = 0 if ends else self._unbroken + 1
        self._text = text
        self._shorten()
        self.penalties = self._penalties()

    def _shorten(self) -> None:
        longest = max(map(len, self._breakers), default=1)
        self._text = self._text[max(0, len(self._text) - longest + 1) :]

    def _since_breaker(self, pieces: Sequence[bytes]) -> int:
        ends = list(accumulate(map(len, pieces)))
        last = [found + len(each) for each in self._breakers if (found := self._text.rfind(each)) >= 0]
        return len(pieces) - 1 - bisect_left(ends, max(last)) if last else len(pieces)

    def _penalties(self) -> dict[int, float]:
        """Token → what is subtracted from its logit."""
        settings, count = self._settings, len(self._ids)
        # No repetition begins before the tokens that are looked at.
        lengths = np.minimum(np.minimum(self._repeats, np.arange(1, count + 1)), self._unbroken)[:-1]
        ends = np.flatnonzero(lengths >= settings.allowed_length)
        if not len(ends):
            return {}
        following = self._ids[ends + 1]
        longest = np.full(int(following.max()) + 1, -1)  # by token
        np.maximum.at(longest, following, lengths[ends])
        tokens = np.flatnonzero(longest >= 0).tolist()
        return {token: self._penalty(int(longest[token])) for token in tokens if not self._is_exempt(token)}

    def _penalty(self, length: int) -> float:
        settings = self._settings
        exponent = min((length - settings.allowed_length) * math.log(settings.base), math.log(_LARGEST))
        return min(settings.multiplier * math.exp(exponent), _LARGEST)

    def _is_exempt(self, token: int) -> bool:
        if token not in self._exempt:
            piece = self._piece(token)
            self._exempt[token] = any(each in piece for each in self._breakers)
        return self._exempt[token]


def repeats(tokens: Sequence[int]) -> list[int]:
    """Of each token but the last: how many tokens up to it are the same as the last ones. Of the last one, 0.

    The Z function of the tokens from the end: linear, however often they repeat.
    """
    backwards, count = list(reversed(tokens)), len(tokens)
    z = [0] * count
    left = right = 0
    for i in range(1, count):
        same = min(right - i, z[i - left]) if i < right else 0
        while i + same < count and backwards[same] == backwards[i + same]:
            same += 1
        z[i] = same
        if i + same > right:
            left, right = i, i + same
    return z[::-1]
