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
from shaderlm.gpu import Device, DeviceCaps, Program, Slot
from shaderlm.gpu.adapters import choose as choose_adapter
from shaderlm.gpu.stock import Stock
from shaderlm.graph import resolve
from shaderlm.kernels import Dims, LaunchList, routes_of
from shaderlm.kernels.attention.attention import alone_with, decode_with

from .compare import assert_close
from .operands import MAKERS
from .tiny_models import write_tiny_llama

_KERNELS = Path(kernels.__file__).parent
_DECLARED = re.compile(r"@binding\((\d+)\)\s*var<storage[^>]*>\s*(\w+)\s*:\s*array<(.+)>;")
_SHARED = re.compile(r"var<workgroup>\s*(\w+)\s*:\s*array<(.+),\s*([^,;]+)>;")
_MAIN = re.compile(r"@compute @workgroup_size\(WG\)\s*fn main\(([^{]*)\)\s*\{")
_ARGUMENT = re.compile(r"@builtin\((\w+)\)\s*(\w+)\s*:\s*([\w<>]+)")


# Every index is in range ---------------------------------------------------------------------------------


def _element(kind: str, aliases: dict[str, str]) -> int:
    kind = aliases.get(kind.strip(), kind.strip())
    return 4 if kind in ("f32", "u32") else {"2": 8, "3": 16, "4": 16}[kind[3]]


def _closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "[") - (text[i] == "]")
        if depth == 0:
            return i
    raise AssertionError("a bracket is not closed")


def _guarded(source: str, sizes: dict[str, int]) -> tuple[str, list[str]]:
    """The source with a watch on every index of its arrays, one bit each in a buffer more; and their names."""
    text = re.sub(r"//[^\n]*", "", source)
    aliases = dict(re.findall(r"^alias (\w+)\s*=\s*(.+?);", text, re.M))
    lengths = {name: f"{-(-sizes[name] // _element(kind, aliases))}u" for _, name, kind in _DECLARED.findall(text)}
    lengths |= {name: f"u32({length})" for name, _, length in _SHARED.findall(text)}
    for bit, (name, length) in enumerate(lengths.items()):
        at, pattern = 0, re.compile(rf"(?<![\w.]){name}\[")
        while found := pattern.search(text, at):
            end = _closing(text, found.end() - 1)
            index = f"guarded({text[found.end() : end]}, {length}, {bit}u)"
            text, at = text[: found.end()] + index + text[end:], found.end()
    entry = _MAIN.search(text)
    assert entry
    arguments = _ARGUMENT.findall(entry.group(1))
    plain = ", ".join(f"{name}: {kind}" for _, name, kind in arguments)
    text = text[: entry.start()] + f"fn guarded_main({plain}) {{" + text[entry.end() :]
    built_in = ", ".join(f"@builtin({what}) {name}: {kind}" for what, name, kind in arguments)
    text += f"""
@group(0) @binding({text.count("@binding(")}) var<storage, read_write> outside: array<atomic<u32>>;
var<private> seen: u32;
fn guarded(i: u32, length: u32, bit: u32) -> u32 {{
    seen = seen | select(0u, 1u << bit, i >= length);
    return min(i, length - 1u);
}}
@compute @workgroup_size(WG) fn main({built_in}) {{
    guarded_main({", ".join(name for _, name, _ in arguments)});
    if (seen != 0u) {{
        atomicOr(&outside[0], seen);
    }}
}}
"""
    return text, list(lengths)


def run_guarded(device: Device, program: Program) -> tuple[dict[str, Any], list[str]]:
    """What a program computes, and which arrays it reads or writes past their end."""
    buffers, steps, names = dict(program.buffers), [], []
    for i, step in enumerate(program.steps):
        sizes = {}
        for number, name, _ in _DECLARED.findall(step.source):
            contents = program.buffers[step.slots[int(number)].buffer]
            sizes[name] = contents if isinstance(contents, int) else contents.nbytes
        source, arrays = _guarded(step.source, sizes)
        buffers[f"outside.{i}"] = 16
        steps.append(replace(step, source=source, slots=(*step.slots, Slot(f"outside.{i}", "storage"))))
        names.append([f"{step.label}: {name}" for name in arrays])
    watched = tuple(f"outside.{i}" for i in range(len(steps)))
    found = device.run(Program(buffers, tuple(steps), (*program.outputs, *watched)))
    bits = [int(found.pop(name).view(np.uint32)[0]) for name in watched]
    pairs = zip(bits, names, strict=True)
    return found, [name for each, arrays in pairs for i, name in enumerate(arrays) if each >> i & 1]


@pytest.fixture(scope="module")
def unchecked(pytestconfig: pytest.Config) -> Device:
    """The adapter as a GPU is used: parameters written into the source, and no checks that would hide a bad index."""
    device = Device(choose_adapter(pytestconfig.getoption("--device")), without=("pass_timestamps",), checked=False)
    device.caps = replace(device.caps, kind="discrete")
    return device


_Cut = Callable[[Dims, DeviceCaps], LaunchList]
ODD: list[tuple[str, str, dict[str, Any], int, _Cut | None]] = [
    # heads that do not fill their lanes, a cache with fewer rows than are asked for early, a position before its end
    ("attention", "split", {"Hq": 5, "Hkv": 1, "D": 260, "C": 3, "cache": "f16"}, 1, partial(alone_with, 128)),
    (
        "attention",
        "split",
        {"Hq": 26, "Hkv": 2, "D": 36, "C": 300, "cache": "f32"},
        258,
        partial(decode_with, 256, 128),
    ),
    # rows that do not fill a workgroup, one block of inputs
    ("linear_add", "gemv_int16", {"M": 1, "K": 32, "N": 15, "format": "q8_0", "bias": True}, 0, None),
    ("linear_silu_mul", "gemv", {"M": 1, "K": 96, "N": 34, "format": "q4_1", "bias": False}, 0, None),
]


@pytest.mark.parametrize(("op", "route", "sizes", "position", "config"), ODD, ids=lambda value: str(value)[:24])
def test_every_index_is_in_range(
    op: str, route: str, sizes: dict[str, Any], position: int, config: _Cut | None, unchecked: Device
) -> None:
    """Also where the result would not tell: what is read too early is left out again."""
    dims = resolve(op, {**sizes, "S": 1, "pos": sizes["C"] - 1} if op == "attention" else sizes)
    taken = next(each for each in routes_of(op) if each.name == route)
    taken = replace(taken, launch_list=config) if config else taken
    assert taken.reason(dims, unchecked.caps) is None
    operands, expected = MAKERS[op](np.random.default_rng(1), {**dims, "pos": position} if config else dims)
    found, outside = run_guarded(unchecked, lower(taken, dims, unchecked.caps, operands))
    assert outside == []
    wanted = expected["out"]
    assert wanted is not None
    actual = found["out"].view(np.float32).reshape(*wanted.shape[:-1], -1)[..., : wanted.shape[-1]]
    assert_close(actual, wanted, "attention f16" if dims.get("cache") == "f16" else "linear", f"{op} {sizes}")


def test_an_index_out_of_range_is_seen(unchecked: Device) -> None:
    """The watch above sees what it is there for."""
    dims = resolve("argmax", {"rows": 1, "width": 7})
    route = next(each for each in routes_of("argmax") if each.name == "row")
    program = lower(route, dims, unchecked.caps, {"x": np.arange(7, dtype=np.float32)[None]})
    assert run_guarded(unchecked, program)[1] == []
    (step,) = program.steps
    wrong = replace(step, source=re.sub(r"\bx\[", "x[1u + ", step.source))
    assert run_guarded(unchecked, replace(program, steps=(wrong,)))[1] == ["argmax_row: x"]


# Two lanes never share a vector --------------------------------------------------------------------------


def _written_in_part(path: Path) -> list[str]:
    text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    arrays = [(name, kind) for name, kind, _ in _SHARED.findall(text)]
    arrays += [(name, kind) for _, name, kind in _DECLARED.findall(text)]
    found = set()
    for name in (name for name, kind in arrays if kind.startswith("vec")):
        for used in re.finditer(rf"(?<![\w.]){name}\[", text):
            rest = text[_closing(text, used.end() - 1) + 1 :]
            if re.match(r"(\.[xyzwrgba]|\[[^\]]*\])\s*[-+*/|&^]?=[^=]", rest):
                found.add(f"{path.stem}: {name}")
    return sorted(found)


def test_vectors_that_lanes_share_are_written_whole() -> None:
    """WGSL lets a write to a component write the whole vector, and Metal and D3D12 do: lanes undo each other's work."""
    assert [each for path in sorted(_KERNELS.rglob("*.wgsl")) for each in _written_in_part(path)] == []


# Nobody waits for ever -----------------------------------------------------------------------------------


def test_nothing_is_taken_from_a_closed_stock() -> None:
    """Closed by another thread between the look at `closed` and `take`: an error, not a wait without end."""
    shelf = Stock(object, lambda made: None)
    shelf.close()
    said: list[BaseException] = []

    def take() -> None:
        try:
            shelf.take()
        except Exception as problem:
            said.append(problem)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    taker.join(1)
    assert (taker.is_alive(), len(said)) == (False, 1)


_COLLECTING = """
import sys
from shaderlm.gpu import open_device
from tests.test_gpu_room import adding, program
device = open_device(sys.argv[1])
device.records_ahead = True
loaded = device.load(program(adding("collected"), steps=3))
with device.watched("submission") as watch:
    for count in (1, 2):
        stock = device.stock([loaded], loaded.buffers["out"])
        for _ in range(count):
            device.submit_from(stock).open()
        print(len(watch.collect()), stock.closed)
"""


def test_a_watch_may_be_read_before_it_ends(device: Device) -> None:
    """What is in stock was recorded with queries of the set that the reading gave back."""
    command = [sys.executable, "-c", _COLLECTING, device.caps.name]
    root = Path(__file__).parent.parent
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=False, cwd=root)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["1", "True", "2", "True"], "")


def test_a_session_of_a_closed_model_says_so(tmp_path: Path, device: Device) -> None:
    """Where a buffer that was given back is used, wgpu's library ends the process."""
    with load(write_tiny_llama(tmp_path / "tiny.gguf"), device=device) as model:
        session = model.runner.session()
        session.feed([1, 2])
        session.choose(None).wait()
    uses: list[Callable[[], Any]] = [
        session.logits,
        partial(session.advance, None),
        partial(session.choose, None),
        partial(session.feed, [3]),
    ]
    for use in uses:
        with pytest.raises(InputError, match="this model is closed"):
            use()
    session.close()
