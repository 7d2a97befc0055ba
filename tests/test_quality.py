"""Routes that round the inputs of products, against those that do not, in a real model: are the tokens the same?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shaderlm.engine.loading import load_with
from shaderlm.gpu import Device
from shaderlm.models.config import StepSpec
from shaderlm.runtime.gpu_runner import GpuRunner

from .session import Session

# A route that is further off is never a default. Mean divergence in nats; how often the likeliest token is the same.
MAX_DIVERGENCE, MIN_SAME = 1e-4, 0.995


def rounding_route(rows: int, device: Device) -> str:
    """What multiplies so many rows."""
    if rows == 1:
        return "gemv_int16"
    if device.caps.subgroup_matrix:
        return "gemv_rows_int16" if rows <= 4 else "matrix"
    return "gemv_rows_int16" if rows <= 4 else "tile_int16"


@pytest.mark.parametrize(
    ("rows", "positions"),
    [pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1), (1, 2000), (4, 2000), (16, 2000), (100, 2000))],
)
def test_rounding_keeps_the_quality(rows: int, positions: int, gpu: Device) -> None:
    """So many rows at a time, with the same cache on both sides.

    Over our own documentation: prose, tables and code, which the model has not seen.
    """
    docs = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = "".join(path.read_text(encoding="utf-8") for path in docs)
    divergences, same = [], []
    with load_with(device=gpu, cache="f16") as fast, load_with(device=gpu, cache="f16", precision="exact") as exact:
        assert isinstance(fast.runner, GpuRunner)
        routes = {launch.route for launch in fast.runner.plan(StepSpec(rows, cache="f16", paged=rows > 1)).launches}
        assert rounding_route(rows, gpu) in routes
        ids = fast.tokenize(text)[:positions]
        sessions = [Session(model.runner) for model in (fast, exact)]
        for first in range(0, positions, rows):
            rounded, kept = (session.all_logits(ids[first : first + rows]).astype(np.float64) for session in sessions)
            q, p = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True) for logits in (rounded, kept))
            divergences += (np.exp(p) * (p - q)).sum(1).tolist()
            same += (p.argmax(1) == q.argmax(1)).tolist()
    found = f"divergence {np.mean(divergences):.2e}, the same token {np.mean(same):.4f}"
    print(f"{len(same)} positions, {rows} at a time: {found}")
    assert len(same) == positions
    assert 0 < np.mean(divergences) < MAX_DIVERGENCE
    assert np.mean(same) >= MIN_SAME
