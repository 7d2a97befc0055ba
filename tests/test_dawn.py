"""A second compiler: every composed shader, as a browser would get it, under Dawn's analysis and default limits.

Plans are made for the limits that WebGPU grants without asking and for the target "dawn", written as JSON, run by
Node (`tests/dawn/run.mjs`) and compared with the same references as everywhere else. Shaders that need f16, which
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
from shaderlm.compile.execute import op_plan
from shaderlm.compile.plan import Plan
from shaderlm.gpu import WEBGPU_DEFAULT, Program, as_bytes
from shaderlm.gpu.swiftshader import swiftshader_icd
from shaderlm.kernels import Route, routes_of

from .cases import CASES, LONG_FLOPS, Case, make, result, tolerance
from .compare import assert_close
from .test_kernels import unspecialised

pytestmark = pytest.mark.dawn
_HERE = Path(__file__).parent / "dawn"
_BROWSER = replace(WEBGPU_DEFAULT, implementation="dawn")
_CAPS = {
    "subgroups": replace(_BROWSER, subgroups=True),
    "plain": _BROWSER,
    "software": replace(_BROWSER, kind="software"),
    "without dot4": replace(_BROWSER, dot4=False),
    "f16": replace(_BROWSER, f16=True),
}


@dataclass(frozen=True)
class Planned:
    """A plan with a shader that no smaller case has, its operands, and what to compare it with."""

    name: str
    case: Case
    route: Route
    plan: Plan
    operands: Program

    @property
    def runs(self) -> bool:
        return "f16" not in self.plan.needs.features


def _plan_all() -> Iterator[Planned]:
    """The smallest case for every composed shader."""
    seen: set[str] = set()
    for case in sorted(CASES, key=lambda c: (c.flops, c.dims.get("rows", 0), c.dims.get("tokens", 0))):
        if case.flops > LONG_FLOPS:
            continue
        operands = None
        for route in routes_of(case.op):
            for name, caps in _CAPS.items():
                if route.reason(case.dims, caps) is not None:
                    continue
                # With specialised parameters every shape has shaders of its own: one of each kind will do.
                launch_list = unspecialised(route.launch_list(case.dims, caps))
                plain = op_plan(route, case.dims, caps, launch_list)
                shaders = {launch.step.source for launch in plain.launches}
                if not shaders - seen:
                    continue
                seen |= shaders
                operands = operands or make(case)[0]
                plan = op_plan(route, case.dims, caps)
                plan.check(caps)
                packed = lower(route, case.dims, caps, operands)
                yield Planned(f"{case.name} {route.name} {name}", case, route, plan, packed)


def _manifest(planned: list[Planned], folder: Path) -> Path:
    """Write the plans and the contents of their buffers for Node."""
    programs = []
    with (folder / "data.bin").open("wb") as file:
        for item in planned:
            data = {}
            for name, contents in item.operands.buffers.items():
                if not isinstance(contents, int) and item.plan.buffers[name].role != "params":
                    raw = as_bytes(contents)
                    data[name] = [file.tell(), raw.nbytes]
                    file.write(raw.tobytes())
            mode = "run" if item.runs else "compile"
            programs.append({"name": item.name, "mode": mode, "plan": json.loads(item.plan.to_json()), "data": data})
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
    assert {feature for item in planned for feature in item.plan.needs.features} == {"subgroups", "f16"}
    answers = _run_node(_manifest(planned, tmp_path), tmp_path)["results"]
    assert [answer["name"] for answer in answers] == [item.name for item in planned]
    raw = np.fromfile(tmp_path / "results.bin", np.uint8)
    problems = []
    for item, answer in zip(planned, answers, strict=True):
        if answer["status"] != "ok":
            problems.append(f"{item.name}: {answer['message']}")
            continue
        expected = make(item.case)[1]
        assert set(answer["outputs"]) == (set(expected) if item.runs else set()), item.name
        for name, (start, length) in answer["outputs"].items():
            wanted = expected[name]
            assert wanted is not None
            contents = item.operands.buffers[name]
            size = contents if isinstance(contents, int) else contents.nbytes
            actual = result(item.case, name, raw[start : start + min(length, size)], wanted)
            try:
                assert_close(actual, wanted, tolerance(item.case, item.route, name), f"{item.name} {name}")
            except AssertionError as problem:
                problems.append(str(problem))
    assert not problems, f"{len(problems)} of {len(planned)} programs failed:\n" + "\n".join(problems[:20])
