"""A second compiler: every composed shader, as a browser would get it, under Dawn's analysis and default limits.

Programs are planned for the limits that WebGPU grants without asking, written to a file, run by Node
(`tests/dawn/run.mjs`) and compared with the same references as everywhere else. Shaders that need f16, which
software adapters do not have, are compiled on Dawn's null backend.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.gpu import WEBGPU_DEFAULT, Program, as_bytes
from shaderlm.gpu.adapters import swiftshader_icd
from shaderlm.kernels import Route, routes_of

from .cases import CASES, LONG_FLOPS, Case, make, result, tolerance
from .compare import assert_close
from .test_kernels import unwritten

pytestmark = pytest.mark.dawn
_HERE = Path(__file__).parent / "dawn"
_PLANS = {
    "subgroups": (replace(WEBGPU_DEFAULT, subgroups=True), ["subgroups"]),
    "plain": (WEBGPU_DEFAULT, []),
    "software": (replace(WEBGPU_DEFAULT, kind="software"), []),
    "metal": (replace(WEBGPU_DEFAULT, backend="Metal"), []),
    "f16": (replace(WEBGPU_DEFAULT, f16=True), ["shader-f16"]),
}


@dataclass(frozen=True)
class Planned:
    """A program with a shader that no smaller case has, and what to compare it with."""

    name: str
    case: Case
    route: Route
    program: Program
    features: list[str]


def _plan_all() -> Iterator[Planned]:
    """The smallest case for every composed shader."""
    seen: set[str] = set()
    for case in sorted(CASES, key=lambda c: (c.flops, c.dims.get("rows", 0), c.dims.get("C", 0))):
        if case.flops > LONG_FLOPS:
            continue
        operands = None
        for route in routes_of(case.op):
            for plan, (caps, features) in _PLANS.items():
                if route.reason(case.dims, caps) is not None:
                    continue
                # With its parameters written in, every shape has shaders of its own: one of each kind will do.
                launch_list = unwritten(route.launch_list(case.dims, caps))
                kind = replace(route, launch_list=lambda *_, launch_list=launch_list: launch_list)
                shaders = {step.source for step in lower(kind, case.dims, caps, {}, "browser").steps}
                if not shaders - seen:
                    continue
                seen |= shaders
                operands = operands or make(case)[0]
                program = lower(route, case.dims, caps, operands, "browser")
                sources = [step.source for step in program.steps]
                needed = [f for f in features if any(f"enable {f.removeprefix('shader-')};" in s for s in sources)]
                yield Planned(f"{case.name} {route.name} {plan}", case, route, program, needed)


def _manifest(planned: list[Planned], folder: Path) -> Path:
    """Write the programs and their data for Node."""
    programs = []
    with (folder / "data.bin").open("wb") as data:
        for item in planned:
            buffers: dict[str, Any] = {}
            for name, contents in item.program.buffers.items():
                if isinstance(contents, int):
                    buffers[name] = {"size": max(16, (contents + 15) // 16 * 16), "data": None}
                else:
                    raw = as_bytes(contents)
                    buffers[name] = {"size": raw.nbytes, "data": [data.tell(), raw.nbytes]}
                    data.write(raw.tobytes())
            steps = [
                {
                    "label": step.label,
                    "source": step.source,
                    "bindings": [{"buffer": slot.buffer, "type": slot.access} for slot in step.slots],
                    "grid": step.grid,
                }
                for step in item.program.steps
            ]
            mode = "compile" if "shader-f16" in item.features else "run"
            outputs = list(item.program.outputs) if mode == "run" else []
            programs.append(
                {"name": item.name, "mode": mode, "features": item.features, "buffers": buffers, "steps": steps,
                 "outputs": outputs}
            )  # fmt: skip
    path = folder / "manifest.json"
    path.write_text(json.dumps({"programs": programs}))
    return path


def _run_node(manifest: Path, folder: Path) -> dict[str, Any]:
    node = shutil.which("node")
    assert node, "Node is not on PATH; `./dev test --dawn` provides it"
    assert (_HERE / "node_modules" / "webgpu").is_dir(), "the npm package webgpu is missing; run `./dev test --dawn`"
    environment = dict(os.environ)
    icd = swiftshader_icd()
    if icd:  # the one software driver that Dawn accepts
        environment |= {"VK_DRIVER_FILES": icd, "VK_ICD_FILENAMES": icd}
    command = [node, str(_HERE / "run.mjs"), str(manifest), "data.bin", "results.json", "results.bin"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"run.mjs exited with {done.returncode}:\n{done.stderr}"
    loaded: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return loaded


def test_every_shader_under_dawn(tmp_path: Path) -> None:
    planned = list(_plan_all())
    assert {feature for item in planned for feature in item.features} == {"subgroups", "shader-f16"}
    answers = _run_node(_manifest(planned, tmp_path), tmp_path)["results"]
    assert [answer["name"] for answer in answers] == [item.name for item in planned]
    raw = np.fromfile(tmp_path / "results.bin", np.uint8)
    problems = []
    for item, answer in zip(planned, answers, strict=True):
        if answer["status"] != "ok":
            problems.append(f"{item.name}: {answer['message']}")
            continue
        expected = make(item.case)[1]
        for name, (start, length) in answer["outputs"].items():
            wanted = expected[name]
            assert wanted is not None
            contents = item.program.buffers[name]
            size = contents if isinstance(contents, int) else contents.nbytes
            actual = result(item.case, name, raw[start : start + min(length, size)], wanted)
            try:
                assert_close(actual, wanted, tolerance(item.case, item.route, name), f"{item.name} {name}")
            except AssertionError as problem:
                problems.append(str(problem))
    assert not problems, f"{len(problems)} of {len(planned)} programs failed:\n" + "\n".join(problems[:20])
