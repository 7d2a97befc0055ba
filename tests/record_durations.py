"""Renews `tests/data/durations.json`: `./dev test --full -p tests.record_durations`, then the same without `--full`.

On two cores that do nothing else. A plugin of pytest.
"""

from __future__ import annotations

from collections import Counter

import pytest

from . import tiers

_took = Counter[str]()  # seconds with set-up and tear-down


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds = report.duration * tiers.times_in_full("hypothesis" in report.keywords)
    _took[tiers.name_of(report.nodeid)] += seconds  # type: ignore[assignment]  # seconds are fractions


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the process that all reports reach
        tiers.save(_took, session.config.getoption("--backend"))
