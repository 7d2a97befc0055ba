"""Imports on first use. Every worker imports every file of tests, and only one of them needs a large package."""

from __future__ import annotations

import importlib
from typing import Any


class _Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest asks everything whether it is a test
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def lazily(name: str) -> Any:
    """A module that is imported when something of it is asked for."""
    return _Lazy(name)
