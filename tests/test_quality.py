"""Routes that round the inputs of products, against those that do not, in a real model: are the tokens the same?"""

from __future__ import annotations

import numpy as np
import pytest

from shaderlm.engine.loading import load_with
from shaderlm.gpu import Device
from shaderlm.models.config import StepSpec
from shaderlm.runtime.gpu_runner import GpuRunner

from .quality import POSITIONS, ROWS, compare, compare_rows, text_of_docs
from .session import Session

# A route that is further off is never a default. Mean divergence in nats; how often the likeliest token is the same.
MAX_DIVERGENCE, MIN_SAME = 1e-4, 0.995
ROUNDING = {"gemv_int16", "gemv_rows_int16", "tile_int16", "matrix"}


@pytest.mark.parametrize(
    ("rows", "positions", "decode"),
    [
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            (1, 1, True),
            *((rows, POSITIONS, True) for rows in ROWS),
            (16, POSITIONS, False),
            (100, POSITIONS, False),
        )
    ],
)
def test_rounding_keeps_the_quality(rows: int, positions: int, decode: bool, gpu: Device) -> None:
    """So many rows at a time, each of another sequence (`decode`) or all of one, with the same cache on both sides."""
    with load_with(device=gpu, cache="f16") as fast, load_with(device=gpu, cache="f16", precision="exact") as exact:
        assert isinstance(fast.runner, GpuRunner)
        plan = fast.runner.plan(StepSpec(rows, cache="f16", paged=rows > 1))
        assert ROUNDING & {launch.route for launch in plan.launches}
        ids = fast.tokenize(text_of_docs())[:positions]
        if decode:
            divergences, same = compare_rows(fast.runner, exact.runner, ids, rows)
        else:
            sessions, divergences, same = [Session(model.runner) for model in (fast, exact)], [], []
            for first in range(0, positions, rows):
                more = compare(*(each.all_logits(ids[first : first + rows]).astype(np.float64) for each in sessions))
                divergences += more[0]
                same += more[1]
    found = f"divergence {np.mean(divergences):.2e}, the same token {np.mean(same):.4f}"
    print(f"{len(same)} positions, {rows} at a time: {found}")
    assert len(same) == positions // rows * rows
    assert 0 < np.mean(divergences) < MAX_DIVERGENCE
    assert np.mean(same) >= MIN_SAME
