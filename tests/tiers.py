"""Which tests run when, and in which order.

| tier | command | what runs |
|---|---|---|
| default | `./dev test` | what is quick and needs no adapter, and `smoke` tests |
| full | `./dev test --full` | also everything on an adapter, and pages in Chromium |
| all | `./dev test --all` | also the `long` sweeps, for a real GPU |

`tests/data/durations.json` has the seconds of each test that takes half a second or more, as two idle cores take them
with the workers of that tier. It orders the groups of tests over the workers, the longest first. What takes longer than
`LIMIT`, or `SMOKE_LIMIT`, is not in the default tier. `./dev test --full -p tests.record_durations` renews it, and then
`./dev test -p tests.record_durations`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

TABLE = Path(__file__).parent / "data" / "durations.json"
LIMIT = 1.2  # seconds
SMOKE_LIMIT = 8.0  # of tests that were chosen for the default tier
LEAST = 0.5  # seconds that the table lists
_FEWER = 4
_UNLISTED = 0.05  # seconds of a test that is not in the table

# Fixtures that are a device, and parameters that stand for one.
_DEVICES = {"device", "gpu", "plain_device", "small_device", "timeless_device", "software"}

_tier = "default"


def choose_tier(config: pytest.Config) -> None:
    """What the command line asks for. Before test files are imported."""
    global _tier
    _tier = "all" if config.getoption("--all") else "full" if config.getoption("--full") else "default"


def examples(count: int) -> int:
    """How many examples a property test draws: a quarter by default."""
    return max(1, count // _FEWER) if runs_by_default() else count


def times_in_full(is_property_test: bool) -> int:
    """How many times as long a test takes in the full tier."""
    return _FEWER if is_property_test and runs_by_default() else 1


def runs_by_default() -> bool:
    """Whether the default tier runs."""
    return _tier == "default"


def runs_all() -> bool:
    """Whether the long sweeps run."""
    return _tier == "all"


def belongs(item: pytest.Item, implementation: str) -> bool:
    """Whether a test is in the tier that runs."""
    if item.get_closest_marker("long"):
        return _tier == "all"
    if _tier != "default":
        return True
    is_smoke = item.get_closest_marker("smoke") is not None
    if item.get_closest_marker("full") or seconds(item, implementation) > (SMOKE_LIMIT if is_smoke else LIMIT):
        return False
    return is_smoke or not _opens_a_device(item)


def _opens_a_device(item: pytest.Item) -> bool:
    names = set(getattr(item, "fixturenames", ()))
    call = getattr(item, "callspec", None)
    for value in call.params.values() if call else ():
        names |= {each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)}
    return bool(_DEVICES & names)


@cache
def durations(implementation: str) -> dict[str, float]:
    """The table, of the tests with this implementation of WebGPU."""
    found: dict[str, float] = json.loads(TABLE.read_text(encoding="utf-8")).get(implementation, {})
    return found


def name_of(nodeid: str) -> str:
    """How the table calls a test; pytest-xdist adds the group at the end."""
    name, _, group = nodeid.rpartition("@")
    return (name if name and "]" not in group else nodeid).removeprefix("tests/")


def seconds(item: pytest.Item, implementation: str) -> float:
    """What a test takes in this tier, by what it took in the full one."""
    recorded = durations(implementation).get(name_of(item.nodeid), _UNLISTED)
    return recorded / times_in_full(is_hypothesis_test(getattr(item, "obj", None)))


def group_of(item: pytest.Item) -> str:
    """Tests of a group run in one worker: they share kernels or a model. A file is a group unless it says otherwise."""
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else item.path.stem


def longest_first(items: Iterable[pytest.Item], implementation: str) -> list[pytest.Item]:
    """Ordered by what their groups take, so that the workers end together."""
    groups = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        groups[group_of(item)].append(item)
    total = {name: sum(seconds(item, implementation) for item in group) for name, group in groups.items()}
    return [item for name in sorted(groups, key=lambda name: -total[name]) for item in groups[name]]


def save(took: Mapping[str, float], implementation: str) -> None:
    """Renew the table of an implementation with the seconds of the tests that ran.

    The full tier replaces the table. The default tier raises what took longer than there: with fewer tests before it, a
    test may be the first that needs what others share.
    """
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    known = table[implementation] if runs_by_default() else {}
    longest = {name: max(each, known.get(name, 0)) for name, each in took.items()}
    listed = {**known, **{name: round(each, 1) for name, each in longest.items() if each >= LEAST}}
    table[implementation] = dict(sorted(listed.items()))
    TABLE.write_text(json.dumps(table, indent=0, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
