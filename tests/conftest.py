"""Options and devices. A test that needs an adapter fails where there is none; it is never skipped."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from shaderlm.compile import tuner
from shaderlm.engine import planning
from shaderlm.errors import DeviceError, ModelError
from shaderlm.formats.default_model import cache_folder
from shaderlm.gpu import Device, Implementation, backends, dawn, open_device
from shaderlm.gpu.adapters import choose
from shaderlm.ray import loopback

from . import tiers
from .byte_products import compiled_quickly
from .oracles import Oracle, unpack
from .policies import with_policy
from .vision_oracles import VisionOracle, unpack_vision

# Files that `--gpu-only` runs: kernels, batches, whole models, devices and their clocks. The rest is the same on every
# implementation of WebGPU.
_GPU = {
    "test_adjust",
    "test_batches",
    "test_command_pool",
    "test_decode_risks",
    "test_engine_company",
    "test_equalities",
    "test_gpu_device",
    "test_gpu_lifetime",
    "test_gpu_memory",
    "test_int16",
    "test_kernels",
    "test_oracles",
    "test_profile",
    "test_rows_int16",
    "test_sample",
    "test_smollm2",
    "test_specialised",
}


# Files about kernels that the cover of `kernel_runs` has too: Dawn runs them with --all.
_KERNELS = {"test_adjust", "test_equalities", "test_int16", "test_rows_int16", "test_sample"}
# Tests whose kernels others of these files run on Dawn as well: with --all, too.
_ON_DAWN_WITH_ALL = {
    "test_by_the_kernels_of_a_gpu",
    "test_heads_that_are_normed",
    "test_long_runs_need_no_other_plans",
    "test_on_a_device_with_an_f16_cache",
    "test_one_run_of_every_route",
    "test_random_schedules",
}
# Tests of these files that compute nothing on a device: once is enough.
_WITHOUT_A_DEVICE = {
    "test_all_are_here",
    "test_in_numpy",
    "test_on_the_cpu",
    "test_q8_0_in_numpy",
    "test_recorded_answers_in_numpy",
    "test_recorded_answers_on_the_command_line",
    "test_recorded_answers_on_the_cpu",
    "test_texts",
    "test_weights_stay_packed",
}
# Parameters of tests that others run on Dawn as well: without timestamps, and with the kernels of a software adapter.
_PARAMETERS_ON_DAWN_WITH_ALL = ("wall clock", "software")

hypothesis.settings.register_profile("shaderlm", deadline=None)  # no test fails because a machine is busy
hypothesis.settings.load_profile("shaderlm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run what computes on an adapter; tests/tiers.py")
    parser.addoption("--all", action="store_true", help="also run the long cases (a real GPU is advised)")
    parser.addoption("--backend", choices=("wgpu", "dawn"), default="wgpu", help="implementation of WebGPU")
    parser.addoption("--gpu-only", action="store_true", help="only the files of tests whose results a GPU computes")
    parser.addoption("--ray", action="store_true", help="only the tests that need Ray")
    parser.addoption("--clients", action="store_true", help="only the tests with packages of other programs")
    parser.addoption("--browser", action="store_true", help="also open pages and run kernels in Chromium")
    parser.addoption("--device", default=None, help="adapter: a kind, a number or part of a name")


def pytest_configure(config: pytest.Config) -> None:
    """Where a test leaves the choice of an implementation of WebGPU open, it is this one; already at collection."""
    tiers.choose_tier(config)
    if config.getoption("--ray"):
        loopback.prepare()  # before any test imports Ray
        # Ray leaves sockets and processes to the end of the program.
        for each in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{each}")
    implementation: Implementation = config.getoption("--backend")
    if implementation == "dawn" and dawn.missing() is not None:
        pytest.exit(f"--backend dawn: {dawn.missing()}", 4)
    taken = backends.Choice(implementation, "the tests are for it")
    pytest.MonkeyPatch().setattr(sys.modules[choose.__module__], "choice", lambda caps: taken)  # for good


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that `--gpu-only`, `--ray` or `--clients` leaves out are not even imported."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    for name in ("ray", "clients"):
        if config.getoption(f"--{name}") and is_test and not collection_path.stem.startswith(f"test_{name}"):
            return True
    return True if config.getoption("--gpu-only") and is_test and collection_path.stem not in _GPU else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Workers import the files of tests in turn, each from another one on: what one has compiled, the others find."""
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or not all(Path(each).is_dir() for each in config.args):
        return
    files = [
        path for path in sorted(Path(__file__).parent.glob("test_*.py")) if not pytest_ignore_collect(path, config)
    ]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // int(worker["workercount"])
    for path in (*files[first:], *files[:first]):
        with suppress(Exception, pytest.skip.Exception):  # the collection tells it
            import_module(f"{__package__}.{path.stem}")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in a hook of this name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for, and group and order the rest. What is left out is not skipped."""
    wanted, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (wanted if _is_wanted(config, item) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    for item in wanted:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(tiers.group_of(item)))
    items[:] = tiers.longest_first(wanted, config.getoption("--backend"))


def _is_wanted(config: pytest.Config, item: pytest.Item) -> bool:
    implementation = config.getoption("--backend")
    marks = {mark.name for mark in item.iter_markers()}
    if any((name in marks) != config.getoption(f"--{name}") for name in ("ray", "clients")):
        return False
    if "browser" in marks:
        left_out = not config.getoption("--browser")
    else:
        left_out = "dawn" in marks and dawn.missing() is not None
    if implementation == "dawn" and config.getoption("--gpu-only") and not config.getoption("--all"):
        left_out |= (
            item.path.stem in _KERNELS or getattr(item, "originalname", "") in _ON_DAWN_WITH_ALL | _WITHOUT_A_DEVICE
        )
        left_out |= any(f"[{name}" in item.name for name in _PARAMETERS_ON_DAWN_WITH_ALL)
    return not left_out and tiers.belongs(item, implementation)


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: searching them for garbage again and again takes time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """A cache directory of the tests' own, in which only the models are the user's; and loads that time no kernels."""
    folder = tmp_path_factory.mktemp("cache")
    with suppress(OSError, ModelError):  # without links, or without a home, models are fetched again
        models = cache_folder()
        models.mkdir(parents=True, exist_ok=True)
        (folder / "models").symlink_to(models, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHADERLM_CACHE", str(folder))
        patch.setenv("SHADERLM_CONFIG", os.devnull)
        patch.setattr(tuner, "BUDGET_SECONDS", 0.0)
        patch.setattr(planning, "measure_backends", lambda *_: None)
        _prefer(request.config.getoption("--backend"))
        yield


def _prefer(implementation: Implementation) -> None:
    """Where a test leaves the choice of an implementation open, another process takes this one too."""
    if dawn.missing() is None:
        for adapter in dawn.adapters():
            backends.save(
                adapter.caps,
                {name: backends.Timing(1.0 + (name != implementation), 1.0) for name in backends.IMPLEMENTATIONS},
            )


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    """Checkpoints with known logits, by name. Every worker unpacks its own: that takes 0.2 s."""
    return unpack(tmp_path_factory.mktemp("oracles"))


@pytest.fixture(scope="session")
def vision_oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionOracle]:
    """Checkpoints that see, by name."""
    return unpack_vision(tmp_path_factory.mktemp("vision-oracles"))


def _open(config: pytest.Config, **options: Any) -> Device:
    try:
        found = open_device(config.getoption("--device"), backend=config.getoption("--backend"), **options)
        return compiled_quickly(found)
    except DeviceError as problem:
        pytest.fail(f"the tests need a WebGPU adapter: {problem}")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> Device:
    """The adapter at its full limits and features."""
    return _open(pytestconfig)


def taken_for(device: Device, **caps: Any) -> Device:
    """The same open device under other caps: plans are made for these. How it compiles and submits stays."""
    other = copy.copy(device)
    kept = device.caps.policy
    other.caps = with_policy(
        replace(device.caps, **caps), check_bounds=kept.check_bounds, record_ahead=kept.record_ahead
    )
    return other


@pytest.fixture(scope="session")
def null() -> Iterator[Any]:
    """Dawn's device with every feature, which compiles and runs nothing."""
    (adapter,) = dawn.adapters(null=True)
    device = adapter.open(["f16", "subgroups", "subgroup_matrix", "timestamps"], {}, check_bounds=True)
    yield device
    device.close()


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
