"""Dawn: the package it comes in, and the choice between it and wgpu. `--backend dawn` runs the other tests on Dawn."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shaderlm.engine import planning
from shaderlm.engine.planning import LARGE_GPU, measure_backends
from shaderlm.errors import DeviceError
from shaderlm.gpu import (
    MatrixShape,
    adapters,
    backends,
    open_device,
    opening,
    preferred_adapter,
)
from shaderlm.gpu.adapters import choose
from shaderlm.gpu.dawn import library

from .command_line import shaderlm

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
    for fastest, seconds in (("dawn", {"wgpu": 2.0, "dawn": 1.0}), ("wgpu", {"wgpu": 1.0, "dawn": 2.0})):
        backends.save(caps, seconds)  # type: ignore[arg-type]
        found = adapters("auto")[0]
        assert found.caps.implementation == fastest
        assert found.reason == f"measured: dawn {seconds['dawn'] * 1000:.1f} ms, wgpu {seconds['wgpu'] * 1000:.1f} ms"
    assert adapters("wgpu")[0].caps.implementation == "wgpu"


@pytest.mark.usefixtures("cache")
def test_auto_before_anything_was_measured() -> None:
    plain = replace(_LARGE, name="some GPU")
    assert backends.choice(plain).implementation == "wgpu"
    assert backends.choice(replace(plain, matrix_shapes=_SHAPES)).implementation == "wgpu", "nothing was measured"
    assert "shaderlm tune" in backends.choice(plain).reason
    assert not backends.any_measured()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"seconds": 1}', "nothing", "stale", "nan"])
def test_a_measurement_that_is_of_no_use(damage: str) -> None:
    caps = replace(_LARGE, name="some GPU")
    path = backends.save(caps, {"wgpu": 2.0, "dawn": 1.0})
    assert path is not None
    assert backends.read(caps) == {"wgpu": 2.0, "dawn": 1.0}
    record = json.loads(path.read_text())
    texts = {"stale": {**record, "driver": "older"}, "nan": {**record, "seconds": {"wgpu": float("nan"), "dawn": 1.0}}}
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
    monkeypatch.setattr(planning, "seconds_by", lambda adapters: pytest.fail("it was measured before"))
    assert measure_backends(0, again=False, say=said.append) == found
    assert said == ["implementations of WebGPU"]
    monkeypatch.setattr(planning, "seconds_by", lambda adapters: {"wgpu": 1.0})
    assert measure_backends(0, again=True) is None, "one of them cannot run it"
    assert adapters()[0].reason == found.reason


@pytest.mark.usefixtures("cache")
def test_tune_says_which_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "seconds_by", lambda adapters: {"wgpu": 0.2, "dawn": 0.1})
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
