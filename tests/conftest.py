"""Options and devices. A test that needs an adapter fails where there is none; it is never skipped."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from shaderlm.compile import tuner
from shaderlm.errors import DeviceError, ModelError
from shaderlm.formats.embedded import cache_folder
from shaderlm.gpu import Device, open_device

from .scheduling import group_of, in_order


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the long cases (a real GPU is advised)")
    parser.addoption("--dawn", action="store_true", help="also compile and run every kernel under Dawn")
    parser.addoption("--browser", action="store_true", help="also open pages in Chromium")
    parser.addoption("--device", default=None, help="adapter: a kind, a number or part of a name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long, Dawn and browser tests are left out of the collection, not skipped, unless they were asked for."""
    asked = {"long": "--all", "dawn": "--dawn", "browser": "--browser"}
    unwanted = {mark for mark, option in asked.items() if not config.getoption(option)}
    left_out = [item for item in items if unwanted & {mark.name for mark in item.iter_markers()}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        items[:] = in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests are shared out by group (scheduling.py), where `--dist loadgroup` asks for groups."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    config.option.loadscopereorder = False  # the workers' order stays
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache directory of the tests' own, in which only the models are the user's; and loads that time no kernels."""
    folder = tmp_path_factory.mktemp("cache")
    with suppress(OSError, ModelError):  # without links, or without a home, models are fetched again
        models = cache_folder()
        models.mkdir(parents=True, exist_ok=True)
        (folder / "models").symlink_to(models, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHADERLM_CACHE", str(folder))
        patch.setattr(tuner, "BUDGET_SECONDS", 0.0)
        yield


def _open(config: pytest.Config, **options: Any) -> Device:
    try:
        return open_device(config.getoption("--device"), **options)
    except DeviceError as problem:
        pytest.fail(f"the tests need a WebGPU adapter: {problem}")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> Device:
    """The adapter at its full limits and features."""
    return _open(pytestconfig)


def taken_for(device: Device, **caps: Any) -> Device:
    """The same open device under other caps: plans are made for these, what is compiled is shared."""
    other = copy.copy(device)
    other.caps = replace(device.caps, **caps)
    return other


@pytest.fixture(scope="session")
def gpu(device: Device) -> Device:
    """The adapter of the tests, taken for a GPU: one in software gets simpler kernels, which do not round."""
    return taken_for(device, kind="discrete")


@pytest.fixture(scope="session")
def timeless_device(pytestconfig: pytest.Config) -> Device:
    """The same adapter without timestamps."""
    return _open(pytestconfig, without=("timestamps",))


@pytest.fixture(scope="session")
def plain_device(pytestconfig: pytest.Config) -> Device:
    """The same adapter with neither subgroups nor f16: the form that every device can run."""
    return _open(pytestconfig, without=("subgroups", "f16"))


@pytest.fixture(scope="session")
def small_device(pytestconfig: pytest.Config) -> Device:
    """Bindings of 64 KiB and at most 7 workgroups a side: weights split and grids fold at small sizes."""
    limits = {"max_binding": 1 << 16, "max_workgroups": 7, "max_workgroup_memory": 16 << 10}
    return _open(pytestconfig, limits=limits)
