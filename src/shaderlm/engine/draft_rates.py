"""When drafts pay: how often drafted tokens are right, what steps cost by their rows, and how many to draft.

A step of more rows takes longer, and a step that waits for the tokens of the one before cannot be submitted ahead. So
drafts pay where the tokens that a step is expected to give, by the second, are more than without any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from ..runtime.runner import bucket

LEVELS = (6, 12, 24)  # matches of so many tokens are another level: the longer, the more often the next token is right
_FIRST_CHANCES = (0.3, 0.5, 0.75, 0.9)  # of the levels, before anything is known
_MARGIN = 1.05  # by which drafts must be faster, as far as is known
_SAMPLES = 7  # of which the median counts
_OLD = 512  # steps after which a measured time is not believed any more, if no newer one came
_UNKNOWN = 1.25  # what a step of twice the rows is taken to cost until it is measured
_FEW = 16  # drafted tokens: every number up to it is compared
_LEAST_CHANCE = 0.02  # of a drafted token: less is not worth the work of its row


def level_of(match: int) -> int:
    """The level of a match of so many tokens."""
    return sum(match >= each for each in LEVELS)


class Acceptance:
    """How often a drafted token is right, if those before it are, by level. What is old counts less."""

    def __init__(self, prior: Acceptance | None = None, weight: float = 2.0, keep: float = 0.97) -> None:
        """prior: what is taken to be right until more is known; it counts as much as so many tokens."""
        self._prior, self._weight, self._keep = prior, weight, keep
        self._right, self._seen = [0.0] * len(_FIRST_CHANCES), [0.0] * len(_FIRST_CHANCES)

    def observe(self, level: int, right: bool) -> None:
        """One more drafted token was right, or not."""
        self._right[level] = self._right[level] * self._keep + right
        self._seen[level] = self._seen[level] * self._keep + 1
        if self._prior is not None:
            self._prior.observe(level, right)

    def chance(self, level: int) -> float:
        """That the next drafted token is right."""
        prior = _FIRST_CHANCES[level] if self._prior is None else self._prior.chance(level)
        return (self._right[level] + self._weight * prior) / (self._seen[level] + self._weight)


class StepCosts:
    """Seconds of steps whose rows all decode, by the bucket of their rows, as they were measured lately.

    Apart: steps that were submitted ahead, and steps that waited for the tokens of the one before.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[bool, int], deque[float]] = {}
        self._medians: dict[tuple[bool, int], float] = {}
        self._last: dict[tuple[bool, int], int] = {}  # when
        self._steps = 0

    def observe(self, waits: bool, rows: int, seconds: float) -> None:
        """One more step."""
        self._steps += 1
        key = (waits, bucket(rows))
        samples = self._samples.get(key)
        if samples is None:  # the first one of its kind compiles its kernels
            self._samples[key] = deque(maxlen=_SAMPLES)
        else:
            if self._steps - self._last[key] >= _OLD:
                samples.clear()
            samples.append(seconds)
            self._medians[key] = median(samples)
        self._last[key] = self._steps

    def seconds(self, waits: bool, rows: int) -> float | None:
        """Of such a step; None: it was not measured lately."""
        key = (waits, bucket(rows))
        known = self._medians.get(key)
        return known if known is not None and self._steps - self._last[key] < _OLD else None

    def expected(self, rows: int) -> float | None:
        """Of a step that waits: as it was measured, or as those of fewer rows lead to expect."""
        size, factor = bucket(rows), 1.0
        while size:
            known = self.seconds(True, size)
            if known is None and (ahead := self.seconds(False, size)) is not None:
                known = ahead * _UNKNOWN
            if known is not None:
                return known * factor
            size, factor = size // 2, factor * _UNKNOWN
        return None


def draft_counts(
    chances: Sequence[Sequence[float]],
    rows: int,
    most: int,
    cost: Callable[[int, int], float | None],
    without: float | None,
    *,
    drafting: bool = False,
) -> list[int]:
    """How many tokens to draft for each sequence, in a step in which `rows` sequences decode; all 0: it does not pay.

    chances[i][j]: that the first j + 1 drafted tokens of sequence i are all right. most: drafted tokens of all.
    cost: seconds of a step with drafts, by all of its rows and the most tokens drafted for one sequence. without:
    seconds of a step without any. What is `drafting` goes on unless it is slower.
    """
    counts = [0] * len(chances)
    gains = [(p, i) for i, each in enumerate(chances) for p in each if p >= _LEAST_CHANCE]
    if without is None or not gains:
        return counts
    gains.sort(reverse=True)
    del gains[most:]
    best, chosen = (1.0 if drafting else _MARGIN) * rows / without, 0
    tokens, longest, drafted = float(rows), 0, [0] * len(chances)
    for n, (p, i) in enumerate(gains, 1):
        tokens += p
        drafted[i] += 1
        longest = max(longest, drafted[i])
        if _FEW < n < len(gains) and bucket(rows + n) == bucket(rows + n + 1):
            continue  # one row more costs nothing
        seconds = cost(rows + n, longest)
        if seconds is not None and tokens / seconds > best:
            best, chosen = tokens / seconds, n
    for _, i in gains[:chosen]:
        counts[i] += 1
    return counts
