"""Dawn: the package it comes in, and the choice between it and wgpu. `--backend dawn` runs the other tests on Dawn."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shaderlm.engine import planning
from shaderlm.engine.loading import choose_device
from shaderlm.engine.planning import LARGE_GPU, measure_backends
from shaderlm.errors import DeviceError
from shaderlm.gpu import (
    Adapter,
    Device,
    Implementation,
    MatrixShape,
    adapters,
    backends,
    matrices,
    open_device,
    opening,
    preferred_adapter,
)
from shaderlm.gpu.adapters import choose
from shaderlm.gpu.backends import MATRIX_UNITS, WRONG_UNITS, Choice, Timing
from shaderlm.gpu.dawn import library

from .command_line import shaderlm
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.dawn
_SHAPES = tuple(
    MatrixShape(component, result, 16, n, k)
    for component, result, k in (("f16", "f32", 16), ("f16", "f16", 16), ("i8", "i32", 32), ("u8", "u32", 32))
    for n in (16, 8)
)
_LARGE = replace(LARGE_GPU, implementation="dawn", f16=True, subgroups=True)


# The package and the choice ----------------------------------------------------------------------------------------


def test_both_implementations_find_the_adapter_and_agree() -> None:
    by_wgpu, by_dawn = (adapters(backend)[0].caps for backend in ("wgpu", "dawn"))
    assert (by_wgpu.implementation, by_dawn.implementation) == ("wgpu", "dawn")
    for name in ("name", "kind", "backend", "vendor", "max_workgroups", "max_invocations", "max_workgroup_memory"):
        assert getattr(by_wgpu, name) == getattr(by_dawn, name), name
    assert (by_wgpu.heap, by_dawn.heap > 0) == (0, True)
    one, other = (open_device(0, backend=backend) for backend in ("wgpu", "dawn"))
    assert (one.caps.implementation, other.caps.implementation, one is other) == ("wgpu", "dawn", False)


def _forget_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_open", {})
    monkeypatch.setattr(opening, "_chosen", {})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and the choice of an implementation as it is outside of tests."""
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path))
    monkeypatch.setattr(sys.modules[choose.__module__], "choice", backends.choice)
    monkeypatch.setattr(planning, "measure_backends", measure_backends)
    _forget_devices(monkeypatch)


@pytest.mark.usefixtures("cache")
def test_auto_follows_what_was_measured() -> None:
    caps = adapters("dawn")[0].caps
    for fastest, by_wgpu, by_dawn in (("dawn", 2.0, 1.0), ("wgpu", 1.0, 2.0)):
        backends.save(caps, {"wgpu": Timing(by_wgpu, 0.5), "dawn": Timing(by_dawn, 0.5)})
        found = adapters("auto")[0]
        assert found.caps.implementation == fastest
        assert found.reason == f"measured: dawn {1000 * by_dawn + 500:.1f} ms, wgpu {1000 * by_wgpu + 500:.1f} ms"
    assert adapters("wgpu")[0].caps.implementation == "wgpu"


@pytest.mark.usefixtures("cache")
def test_auto_before_anything_was_measured() -> None:
    plain = replace(_LARGE, name="some GPU")
    assert backends.choice(plain).implementation == "wgpu"
    assert "shaderlm tune" in backends.choice(plain).reason
    whole_numbers = tuple(shape for shape in _SHAPES if shape.component != "f16")
    assert backends.choice(replace(plain, matrix_shapes=whole_numbers)).implementation == "wgpu", "no kernel uses these"


@pytest.mark.usefixtures("cache")
def test_auto_takes_matrix_units_and_says_where_they_decode_slower() -> None:
    caps = replace(_LARGE, name="some GPU", matrix_shapes=_SHAPES)
    assert backends.choice(caps) == Choice("dawn", MATRIX_UNITS)
    backends.save(caps, {"wgpu": Timing(2.0, 1.0), "dawn": Timing(1.0, 1.04)})
    assert backends.choice(caps) == Choice("dawn", MATRIX_UNITS)
    backends.save(caps, {"wgpu": Timing(2.0, 1.0), "dawn": Timing(1.0, 1.2)})
    assert backends.choice(caps).implementation == "dawn"
    slower = "; tokens take 20 % longer than with --backend wgpu"
    assert backends.choice(caps).reason == MATRIX_UNITS + slower
    plain = replace(caps, matrix_shapes=())
    assert backends.choice(plain) == Choice("dawn", "measured: dawn 2200.0 ms, wgpu 3000.0 ms" + slower)
    backends.save(caps, {"wgpu": Timing(1.0, 1.5), "dawn": Timing(2.0, 1.0)})
    assert backends.choice(caps) == Choice("dawn", MATRIX_UNITS)
    slower = "; tokens take 50 % longer than with --backend dawn"
    assert backends.choice(plain) == Choice("wgpu", "measured: dawn 3000.0 ms, wgpu 2500.0 ms" + slower)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("opened", [lambda: open_device(0), open_device, lambda: choose_device("auto")])
@pytest.mark.parametrize("right", [True, False])
def test_matrix_units_that_fail_their_check_are_no_reason(
    right: bool, opened: Callable[[], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [replace(each, caps=replace(each.caps, matrix_shapes=_SHAPES, f16=True)) for each in adapters("dawn")]
    listed = [replace(each, caps=replace(each.caps, kind="discrete")) for each in listed]
    monkeypatch.setattr(backends, "wrong_matrix_units", set())
    monkeypatch.setattr(matrices, "wrong_matrix_units", backends.wrong_matrix_units)
    monkeypatch.setattr(matrices, "problems", lambda device, shapes: {} if right else dict.fromkeys(shapes, "wrong"))
    monkeypatch.setattr(sys.modules[choose.__module__], "_of_dawn", lambda: listed)

    def probed(adapter: Adapter) -> SimpleNamespace:
        monkeypatch.setattr(matrices, "_wrong", {})
        return SimpleNamespace(caps=matrices.with_probed_matrices(cast("Any", adapter), ("dawn", 0)))

    monkeypatch.setattr(opening, "_shared", probed)
    expected = ("dawn", MATRIX_UNITS) if right else ("wgpu", WRONG_UNITS)
    assert opened().caps.implementation == expected[0]
    backends.wrong_matrix_units.clear()  # as in another process
    assert (adapters()[0].caps.implementation, adapters()[0].reason) == expected


@pytest.mark.usefixtures("cache")
def test_slower_tokens_are_said_wherever_an_implementation_is_named(tmp_path: Path) -> None:
    caps = adapters("dawn")[0].caps
    backends.save(caps, {"wgpu": Timing(2.0, 1.0), "dawn": Timing(1.0, 1.5)})
    path, device = write_tiny_llama(tmp_path / "tiny.gguf"), ("--device", caps.name)
    for arguments in (
        ("devices",),
        ("devices", "--report"),
        ("info", path, "--context", 5, *device),
        ("generate", "the", "-n", 1, "-v", "-m", path, *device),
    ):
        done = shaderlm(*arguments)
        said = " ".join(re.sub("[│|]", " ", done.out + done.err).split())
        assert done.code == 0
        assert "dawn" in said
        for words in ("tokens take", "50 %", "longer"):  # the table of devices breaks lines
            assert words in said, arguments


WITHOUT_LOADER = """
import ctypes
def missing(name): raise OSError(name)
ctypes.CDLL = missing
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Vulkan is the only API of Dawn there")
@pytest.mark.parametrize("before", ["", WITHOUT_LOADER], ids=["driver", "loader"])
def test_without_vulkan_dawn_is_silent(before: str) -> None:
    code = f"{before}\nfrom shaderlm.gpu import adapters; print(adapters('dawn'), adapters('dawn'))"
    environment = {**os.environ, "VK_DRIVER_FILES": "/no/such/driver.json"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] []\n", "")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"seconds": 1}', "nothing", "stale", "nan"])
def test_a_measurement_that_is_of_no_use(damage: str) -> None:
    caps = replace(_LARGE, name="some GPU")
    timings: dict[Implementation, Timing] = {"wgpu": Timing(2.0, 1.0), "dawn": Timing(1.0, 1.0)}
    path = backends.save(caps, timings)
    assert path is not None
    assert backends.read(caps) == timings
    record = json.loads(path.read_text())
    nan = {**record["seconds"], "wgpu": {"prompt": float("nan"), "decode": 1.0}}
    texts = {"stale": {**record, "driver": "older"}, "nan": {**record, "seconds": nan}}
    path.write_text(json.dumps(texts[damage]) if damage in texts else damage)
    assert backends.read(caps) is None
    if damage == "nothing":
        path.unlink()
        assert backends.read(caps) is None


@pytest.mark.full
@pytest.mark.usefixtures("cache")
def test_both_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = measure_backends(0, again=False, say=said.append)
    assert found is not None
    assert found.reason.startswith("measured: dawn ")
    monkeypatch.setattr(planning, "timings_by", lambda adapters: pytest.fail("it was measured before"))
    assert measure_backends(0, again=False, say=said.append) == found
    assert said == ["implementations of WebGPU"]
    monkeypatch.setattr(planning, "timings_by", lambda adapters: {"wgpu": Timing(1.0, 1.0)})
    assert measure_backends(0, again=True) is None, "one of them cannot run it"
    assert adapters()[0].reason == found.reason


@pytest.mark.usefixtures("cache")
def test_tune_says_which_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = {"wgpu": Timing(0.1, 0.1), "dawn": Timing(0.05, 0.05)}
    monkeypatch.setattr(planning, "timings_by", lambda adapters: timings)
    asked: list[str] = []

    def tune(*_: object, backend: str, **__: object) -> tuple[()]:
        asked.append(backend)
        return ()

    monkeypatch.setattr(planning, "tune", tune)
    tuned = shaderlm("tune", "synthetic:llama-3.2-1b:q4_0", "--device", "0")
    assert tuned.out == "backend dawn (measured: dawn 100.0 ms, wgpu 200.0 ms)\n"
    assert shaderlm("tune", "synthetic:llama-3.2-1b:q4_0", "--device", "0", "--backend", "wgpu").out == ""
    assert asked == ["dawn", "wgpu"]


def test_a_backend_that_there_is_not() -> None:
    with pytest.raises(DeviceError, match="backend must be one of auto, wgpu, dawn, got 'metal'"):
        open_device(backend="metal")  # type: ignore[arg-type]


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where nothing was opened yet."""
    monkeypatch.setattr(library, "_library", None)
    _forget_devices(monkeypatch)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGE", "there_is_no_such_package")
    _forget(monkeypatch)
    said = r"the package there_is_no_such_package is not installed: pip install wgpudawn==0\.32\.0\.4"
    with pytest.raises(DeviceError, match=said):
        open_device(backend="dawn")
    assert adapters()[0].caps.implementation == "wgpu"
    assert said.replace("\\", "") == adapters()[0].reason
    shown = shaderlm("devices")
    assert "is not installed: pip install wgpudawn==" in " ".join(shown.out.split())
    refused = shaderlm("bench", "kernels", "--quick", "--backend", "dawn")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "is not installed: pip install wgpudawn==" in refused.err


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto says so and takes the other one."""
    _forget(monkeypatch)

    def broken() -> None:
        raise ImportError("GLIBC_9.9 not found")

    monkeypatch.setattr(library, "_module", broken)
    with pytest.raises(DeviceError, match=r"Dawn cannot be loaded: GLIBC_9\.9 not found\. Reinstall it: pip install"):
        open_device(backend="dawn")
    found = preferred_adapter()
    assert found is not None
    assert (found.caps.implementation, "GLIBC_9.9" in found.reason) == ("wgpu", True)


def test_another_version_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", "9.9")
    _forget(monkeypatch)
    with pytest.raises(DeviceError, match=r"wgpudawn 0\.32\.0\.4 is installed, shaderlm needs 9\.9"):
        open_device(backend="dawn")


TOGETHER = """
import sys
import numpy as np
from shaderlm import ops
from shaderlm.gpu import open_device
from shaderlm.gpu.swiftshader import offered_to_vulkan
one, other = (open_device(0, backend=name) for name in ("wgpu", "dawn"))
import wgpudawn  # its classes may be used beside it, and with a callback of their own
with offered_to_vulkan():
    theirs = wgpudawn.gpu.enumerate_adapters_sync()[0].request_device_sync()
x = np.arange(8, dtype=np.float32)[None]
found = [ops.rms_norm(x, device=device).tolist() for device in (one, other)]
assert theirs.queue.read_buffer(theirs.create_buffer_with_data(data=x, usage="COPY_SRC")).tobytes() == x.tobytes()
print(found[0] == found[1], "wgpu" in sys.modules)
"""


def test_both_libraries_in_one_process() -> None:
    done = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False"], done.stderr
