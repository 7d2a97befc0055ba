"""Drafts without a model: what came after the last tokens where they came before, in the prompt or the output."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = 3  # tokens that must be the same
_LONGEST = 32  # tokens that are compared, of a few places where they came before, the last one first
_PLACES = 8
_AT_ONCE = 2048  # tokens that one call indexes: whoever has a long prompt holds nobody up
_MOST = 1 << 15  # tokens of the beginning of a text that are indexed, so that an index has at most a few megabytes


class NgramIndex:
    """Of the tokens of one sequence, which only grow."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}  # n-gram → where the token after it was, the last time
        self._before: list[int] = []  # the same one time earlier, by that place; 0: never

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Index some of the tokens up to there that are new. An n-gram is known once the token after it is."""
        first = max(len(self._before), LENGTH)
        end = min(end, first + _AT_ONCE, _MOST)
        if first >= end:
            return
        self._before += [0] * (end - len(self._before))
        last = self._last
        for at in range(first, end):
            key = tuple(tokens[at - LENGTH : at])
            self._before[at] = last.get(key, 0)
            last[key] = at

    def find(self, tokens: Sequence[int], end: int) -> tuple[int, int]:
        """Where the token was that may come at `end`, and how many tokens before both are the same; (0, 0): nowhere."""
        at = self._last.get(tuple(tokens[end - LENGTH : end]), 0) if end >= LENGTH else 0
        best, longest = 0, 0
        for _ in range(_PLACES):
            if not at:
                break
            length = _common(tokens, at, end)
            if length > longest:
                best, longest = at, length
            at = self._before[at]
        return best, longest


def _common(tokens: Sequence[int], at: int, end: int) -> int:
    """How many tokens before two places are the same, up to the longest that counts; an n-gram is, as is known."""
    length = LENGTH
    while length < min(at, _LONGEST) and tokens[at - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
