"""Which tests run when: the rules of `tests/tiers.py`."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import tiers

TESTS = Path(__file__).parent


def _item(name: str, *marks: pytest.MarkDecorator, fixtures: tuple[str, ...] = (), **params: Any) -> Any:
    found = {mark.name: mark.mark for mark in marks}
    file, _, _ = name.partition("::")
    return SimpleNamespace(
        nodeid=f"tests/{name}",
        path=TESTS / file,
        fixturenames=fixtures,
        callspec=SimpleNamespace(params=params),
        get_closest_marker=found.get,
    )


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    made: dict[str, float] = {
        "test_a.py::slow": tiers.LIMIT + 0.1,
        "test_a.py::quick": tiers.LIMIT,
        "test_b.py::one": tiers.SMOKE_LIMIT + 0.1,
        "test_d.py::alone": tiers.LIMIT + 0.5,
    }
    monkeypatch.setattr(tiers, "durations", lambda implementation: made)
    return made


SMOKE, FULL, LONG = pytest.mark.smoke, pytest.mark.full, pytest.mark.long


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (_item("test_a.py::quick"), {"default", "full", "all"}),
        (_item("test_a.py::slow"), {"full", "all"}),
        (_item("test_a.py::slow", SMOKE), {"default", "full", "all"}),
        (_item("test_b.py::one", SMOKE), {"full", "all"}),
        (_item("test_a.py::quick", FULL), {"full", "all"}),
        (_item("test_a.py::quick", LONG), {"all"}),
        (_item("test_a.py::quick", fixtures=("device",)), {"full", "all"}),
        (_item("test_a.py::quick", SMOKE, fixtures=("device",)), {"default", "full", "all"}),
        (_item("test_a.py::quick", where="gpu"), {"full", "all"}),
        (_item("test_a.py::quick", where="cpu"), {"default", "full", "all"}),
        (_item("test_a.py::quick", model=("gemma3", "device")), {"full", "all"}),
    ],
)
@pytest.mark.usefixtures("table")
def test_the_tiers_of_a_test(item: Any, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for tier in ("default", "full", "all"):
        monkeypatch.setattr(tiers, "_tier", tier)
        if tiers.belongs(item, "wgpu"):
            found.add(tier)
    assert found == expected


@pytest.mark.usefixtures("table")
def test_the_group_that_takes_longest_is_first() -> None:
    group = pytest.mark.xdist_group("together")
    items = [
        _item("test_c.py::new"),
        _item("test_a.py::quick", group),
        _item("test_d.py::alone"),
        _item("test_a.py::slow", group),
    ]
    names = [item.nodeid.removeprefix("tests/") for item in tiers.longest_first(items, "wgpu")]
    assert names == ["test_a.py::quick", "test_a.py::slow", "test_d.py::alone", "test_c.py::new"]


def test_names_are_those_without_a_group() -> None:
    for nodeid in ("tests/test_a.py::one[x@y]@group of its own", "tests/test_a.py::one[x@y]"):
        assert tiers.name_of(nodeid) == "test_a.py::one[x@y]"


def test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for tier, count in (("default", 25), ("full", 100), ("all", 100)):
        monkeypatch.setattr(tiers, "_tier", tier)
        assert tiers.examples(100) == count
    assert tiers.examples(3) >= 1


def test_groups_are_small() -> None:
    """A worker holds a whole group."""
    files = defaultdict[str, set[str]](set)
    for path in TESTS.glob("test_*.py"):
        for group in re.findall(r'xdist_group\("([^"{]+)"\)', path.read_text(encoding="utf-8")):
            files[group].add(path.stem)
    assert max(map(len, files.values())) <= 5


def test_the_table_is_of_tests_that_are_there() -> None:
    for implementation in ("wgpu", "dawn"):
        named = {re.split(r"[:\[]", name)[0] for name in tiers.durations(implementation)}
        assert named <= {path.name for path in TESTS.glob("test_*.py")}
        assert min(tiers.durations(implementation).values(), default=tiers.LEAST) >= tiers.LEAST
