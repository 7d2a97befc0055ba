"""The rules of structure that a machine can check: who imports whom, file sizes, and the form of the WGSL files."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.formats.blocks import BLOCKS
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps
from shaderlm.graph.ops import _CHOICES, OPS, REQUIRED, resolve
from shaderlm.graph.ops import FORMATS as GRAPH_FORMATS
from shaderlm.kernels import LaunchList, Route, all_routes, compose
from shaderlm.kernels.linear.formats import FORMATS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shaderlm"
KERNELS = SOURCE / "kernels"
PYTHON = sorted(SOURCE.rglob("*.py"))
WGSL = sorted(KERNELS.rglob("*.wgsl"))

# Imports -------------------------------------------------------------------------------------------------

LAYERS: tuple[str, ...] = ("errors", "formats", "text", "graph", "gpu", "kernels", "models", "compile", "runtime")
LAYERS += ("ops", "engine", "bench", "profile", "server", "cli")
PEERS = (
    {"formats", "text", "graph", "gpu"},
    {"models", "kernels"},
    {"server", "cli", "bench", "profile"},
    {"runtime", "text"},
    {"compile", "text"},
)
ALLOWED = {("cli", "bench"), ("cli", "profile"), ("profile", "bench")}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports, `from x import y` as x.y."""
    package = ("shaderlm", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parts, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def wrong(path: Path, name: str) -> bool:
    """Does this import point up, sideways between peers, or past gpu.caps?"""
    here = path.relative_to(SOURCE).with_suffix("").parts[0]
    there = [*name.split("."), ""][1]
    if not name.startswith("shaderlm.") or here == there or here in ("__init__", "__main__") or there == "__version__":
        return False
    if here not in LAYERS or there not in LAYERS or LAYERS.index(there) > LAYERS.index(here):
        return True
    if (here, there) == ("kernels", "gpu"):
        return not name.startswith("shaderlm.gpu.caps")
    return (here, there) not in ALLOWED and any({here, there} <= peers for peers in PEERS)


def test_imports_point_down() -> None:
    found = [f"{p.relative_to(ROOT)}:{line} imports {n}" for p in PYTHON for line, n in imports(p) if wrong(p, n)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("gpu/device.py", "shaderlm.kernels.route"),
        ("graph/ops.py", "shaderlm.gpu"),
        ("kernels/route.py", "shaderlm.gpu.device"),
        ("kernels/route.py", "shaderlm.models.llama"),
        ("bench/measure.py", "shaderlm.cli"),
        ("errors.py", "shaderlm.formats"),
        ("attic/old.py", "shaderlm.errors"),
    ],
)
def test_the_import_rule_sees_a_wrong_import(file: str, name: str) -> None:
    assert wrong(SOURCE / file, name)


def test_only_the_gpu_package_imports_wgpu() -> None:
    late = re.compile(r"(import|from)\s+wgpu\b|(import_module|__import__)\(\s*[\"']wgpu")
    for path in PYTHON:
        if path.relative_to(SOURCE).parts[0] == "gpu":
            continue
        assert not [n for _, n in imports(path) if n.split(".")[0] == "wgpu"], path
        assert not late.search(path.read_text(encoding="utf-8")), path


# Files ---------------------------------------------------------------------------------------------------


def test_files_are_under_400_lines() -> None:
    files = [*PYTHON, *WGSL, *(ROOT / "tests").rglob("*.py")]
    long = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {name: lines for name, lines in long.items() if lines >= 400}


def test_no_must_match_comments() -> None:
    for path in (*PYTHON, *WGSL):
        text = path.read_text(encoding="utf-8").lower()
        assert "must match" not in text, f"{path}: say it once and derive it"
        assert "keep in sync" not in text, f"{path}: say it once and derive it"


# WGSL ----------------------------------------------------------------------------------------------------

_BINDING = re.compile(r"^@group\(0\)\s*@binding\((\d+)\)\s*var<([a-z_, ]+)>\s*(\w+)", re.M)


@pytest.mark.parametrize("path", WGSL, ids=lambda path: path.stem)
def test_wgsl_file(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith("// "), "a WGSL file starts with its formula or its purpose"
    assert len(re.findall(r"\w+", first)) >= 3, f"says too little: {first}"
    assert not re.search(r"^\s*(enable|requires)\b", text, re.M), "compose adds the enable lines"
    found = _BINDING.findall(text)
    assert [int(i) for i, _, _ in found] == list(range(len(found))), "bindings are numbered in order"
    spaces = [space.replace(" ", "") for _, space, _ in found]
    rank = {"storage,read": 0, "storage,read_write": 1, "uniform": 2}
    assert spaces == sorted(spaces, key=rank.__getitem__), f"inputs, outputs, params: {spaces}"
    if found:
        assert found[-1][1:] == ("uniform", "params"), "params come last"
        assert spaces.count("uniform") == 1


# Routes, discovered --------------------------------------------------------------------------------------

# Sizes for the dims that have no default, small and large, fit for as many routes as possible. Others get 8.
_SIZES: tuple[dict[str, int], ...] = (
    {"M": 1, "K": 256, "width": 4096, "Hq": 4, "Hkv": 2, "S": 1, "C": 16},
    {"M": 1, "K": 4096, "N": 8192, "width": 8192, "Hq": 32, "D": 128, "S": 1, "C": 8192, "pos": 8000},
    {"M": 512, "K": 4096, "N": 8192, "rows": 512, "width": 4096, "count": 4096, "Hq": 32, "D": 128, "S": 512, "C": 512},
)
_CAPS: list[DeviceCaps] = [
    replace(WEBGPU_DEFAULT, kind=kind, subgroups=subgroups, f16=f16)
    for kind, subgroups, f16 in itertools.product(("discrete", "software"), (True, False), (True, False))
]


def shapes(op: str) -> Iterator[dict[str, Any]]:
    """Dims of an op: its sizes in every combination of its formats, with and without its switches."""
    declared = OPS[op].dims
    required = [name for name, default in declared.items() if default is REQUIRED]
    switches = {
        name: _CHOICES.get(name, (False, True))
        for name, default in declared.items()
        if name in _CHOICES or isinstance(default, bool)
    }
    for sizes, values in itertools.product(_SIZES, itertools.product(*switches.values())):
        given = dict.fromkeys(required, 8) | {
            name: sizes[name] for name in sizes if name in declared and not callable(declared[name])
        }
        yield resolve(op, {**given, **dict(zip(switches, values, strict=True))})


def launch_lists(route: Route) -> Iterator[LaunchList]:
    """What the route makes of every shape on every kind of device."""
    for dims, caps in itertools.product(shapes(route.op), _CAPS):
        if route.unsupported_reason(dims, caps) is None:
            yield route.launch_list(dims, caps)


ROUTES = [route for routes in all_routes().values() for route in routes]


def test_every_op_with_kernels_is_declared() -> None:
    assert set(all_routes()) == set(OPS)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.op}/{route.name}")
def test_route(route: Route) -> None:
    found = list(launch_lists(route))
    assert found, "no shape of this file fits the route; widen _SIZES"
    names = set(OPS[route.op].inputs) | set(OPS[route.op].outputs)
    for launch_list in found:
        bound: set[str] = set()
        for dispatch in launch_list.dispatches:
            shader = compose(dispatch.kernel, dispatch.constants)
            assert shader.bindings[-1] == ("params", "uniform")
            assert shader.source.count("@compute @workgroup_size(WG)\nfn main(") == 1
            assert {name for name, _ in shader.params} == set(dispatch.params)
            bound |= {dispatch.bind.get(name, name) for name, _ in shader.bindings[:-1]}
        assert bound == set(launch_list.buffers), "buffers and bindings differ"
        assert names - {"bias"} <= {name.split(".")[0] for name in launch_list.buffers}


def test_all_routes_of_a_single_dispatch_op_share_one_binding_layout() -> None:
    for op, routes in all_routes().items():
        firsts = [next(launch_lists(route)) for route in routes]
        if any(len(launch_list.dispatches) > 1 for launch_list in firsts):
            continue
        layouts = {
            route.name: compose(launch_list.dispatches[0].kernel, launch_list.dispatches[0].constants).bindings
            for route, launch_list in zip(routes, firsts, strict=True)
        }
        assert len(set(layouts.values())) == 1, f"{op}: {layouts}"


def test_no_kernel_is_dead() -> None:
    used = {
        path
        for route in ROUTES
        for launch_list in launch_lists(route)
        for dispatch in launch_list.dispatches
        for path in (dispatch.kernel.path, *dispatch.kernel.include)
    }
    assert {path.relative_to(KERNELS).with_suffix("").as_posix() for path in WGSL} == used


def test_formats_are_known_by_the_same_names_everywhere() -> None:
    assert list(FORMATS) == list(GRAPH_FORMATS)
    assert {name: multiple for name, multiple in GRAPH_FORMATS.items() if multiple > 1} == {
        name: block.weights for name, block in BLOCKS.items()
    }


@pytest.mark.parametrize("name", BLOCKS)
def test_a_format_stays_as_small_as_in_the_file(name: str) -> None:
    """Words and scales on the GPU take at most a tenth more than GGUF's blocks."""
    form, block = FORMATS[name], BLOCKS[name]
    on_gpu = block.weights / 32 * form.block_bytes + block.weights / form.group * form.group_bytes
    assert on_gpu <= 1.1 * block.nbytes
    rows = np.zeros((3, 2 * block.nbytes), np.uint8)
    words, scales = form.repack(rows)
    assert words.nbytes + scales.nbytes == 3 * 2 * on_gpu


def test_route_names_are_unique_and_the_default_is_exact() -> None:
    for op, routes in all_routes().items():
        names = [route.name for route in routes]
        assert len(names) == len(set(names)), op
        assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) for name in names), names
        assert routes[0].exact or all(route.fast for route in routes), f"{op}: the preferred route rounds"
