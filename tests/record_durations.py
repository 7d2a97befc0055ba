"""Renews `tests/data/durations.json`: `python -m tests.record_durations`, on two cores that do nothing else.

It runs the full tier as `./dev test --full` does, with this file as a plugin of pytest.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from . import tiers

_took = Counter[str]()  # seconds with set-up and tear-down


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[tiers.name_of(report.nodeid)] += report.duration  # type: ignore[assignment]  # seconds are fractions


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the process that all reports reach
        tiers.save(_took, session.config.getoption("--backend"))


def main() -> int:
    command = [sys.executable, "-m", "pytest", "-p", "tests.record_durations", "-n", "3", "--dist", "loadgroup"]
    command += ["--no-loadscope-reorder", "--full", "--browser"]
    found = [subprocess.call([*command, "--backend", "wgpu"])]
    found += [subprocess.call([*command, "--backend", "dawn", "--gpu-only"])]
    return max(found)


if __name__ == "__main__":
    sys.exit(main())
