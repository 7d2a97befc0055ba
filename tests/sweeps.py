"""Thins sweeps: what runs in the default tier, what with --full, and what with --all only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest


def with_all(*values: Any) -> Any:
    """A parameter, or several, that runs with --all."""
    return pytest.param(*values, marks=pytest.mark.long)


def by_default(values: Iterable[Any], wanted: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test. Those that are not wanted run with --all."""
    return [pytest.param(value, marks=() if wanted(value) else pytest.mark.long) for value in values]


def some_by_default(values: Iterable[Any], wanted: Container[Any]) -> list[Any]:
    """Parameters of a test. Those that are not wanted are in the full tier."""
    return [pytest.param(value, marks=() if value in wanted else pytest.mark.full) for value in values]


def every_third_by_default(values: Iterable[Any]) -> list[Any]:
    """Of a list in which neighbours are alike. The others are in the full tier."""
    return [pytest.param(value, marks=() if i % 3 == 0 else pytest.mark.full) for i, value in enumerate(values)]


def every_second(values: Iterable[Any]) -> list[Any]:
    """Of a list in which neighbours are alike. Values are tuples where a test has several parameters."""
    return [_param(value, i % 2 == 0) for i, value in enumerate(values)]


def every_pair(first: Sequence[Any], second: Sequence[Any], period: int = 0) -> list[Any]:
    """All pairs. Without --all, those of every third diagonal, or second: every value of both is among them.

    With a period as long as a list, its values are there about once.
    """
    period = period or (3 if min(len(first), len(second)) > 2 else 2)
    places = itertools.product(range(len(first)), range(len(second)))
    return [_param((first[i], second[j]), (i + j) % period == 0) for i, j in places]


def _param(value: Any, wanted: bool) -> Any:
    marks = () if wanted else pytest.mark.long
    return pytest.param(*value, marks=marks) if isinstance(value, tuple) else pytest.param(value, marks=marks)
