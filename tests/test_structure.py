"""The rules of structure that a machine can check: who imports whom, file sizes, and the form of the WGSL files."""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.formats.weight_formats import BLOCK_FORMATS, WEIGHT_FORMATS
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps, MatrixShape
from shaderlm.graph.ops import _CHOICES, OPS, resolve
from shaderlm.graph.primitives import REQUIRED
from shaderlm.kernels import LaunchList, Route, all_routes, compose
from shaderlm.kernels.linear.formats import FORMATS, REPACK
from shaderlm.kernels.linear.matrix import X_OF_PARTS
from shaderlm.kernels.route import buffers_of, shader_of
from shaderlm.kernels.wgsl import declared_buffers

from . import tiers
from .cases import CASES

pytestmark = pytest.mark.xdist_group("test_structure")

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shaderlm"
KERNELS = SOURCE / "kernels"
PYTHON = sorted(SOURCE.rglob("*.py"))
WGSL = sorted(KERNELS.rglob("*.wgsl"))

# Imports -------------------------------------------------------------------------------------------------

LAYERS: tuple[str, ...] = (
    "version",
    "errors",
    "files",
    "install",
    "limited",
    "formats",
    "vision",
    "text",
    "graph",
    "gpu",
    "kernels",
    "models",
    "compile",
)
LAYERS += ("runtime", "ops", "engine", "page", "evaluate", "bench", "profile", "server", "web", "ray", "cli")
PEERS = (
    {"formats", "vision", "text", "graph", "gpu"},
    {"models", "kernels"},
    {"cli", "evaluate", "bench", "profile", "server", "web", "ray"},
    {"runtime", "text"},
    {"compile", "text"},
)
_WITH_COMMANDS = ("evaluate", "bench", "profile", "ray", "server", "web")  # what `cli` runs
ALLOWED = {*(("cli", each) for each in _WITH_COMMANDS), ("ray", "server")}


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports, `from x import y` as x.y."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = ("shaderlm", *path.relative_to(SOURCE).parts[:-1])
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parts, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those within a node: few beside the parts of expressions, in which nothing is imported."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, name, ())
        for each in inner if isinstance(inner, list) else ():  # a lambda's body is an expression
            yield each
            yield from _statements(each)


def _package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return found[0].lower().replace("-", "_")


def test_dependencies_are_declared() -> None:
    """What is imported is a dependency or belongs to an extra. No extra has what a dependency brings anyway."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {_package(each) for each in project["dependencies"]}
    extras = project["optional-dependencies"].items()
    optional = {_package(each) for name, listed in extras if name != "dev" for each in listed}
    called = {"PIL": "pillow"}  # packages whose modules have other names
    modules = {name.split(".")[0] for path in PYTHON for _, name in imports(path)} - set(sys.stdlib_module_names)
    imported = {called.get(name, name) for name in modules}
    unknown = imported - needed - optional - {"shaderlm", "_cffi_backend"}
    assert not unknown, f"imported, but not in pyproject.toml: {sorted(unknown)}"
    for package in sorted(needed):
        brought = {_package(each) for each in requires(package) or [] if "extra ==" not in each}
        assert not brought & optional, f"{package} brings {sorted(brought & optional)}: no extra is needed"


# Of a package below, the one module that may be imported: plain data.
ONLY = {
    ("kernels", "gpu"): "shaderlm.gpu.caps.",
    ("graph", "formats"): "shaderlm.formats.weight_formats.",
}


def wrong(path: Path, name: str) -> bool:
    """Does this import point up, sideways between peers, or past the one module that may be imported?"""
    here = path.relative_to(SOURCE).with_suffix("").parts[0]
    there = [*name.split("."), ""][1]
    if not name.startswith("shaderlm.") or here == there or here in ("__init__", "__main__"):
        return False
    if here not in LAYERS or there not in LAYERS or LAYERS.index(there) > LAYERS.index(here):
        return True
    if (here, there) in ONLY:
        return not f"{name}.".startswith(ONLY[here, there])
    return (here, there) not in ALLOWED and any({here, there} <= peers for peers in PEERS)


def test_imports_point_down() -> None:
    found = [f"{p.relative_to(ROOT)}:{line} imports {n}" for p in PYTHON for line, n in imports(p) if wrong(p, n)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("gpu/device.py", "shaderlm.kernels.route"),
        ("graph/ops.py", "shaderlm.gpu"),
        ("graph/ops.py", "shaderlm.formats.gguf.GgufFile"),
        ("kernels/route.py", "shaderlm.gpu.device"),
        ("kernels/route.py", "shaderlm.models.supported"),
        ("bench/measure.py", "shaderlm.cli"),
        ("profile/measure.py", "shaderlm.bench.measure"),
        ("bench/measure.py", "shaderlm.profile.measure"),
        ("engine/planning.py", "shaderlm.bench.synthetic"),
        ("errors.py", "shaderlm.formats"),
        ("attic/old.py", "shaderlm.errors"),
    ],
)
def test_the_import_rule_sees_a_wrong_import(file: str, name: str) -> None:
    assert wrong(SOURCE / file, name)


def test_no_modules_import_each_other() -> None:
    """Neither when they are used, nor for types alone."""
    names = {_module(path): path for path in PYTHON}
    below = {name: {_home(each, names) for _, each in imports(path)} - {name, ""} for name, path in names.items()}
    try:
        TopologicalSorter(below).prepare()
    except CycleError as problem:
        pytest.fail(f"these import each other: {' → '.join(problem.args[1])}")


def _module(path: Path) -> str:
    return ".".join(("shaderlm", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def _home(name: str, modules: Mapping[str, Path]) -> str:
    """The module that an imported name is, or is from; "" for those of others."""
    return next((each for each in (name, name.rpartition(".")[0]) if each in modules), "")


def test_only_the_gpu_package_imports_wgpu() -> None:
    late = re.compile(r"(import|from)\s+wgpu\b|(import_module|__import__)\(\s*[\"']wgpu")
    for path in PYTHON:
        if path.relative_to(SOURCE).parts[0] == "gpu":
            continue
        assert not [n for _, n in imports(path) if n.split(".")[0] == "wgpu"], path
        assert not late.search(path.read_text(encoding="utf-8")), path


# Files ---------------------------------------------------------------------------------------------------


def test_policies_are_asked_by_name() -> None:
    """What follows from the kind of a device is decided in gpu/policy.py; the kind itself is for words to people."""
    deciding = ("graph", "kernels", "models", "compile", "runtime", "ops")
    asking = re.compile(r"\.software\b|\.backend\s*[!=]=|\bkind\s*[!=]= .(software|discrete|integrated)")
    for package in deciding:
        for path in sorted((SOURCE / package).rglob("*.py")):
            assert not asking.search(path.read_text(encoding="utf-8")), f"{path} asks for a device's kind"


def test_a_policy_has_one_place() -> None:
    """`DeviceCaps.policy`: kernels see only the capabilities, so a second place could not reach them."""
    elsewhere = re.compile(r"(?<!caps)\.policy\b(?! import)")
    for path in PYTHON:
        found = elsewhere.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path} keeps a policy beside the capabilities"


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
    if "uniform" in spaces:
        assert found[-1][1:] == ("uniform", "params"), "params come last"
        assert spaces.count("uniform") == 1


# Routes, discovered --------------------------------------------------------------------------------------

# Sizes for the dims that have no default, small and large, fit for as many routes as possible. Others get 8.
_SIZES: tuple[dict[str, int], ...] = (
    {"tokens": 1, "K": 256, "N": 128, "width": 4096, "Hq": 4, "Hkv": 2, "D": 8, "keys": 16, "rows": 1},
    {"tokens": 1, "K": 4096, "N": 8192, "width": 8192, "Hq": 32, "Hkv": 8, "D": 128, "keys": 8000, "rows": 1},
    {"tokens": 512, "K": 4096, "N": 8192, "rows": 512, "width": 4096, "count": 4096, "Hq": 32, "Hkv": 8, "D": 128}
    | {"keys": 600},
    # Few rows and columns, of which workgroups share k.
    {
        "tokens": 16,
        "K": 4096,
        "N": 512,
        "rows": 16,
        "width": 4096,
        "count": 4096,
        "Hq": 4,
        "Hkv": 2,
        "D": 8,
        "keys": 32,
    },
    # Few rows, whose k one workgroup takes.
    {"tokens": 16, "K": 2048, "N": 64, "rows": 16, "width": 64, "count": 64, "Hq": 4, "Hkv": 2, "D": 8, "keys": 32},
)
# A few rows of a large weight.
_FEW_ROWS = {"tokens": 4, "K": 2048, "N": 2048, "Hq": 4, "Hkv": 2, "D": 8}
_CAPS: list[DeviceCaps] = [
    replace(WEBGPU_DEFAULT, kind=kind, subgroups=subgroups, f16=f16)
    for kind, subgroups, f16 in (
        ("discrete", True, True),
        ("discrete", False, False),
        ("software", True, False),
        ("software", False, True),
    )
]
_UNITS: dict[str, Any] = {
    "matrix_shapes": (MatrixShape("f16", "f32", 16, 16, 16),),
    "subgroup_min": 32,
    "subgroup_max": 32,
}
_CAPS.append(replace(_CAPS[0], implementation="dawn", max_workgroup_memory=48 << 10, **_UNITS))


@cache
def shapes(op: str) -> list[dict[str, Any]]:
    """Dims of an op: its sizes in every combination of its choices, with and without its switches.

    Of most formats of weights, those in which no more than one choice is not the first. Of thousands, every seventh in
    the default tier.
    """
    found = list(_shapes(op))
    return found[::7] if tiers.runs_by_default() and len(found) > 1000 else found


def _shapes(op: str) -> Iterator[dict[str, Any]]:
    declared = OPS[op].dims
    required = [name for name, default in declared.items() if default is REQUIRED]
    switches = {
        name: _CHOICES.get(name, (False, True))
        for name, default in declared.items()
        if name in _CHOICES or isinstance(default, bool)
    }
    firsts = [choices[0] for choices in switches.values()]
    seen = set()
    every = (*_SIZES, _FEW_ROWS) if op == "linear" else _SIZES
    for sizes, values in itertools.product(every, itertools.product(*switches.values())):
        chosen = dict(zip(switches, values, strict=True))
        others = sum(value != first for value, first in zip(values, firsts, strict=True))
        if chosen.get("format", "q4_0") not in ("f32", "q4_0") and others > 2:  # the format is one
            continue
        given: dict[str, Any] = dict.fromkeys(required, 8) | {
            name: sizes[name] for name in sizes if name in declared and not callable(declared[name])
        }
        given |= chosen
        if given.get("epilogue") == "rope_kv_write":
            given["N"] = (given["Hq"] + 2 * given["Hkv"]) * given["D"]
        if op == "rms_norm_rope_attention_linear":  # whole blocks of every format
            given |= {"D": 64, "context": "single_pass", "keys": 0, "cache": "f16"}
            if given["epilogue"] not in ("none", "add"):
                continue
        if op == "linear":
            one_row = given["tokens"] == 1 and given["K"] % 32 == 0 and not given["batched"]
            given["rounded"] &= one_row and given["epilogue"] in ("silu_mul", "gelu_mul") and given["N"] % 64 == 0
            if given["prologue"] == "int16_activations" and not one_row:
                continue
        if op == "rms_norm_mul":
            given["residual"] |= given["scaled"]
        if op == "linear_experts" and given["residual"]:
            given["combine"] = "sum"
        if op == "linear_experts" and (given["combine"] == "sum" or given["prologue"] != "rms_norm"):
            given["prologue"] = "none"
        if (key := tuple(sorted(given.items()))) not in seen:
            seen.add(key)
            yield resolve(op, given)


def operands(op: str, dims: dict[str, Any]) -> set[str]:
    """The operands that a shape of an op has; a bias may be there as an empty buffer where there is none."""
    absent = set()
    if dims.get("batched") is False and dims.get("epilogue") != "rope_kv_write":
        absent.add("batch")
    if not (dims.get("paged") and dims.get("advance", True)) and "state" not in OPS[op].inputs:
        absent.add("page_table")
    if dims.get("counted") is False:
        absent.add("counts")
    if dims.get("sinks") is False:
        absent.add("sinks")
    if dims.get("scaled") is False:
        absent |= {"expert_scale", "scale"}
    if op == "linear_experts":
        absent |= {"factors"} if dims["combine"] != "sum" else set()
        absent |= {"norm_weight"} if dims["prologue"] == "none" else set()
        absent |= {"residual"} if not dims["residual"] else set()
    if op == "rms_norm_mul" and not dims["residual"]:
        absent.add("residual")
    if op == "rms_norm_rope_attention_linear" and dims["epilogue"] != "add":
        absent.add("residual")
    if op == "linear":
        after_skip = ("rms_norm_add_rms_norm", "rms_norm_add")
        absent |= {"norm_weight"} if dims["prologue"] not in ("rms_norm", "rms_norm_add_rms_norm") else set()
        absent |= {"skip", "post_weight", "sum"} if dims["prologue"] not in after_skip else set()
        absent |= {"residual"} if dims["epilogue"] not in ("add", "gelu_residual") else set()
        absent |= {"table", "k_cache", "v_cache"} if dims["epilogue"] != "rope_kv_write" else set()
    return {*OPS[op].inputs, *OPS[op].outputs} - absent


def launch_lists(route: Route) -> list[tuple[dict[str, Any], LaunchList]]:
    """What the route makes of every shape on every kind of device; if it takes none of them, of the cases of its op."""
    found = _launch_lists(route.op, route.name)
    if found:
        return [(shapes(route.op)[at], launch_list) for (at, _), launch_list in found.items()]
    cases = [case.dims for case in CASES if case.op == route.op]
    return [(cases[at], launch_list) for (at, _), launch_list in _made(route, cases).items()]


@cache
def _launch_lists(op: str, name: str) -> dict[tuple[int, int], LaunchList]:
    """By the numbers of the shape and of the device."""
    return _made(next(each for each in all_routes()[op] if each.name == name), shapes(op))


def _made(route: Route, shapes: list[dict[str, Any]]) -> dict[tuple[int, int], LaunchList]:
    return {
        (at, kind): route.launch_list(dims, caps)
        for (at, dims), (kind, caps) in itertools.product(enumerate(shapes), enumerate(_CAPS))
        if route.unsupported_reason(dims, caps) is None
    }


ROUTES = [route for routes in all_routes().values() for route in routes]


def test_every_op_with_kernels_is_declared() -> None:
    assert set(all_routes()) == set(OPS)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.op}/{route.name}")
def test_route(route: Route) -> None:
    found = launch_lists(route)
    assert found, "no case of tests/cases.py and no shape of this file fits the route: add a case"
    names = set(OPS[route.op].inputs) | set(OPS[route.op].outputs)
    for dims, launch_list in found:
        bound: set[str] = set()
        for dispatch in launch_list.dispatches:
            shader = compose(dispatch.kernel, dispatch.constants)
            assert shader.bindings[-1] == ("params", "uniform")
            assert shader.source.count("@compute @workgroup_size(WG)\nfn main(") == 1
            assert {name for name, _ in shader.params} == set(dispatch.params)
            assert {name for name, _ in shader.bindings[:-1]} == set(declared_buffers(dispatch.kernel))
            bound |= {dispatch.bind.get(name, name) for name, _ in shader.bindings[:-1]}
        assert bound == set(launch_list.buffers), "buffers and bindings differ"
        there = {name.split(".")[0] for name, nbytes in launch_list.buffers.items() if nbytes}
        wanted = operands(route.op, dims)
        assert wanted - {"bias"} <= there, f"not bound: {wanted - there} of {dims}"
        assert there & names <= wanted, f"bound for nothing: {there & names - wanted} of {dims}"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.op}/{route.name}")
def test_the_buffers_of_a_dispatch_are_known_without_its_shader(route: Route) -> None:
    """Of one dispatch of every kernel for everything that it may leave unbound."""
    all_dispatches = (dispatch for _, launch_list in launch_lists(route) for dispatch in launch_list.dispatches)
    kinds = {(each.kernel.path, each.specialised, each.unbound): each for each in all_dispatches}
    for dispatch in kinds.values():
        shader = shader_of(dispatch)
        bound = {dispatch.bind.get(name, name) for name, _ in shader.bindings if name != "params"}
        assert set(buffers_of(dispatch)) == bound


@pytest.mark.parametrize("op", all_routes())
def test_all_routes_of_a_single_dispatch_op_share_one_binding_layout(op: str) -> None:
    """Wherever several routes run a shape, and each by one dispatch."""
    layouts: dict[tuple[int, int], dict[str, Any]] = {}
    for route in all_routes()[op]:
        for place, launch_list in _launch_lists(op, route.name).items():
            if len(launch_list.dispatches) == 1:
                (dispatch,) = launch_list.dispatches
                bindings = compose(dispatch.kernel, dispatch.constants).bindings
                layouts.setdefault(place, {})[route.name] = bindings
    for (at, _), found in layouts.items():
        assert len(set(found.values())) == 1, f"{op} {shapes(op)[at]}: {found}"


def test_no_kernel_is_dead() -> None:
    used = {
        path
        for route in ROUTES
        for _, launch_list in launch_lists(route)
        for dispatch in launch_list.dispatches
        for path in (dispatch.kernel.path, *dispatch.kernel.include)
    }
    for_tests = {"shared/matrix_emulated", "linear/inputs_emulated"}
    of_pairs = {X_OF_PARTS}  # of products, which lowering brings together
    assert {path.relative_to(KERNELS).with_suffix("").as_posix() for path in WGSL} == used | for_tests | of_pairs


def test_every_format_of_a_device_has_a_layout_and_a_file() -> None:
    assert list(FORMATS) == list(WEIGHT_FORMATS)
    for name, form in FORMATS.items():
        assert json.loads(json.dumps(form.layout)) == form.layout, "a plan is JSON"
        files = [form.file, *([form.int16] if form.int16 else [])]
        assert all((KERNELS / f"{file}.wgsl").is_file() for file in files), name
    assert set(REPACK) == {form.layout["name"] for form in FORMATS.values() if form.layout["kind"] == "named"}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_format_stays_as_small_as_in_the_file(name: str) -> None:
    """Words and scales on the GPU take at most a tenth more than GGUF's blocks."""
    form, block = FORMATS[name], BLOCK_FORMATS[name]
    on_gpu = block.block_weights / 32 * form.block_bytes + block.block_weights / form.group * form.group_bytes
    assert on_gpu <= 1.1 * block.block_bytes
    rows = np.zeros((3, 2 * block.block_bytes), np.uint8)
    words, scales = form.repack(rows)
    assert words.shape == (3, 2 * block.block_weights // 32 * form.block_bytes)
    assert scales.shape == (3, 2 * block.block_weights // form.group * form.group_bytes)


def test_route_names_are_unique_and_the_default_is_exact() -> None:
    for op, routes in all_routes().items():
        names = [route.name for route in routes]
        assert len(names) == len(set(names)), op
        assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) for name in names), names
        assert routes[0].exact or not any(route.exact for route in routes), f"{op}: the preferred route rounds"
