"""Times as Ollama writes them: seconds, or a text such as 5m or 1h30m (below zero: for ever); and dates."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from .errors import ApiError

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER, _UNIT = r"\d+(?:\.\d*)?|\.\d+", r"ns|us|µs|μs|ms|s|m|h"
_DURATION = re.compile(rf"([+-]?)(0|(?:(?:{_NUMBER})(?:{_UNIT}))+)")
_PART = re.compile(rf"({_NUMBER})({_UNIT})")


def seconds_of(keep_alive: float | str | None) -> float | None:
    """`keep_alive` in seconds; inf: for ever; None: nothing is said. What is no time is an error."""
    if not isinstance(keep_alive, str):
        seconds = keep_alive
    else:
        match = _DURATION.fullmatch(keep_alive)
        if match is None:
            expected = "a number of seconds, or a text such as 5m or 1h30m"
            raise ApiError(400, f"keep_alive must be {expected}, got {keep_alive!r}", param="keep_alive")
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(match[2]))
        seconds = -seconds if match[1] == "-" else seconds
    return math.inf if seconds is not None and seconds < 0 else seconds


def date_of(seconds: float) -> str:
    """A time of day in ISO 8601."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")
