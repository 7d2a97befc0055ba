"""Perplexity: exp of the mean of −ln p over the tokens of a text that count.

Only log probabilities leave the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engine import Handle, LanguageModel, Request
from .windows import Windows

F64 = NDArray[np.float64]
_AHEAD = 4  # windows that are on their way: the device does not wait for the next one


@dataclass(frozen=True)
class Estimate:
    """A mean of so many values, and its standard error."""

    mean: float
    error: float
    count: int


def estimate(values: F64) -> Estimate:
    """Of values that are as good as independent. The error is 0 where there are too few of them to tell."""
    count, mean = len(values), float(values.mean())
    variance = float((values * values).mean()) - mean * mean
    return Estimate(mean, math.sqrt(variance / (count - 1)) if variance > 0 and count > 1 else 0.0, count)


def perplexity(nll: F64) -> Estimate:
    """exp of the mean of −ln p."""
    found = estimate(nll)
    value = math.exp(min(found.mean, 700.0))  # beyond, there is no such float
    return Estimate(value, value * found.error, found.count)


def scored_windows(model: LanguageModel, windows: Windows) -> Generator[F64]:
    """−ln p of the tokens that count, of one window after the other."""
    handles, submitted = deque[Handle](), 0
    try:
        for _ in range(len(windows)):
            while submitted < len(windows) and len(handles) < _AHEAD:
                handles.append(model.engine.submit(_request(windows, submitted)))
                submitted += 1
            handles[0].result()
            scores = handles.popleft().prompt_logprobs
            assert scores is not None
            yield -scores.values.astype(np.float64)
    finally:
        for handle in handles:
            handle.cancel()


def _request(windows: Windows, index: int) -> Request:
    first, ids = windows.first_row, windows.ids(index)
    options = {"cache_prompt": False, "keep_cache": False, "first_row": first}
    return Request(ids, output="nothing", prompt_logprobs=0, **options)  # type: ignore[arg-type]
