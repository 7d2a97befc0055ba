"""Risks of kernels that run unchecked and of steps recorded ahead: indices, races in memory, threads that wait."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm import kernels, load
from shaderlm.compile import lower
from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.gpu.command_pool import CommandBufferPool
from shaderlm.graph import resolve
from shaderlm.kernels import routes_of
from shaderlm.runtime.sampler_settings import SamplerSettings

from .compare import assert_close
from .index_guard import DECLARED, SHARED, closing, run_guarded, unchecked_device
from .operands import MAKERS
from .session import Session
from .tiny_models import write_tiny_llama

_KERNELS = Path(kernels.__file__).parent


# Every index is in range ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unchecked(pytestconfig: pytest.Config) -> Device:
    return unchecked_device(pytestconfig.getoption("--device"))


ODD: list[tuple[str, str, dict[str, Any]]] = [
    # rows that do not fill a workgroup, one block of inputs (attention: test_attention)
    ("linear", "gemv_int16", {"tokens": 1, "K": 32, "N": 15, "format": "q8_0", "bias": True, "epilogue": "add"}),
    ("linear", "gemv", {"tokens": 1, "K": 96, "N": 34, "format": "q4_1", "epilogue": "silu_mul"}),
    ("linear", "gemv_int16", {"tokens": 1, "K": 64, "N": 21, "format": "q4_0", "prologue": "rms_norm"}),
]


@pytest.mark.full
@pytest.mark.parametrize(("op", "route", "sizes"), ODD, ids=lambda value: str(value)[:24])
def test_every_index_is_in_range(op: str, route: str, sizes: dict[str, Any], unchecked: Device) -> None:
    """Also where the result would not tell: what is read too early is left out again."""
    dims = resolve(op, sizes)
    taken = next(each for each in routes_of(op) if each.name == route)
    assert taken.reason(dims, unchecked.caps) is None
    operands, expected = MAKERS[op](np.random.default_rng(1), dims)
    found, outside = run_guarded(unchecked, lower(taken, dims, unchecked.caps, operands))
    assert outside == []
    wanted = expected["out"]
    assert wanted is not None
    actual = found["out"].view(np.float32).reshape(*wanted.shape[:-1], -1)[..., : wanted.shape[-1]]
    assert_close(actual, wanted, "linear", f"{op} {sizes}")


@pytest.mark.full
def test_an_index_out_of_range_is_seen(unchecked: Device) -> None:
    """The watch above sees what it is there for."""
    dims = resolve("argmax", {"rows": 1, "width": 7})
    route = next(each for each in routes_of("argmax") if each.name == "row")
    program = lower(route, dims, unchecked.caps, {"x": np.arange(7, dtype=np.float32)[None]})
    assert run_guarded(unchecked, program)[1] == []
    (step,) = program.steps
    wrong = replace(step, source=re.sub(r"\blogits\[", "logits[1u + ", step.source))
    assert run_guarded(unchecked, replace(program, steps=(wrong,)))[1] == ["argmax_row: logits"]


# Two lanes never share a vector --------------------------------------------------------------------------


def _written_in_part(path: Path) -> list[str]:
    text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    arrays = [(name, kind) for name, kind, _ in SHARED.findall(text)]
    arrays += [(name, kind) for _, name, kind in DECLARED.findall(text)]
    found = set()
    for name in (name for name, kind in arrays if kind.startswith("vec")):
        for used in re.finditer(rf"(?<![\w.]){name}\[", text):
            rest = text[closing(text, used.end() - 1) + 1 :]
            if re.match(r"(\.[xyzwrgba]|\[[^\]]*\])\s*[-+*/|&^]?=[^=]", rest):
                found.add(f"{path.stem}: {name}")
    return sorted(found)


def test_vectors_that_lanes_share_are_written_whole() -> None:
    """WGSL lets a write to a component write the whole vector, and Metal and D3D12 do: lanes undo each other's work."""
    assert [each for path in sorted(_KERNELS.rglob("*.wgsl")) for each in _written_in_part(path)] == []


# Nobody waits for ever -----------------------------------------------------------------------------------


def test_nothing_is_taken_from_a_closed_pool() -> None:
    """Closed by another thread between the look at `closed` and `take`: an error, not a wait without end."""
    pool = CommandBufferPool(object, lambda made: None)
    pool.close()
    said: list[BaseException] = []

    def take() -> None:
        try:
            pool.take()
        except Exception as problem:
            said.append(problem)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    taker.join(1)
    assert (taker.is_alive(), len(said)) == (False, 1)


_COLLECTING = """
import sys
from shaderlm.gpu import open_device
from tests.gpu_programs import adding, program
from tests.policies import with_policy
device = open_device(sys.argv[1])
device.caps = with_policy(device.caps, record_ahead=True)
bound = device.bind(program(adding("collected"), steps=3))
with device.traced("submission") as tracer:
    for count in (1, 2):
        pool = device.command_pool([bound], (bound.buffers["out"], 16))
        for _ in range(count):
            device.submit_from(pool).wait()
        print(len(tracer.collect()), pool.closed)
"""


def test_a_tracer_may_be_read_before_it_ends(device: Device) -> None:
    """What is in the pool was recorded with queries of the set that the reading gave back."""
    command = [sys.executable, "-c", _COLLECTING, device.caps.name]
    root = Path(__file__).parent.parent
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False, cwd=root)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["1", "True", "2", "True"], "")


def test_a_session_of_a_closed_model_says_so(tmp_path: Path, device: Device) -> None:
    """Where a buffer that was given back is used, wgpu's library ends the process."""
    with load(write_tiny_llama(tmp_path / "tiny.gguf"), device=device) as model:
        session = Session(model.runner)
        session.sample([1, 2]).wait()
        session.advance().wait()
    uses: list[Callable[[], Any]] = [
        session.advance,
        partial(session.advance, SamplerSettings(temperature=1.0)),
        *(partial(use, [3]) for use in (session.feed, session.sample, session.logits, session.all_logits)),
        partial(model.runner.fork, session.sequence),
        partial(Session, model.runner),
    ]
    for use in uses:
        with pytest.raises(InputError, match="this model is closed"):
            use()
    session.close()
