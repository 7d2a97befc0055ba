"""The keys of an mmproj file, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ModelError

PREFIX = "clip.vision."


class Keys:
    """Those of one file."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._values = metadata

    def whole(self, key: str, default: int | None = None, maximum: int = 1 << 20) -> int:
        """A whole number from 1 to `maximum`."""
        value = self._values.get(f"{PREFIX}{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise self.wrong(key, f"a whole number from 1 to {maximum:,}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._values.get(f"{PREFIX}{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise self.wrong(key, "a number above 0", value)
        return float(value)

    def three(self, key: str) -> tuple[float, float, float]:
        """Three numbers, of colours."""
        value = self._values.get(f"{PREFIX}{key}")
        if (
            not isinstance(value, (list, tuple))
            or len(value) != 3
            or not all(isinstance(v, (int, float)) for v in value)
        ):
            raise self.wrong(key, "three numbers", value)
        if key.endswith("std") and not all(v > 0 for v in value):
            raise self.wrong(key, "three numbers above 0", value)
        return float(value[0]), float(value[1]), float(value[2])

    def switch(self, name: str) -> bool:
        """One of the whole file."""
        return self._values.get(f"clip.{name}") is True

    def get(self, key: str, default: Any = None) -> Any:
        """Whatever the file has."""
        return self._values.get(f"{PREFIX}{key}", default)

    def wrong(self, key: str, expected: str, value: Any) -> ModelError:
        """What a value must be, and what it is."""
        shown = "nothing" if value is None else repr(value)[:60]
        return ModelError(f"{PREFIX}{key} must be {expected}, the file has {shown}")
