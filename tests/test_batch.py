"""Records of a token batch: padding, runs, slots, and the constants that kernels share."""

from __future__ import annotations

import numpy as np
import pytest

from shaderlm.graph.batch import (
    LAST,
    NONE,
    PAGE,
    RUN,
    context_class,
    contiguous_batch,
    make_batch,
    mark_runs,
    stretches,
)

from .attention_operands import slots_of


def test_padding_rows_write_nothing() -> None:
    batch = make_batch([4, 9], [132, 9], [7, 0], [5, LAST | 3], tokens=4, outputs=2)
    assert batch.dtype == np.uint32
    assert batch.tolist() == [[2, 2, 0, 0], [5, 4, 132, 7], [LAST | 3, 9, 9, 0], [0, 0, NONE, 0], [0, 0, NONE, 0]]


def test_runs_are_eight_rows_of_one_sequence_at_consecutive_positions() -> None:
    positions = [*range(7), *range(20, 28), 3, *range(5, 12), 13, *range(14, 21)]
    pages = [0] * 7 + [2] * 8 + [2] + [4] * 8 + [5] * 7
    batch = make_batch(positions, positions, pages, tokens=40)
    assert stretches(batch) == [(0, 7), (7, 8), (15, 1), (16, 7), (23, 1), (24, 7)]
    assert np.flatnonzero(batch[1:, 3] & RUN).tolist() == list(range(7, 15))
    assert (batch[1:32, 3] & ~np.uint32(RUN)).tolist() == pages
    batch[1 + 7, 1] = 99  # no run of eight is left
    assert not (mark_runs(batch)[1:, 3] & RUN).any()


def test_one_sequence_in_the_pool_from_row_0_on() -> None:
    assert contiguous_batch(3, 2, [7, 8], tokens=3).tolist() == [
        [2, 0, 0, 0],
        [7, 3, 3, 0],
        [8, 4, 4, 0],
        [0, 0, NONE, 0],
    ]
    assert (contiguous_batch(0, 8)[1:, 3] == RUN).all()


def test_an_empty_batch_has_no_runs() -> None:
    assert stretches(make_batch([], [], tokens=2)) == []
    assert (make_batch([], [], tokens=2)[1:, 2] == NONE).all()


def test_slots_lie_in_the_pages_of_a_sequence() -> None:
    assert slots_of([0, 127, 128, 129], [9, 7, 3], 1).tolist() == [7 * PAGE, 7 * PAGE + 127, 3 * PAGE, 3 * PAGE + 1]
    assert slots_of([1, 1], [9, 7], [0, 1]).tolist() == [9 * PAGE + 1, 7 * PAGE + 1]


@pytest.mark.parametrize(
    ("keys", "head", "wanted"),
    [
        (1, 64, "single_pass"),
        (320, 64, "single_pass"),
        (321, 64, "split"),
        (256, 80, "single_pass"),
        (257, 80, "split"),
        (2048, 128, "split"),
        (2049, 64, "long_split"),
    ],
)
def test_context_classes(keys: int, head: int, wanted: str) -> None:
    assert context_class(keys, head) == wanted
