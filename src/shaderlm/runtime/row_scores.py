"""Log probabilities of tokens that are known: what a part of a step asks for, and the groups in which heads give them.

The logits of a prompt's rows are larger than anything else in a step, so they are computed for a group of rows at a
time. The op `logprobs` reads them on the device: what comes back is a report of each row (`adjusted.REPORT`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..graph.sampling import MAX_LOGPROBS, OUTPUT, adjustments

U32 = NDArray[np.uint32]
REPORT_WORDS = (1 + MAX_LOGPROBS, 2)  # of a row: tokens with the bits of their log probabilities, the asked one first


class RowScores(NamedTuple):
    """How likely tokens were that are known: `targets[i]`, after row `first + i` of a part of a step."""

    first: int
    targets: Sequence[int]
    top: int = 0  # of how many of the most likely tokens to report beside


class ScoreGroup(NamedTuple):
    """Rows that one head gives: what the op logprobs reads. `targets[i]` is the token of record i."""

    outputs: NDArray[Any]  # [rows], of `graph.sampling.OUTPUT`; the slot of each is its place
    adjustments: NDArray[Any]  # [rows], of `graph.sampling.ADJUSTMENT`
    targets: U32  # [rows]


def check_scores(scores: RowScores, rows: int, vocabulary: int) -> None:
    """Refuse what a part of so many rows could not give."""
    if not 0 <= scores.top <= MAX_LOGPROBS:
        raise InputError(f"logprobs must be a whole number in 0 … {MAX_LOGPROBS}, got {scores.top}")
    if not 0 <= scores.first <= rows - len(scores.targets):
        raise InputError(
            f"{len(scores.targets)} tokens were to follow the rows of a part from {scores.first} to {rows}"
        )
    wrong = next((token for token in scores.targets if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InputError(f"a token id must lie in 0 … {vocabulary - 1}, got {wrong}")


def score_groups(parts: Iterable[tuple[int, RowScores | None]], most: int) -> Iterator[ScoreGroup]:
    """The rows that parts of a step ask for, in their order, at most so many in a group; parts are (rows, scores)."""
    rows, targets, tops, at = list[int](), list[int](), list[int](), 0
    for count, scores in parts:
        if scores is not None:
            rows += range(at + scores.first, at + scores.first + len(scores.targets))
            targets += scores.targets
            tops += [scores.top] * len(scores.targets)
        at += count
    for first in range(0, len(rows), most):
        group = slice(first, first + most)
        outputs = np.zeros(len(rows[group]), OUTPUT)
        outputs["row"], outputs["slot"] = rows[group], np.arange(len(outputs))
        records = adjustments(len(outputs))
        records["logprobs"] = tops[group]
        yield ScoreGroup(outputs, records, np.array(targets[group], np.uint32))
