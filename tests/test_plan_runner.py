"""Plans are complete by themselves: saved as JSON, run by a program that knows nothing of the package."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shaderlm.compile.lowering import Lowering
from shaderlm.compile.plan import Plan
from shaderlm.compile.plan_json import from_json, to_json
from shaderlm.compile.steps import Head, step_plan
from shaderlm.errors import DeviceError, InputError
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Device
from shaderlm.gpu.swiftshader import offered_to_vulkan
from shaderlm.graph.batch import RUN_ROWS
from shaderlm.models.checkpoint import architecture_of
from shaderlm.models.config import StepSpec
from shaderlm.runtime.sampler_settings import GREEDY

from .runners import FileSource, config_of, runner_of
from .session import Session
from .sweeps import by_default
from .tiny_models import write_tiny_llama, write_tiny_qwen3

RUNNER = Path(__file__).parent / "plan_runner.py"
PROMPT = [5, 9, 40, 77, 12, 33, 8, 101, 64, 3]
COUNT = 12


class Saved(NamedTuple):
    folder: Path
    model: Path
    plans: dict[str, Plan]
    device: Device


def write(folder: Path, *plans: str) -> None:
    """As `shaderlm plan --json` prints them."""
    (folder / "plans.json").write_text(f"[{','.join(plans)}]", encoding="utf-8")


def save(folder: Path, model: Path, device: Device, rows: int = 1) -> Saved:
    """The plans of a model's prefill and decode step as JSON, and its tensors as its file has them.

    rows: sequences that decode together.
    """
    with GgufFile.open(model) as file:
        kind, config, source = architecture_of(file), config_of(file, dense=False), FileSource(file)
        lowering = Lowering(replace(device.caps, implementation="wgpu"), "fast")  # the runner's
        several = rows > 1
        steps = {
            "prefill": (StepSpec(16, cache="f32", paged=several), Head(1, 16, "greedy", several)),
            "decode": (
                StepSpec(rows, cache="f32", paged=several, decode=rows >= RUN_ROWS),
                Head(rows, rows, "greedy", several),
            ),
        }
        plans = {name: step_plan(lowering, kind, config, *each) for name, each in steps.items()}
        tensors: dict[str, Any] = {
            name: source.rows(name, config.formats[name], 0, info.shape[0]) if len(info.shape) > 1 else file.dense(name)
            for name, info in file.tensors.items()
        }
    write(folder, *(to_json(plan) for plan in plans.values()))
    np.savez(folder / "tensors.npz", **tensors)
    return Saved(folder, model, plans, device)


FACTORS = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
MODELS: dict[str, Any] = {  # every process compiles all its kernels: few models, which differ in all that plans say
    "f32, rope factors": (write_tiny_llama, {"kind": "f32", "tensors": FACTORS}),
    "q8_0, qwen3": (write_tiny_qwen3, {"kind": "q8_0"}),
    "q4_0 with the kernels of a GPU": (write_tiny_llama, {"kind": "q4_0"}),
}


@pytest.fixture(scope="module", params=by_default(MODELS, lambda name: "f32" in name))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("plans")
    write, options = MODELS[request.param]
    device = request.getfixturevalue("gpu" if "GPU" in request.param else "device")
    return save(folder, write(folder / "tiny.gguf", **options), device)


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """In which another program finds the adapters that these tests have."""
    with offered_to_vulkan():
        yield dict(os.environ)


def run(folder: Path, device: Device, prompts: Sequence[Sequence[int]] = (PROMPT,)) -> subprocess.CompletedProcess[str]:
    """The runner in another process, in a directory without the package, with Python's search path as it is alone."""
    given = [str(folder), json.dumps(prompts), str(COUNT), device.caps.name.lower()]
    with environment() as env:
        env.pop("PYTHONPATH", None)
        command = [sys.executable, "-P", str(RUNNER), *given]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=600, check=False, env=env, cwd=folder
        )


@pytest.mark.full
def test_a_program_of_its_own_runs_them(saved: Saved) -> None:
    done = run(saved.folder, saved.device)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    runner = runner_of(saved.model, saved.device, cache="f32")
    session = Session(runner)
    expected = [session.sample(PROMPT).wait(), *(session.advance().wait() for _ in range(COUNT - 1))]
    assert found == expected
    assert len(set(found)) > 3
    runner.close()


@pytest.mark.full
@pytest.mark.parametrize("rows", [4, 64])
def test_it_runs_steps_of_many_sequences(rows: int, tmp_path: Path, gpu: Device) -> None:
    """Prompts of different lengths, with the kernels of a GPU."""
    made = save(tmp_path, write_tiny_llama(tmp_path / "tiny.gguf", kind="q4_0"), gpu, rows)
    prompts = [[(7 * i + 3 * j) % 100 + 3 for j in range(1 + i % 16)] for i in range(rows)]
    done = run(tmp_path, gpu, prompts)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    runner = runner_of(made.model, gpu, cache="f32")
    sessions = [Session(runner) for _ in prompts]
    expected = [[session.sample(ids).wait()] for session, ids in zip(sessions, prompts, strict=True)]
    sequences = [session.sequence for session in sessions]
    together = runner.decode_batch(sequences, [GREEDY] * rows)
    for _ in range(COUNT - 1):
        words = together.step().wait()
        for tokens, sequence in zip(expected, sequences, strict=True):
            tokens.append(int(words[sequence.slot]))
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > rows // 2
    runner.close()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"limits": {"max_workgroup_memory": 1 << 40}}, "needs ['max_workgroup_memory']"),
        ({"limits": {"max_storage_buffers": 1 << 20}}, "needs ['max_storage_buffers']"),
    ],
)
def test_it_refuses_what_an_adapter_cannot_run(
    part: dict[str, Any], words: str, tmp_path: Path, device: Device
) -> None:
    made = save(tmp_path, write_tiny_llama(tmp_path / "tiny.gguf", layers=1), device)
    changed = {**json.loads(to_json(made.plans["decode"])), **part}
    write(tmp_path, to_json(made.plans["prefill"]), json.dumps(changed))
    done = run(tmp_path, device)
    assert done.returncode != 0
    assert words in done.stderr


def test_the_program_is_short_and_knows_nothing_of_the_package() -> None:
    text = RUNNER.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(f"{'.' * node.level}{node.module}")
    assert imported == {"json", "sys", "numpy", "wgpu"}
    assert "__import__" not in text
    assert "importlib" not in text


# JSON -----------------------------------------------------------------------------------------------------------------


def test_json_and_back_is_the_identity(saved: Saved) -> None:
    for plan in saved.plans.values():
        text = to_json(plan)
        again = from_json(text)
        assert again == plan
        assert to_json(again) == text
        assert again.program == plan.program


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    return save(folder, write_tiny_llama(folder / "tiny.gguf", layers=1, kind="q8_0"), device).plans["decode"]


def test_every_buffer_says_what_it_holds(plan: Plan) -> None:
    found = json.loads(to_json(plan))
    wanted = {
        "weight": {"tensors", "interleaved", "part"},
        "table": {"formula", "rotary", "theta", "linear_scale", "factors"},
        "state": {"format"},
        "params": {"words"},
    }
    for name, about in found["buffers"].items():
        assert about["bytes"] > 0, name
        assert wanted.get(about["role"], set()) <= set(about), name
    assert {about["role"] for about in found["buffers"].values()} >= {"weight", "table", "state", "input", "scratch"}
    bound = {binding["buffer"] for step in found["steps"] for binding in step["bindings"]}
    assert bound == set(found["buffers"]), "every buffer is used, and every one that is used is there"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: "[", "this is not the JSON of a plan"),
        (lambda found: [], "expected a plan of format 1, got 'list'"),
        (lambda found: {**found, "format": 0}, "expected a plan of format 1, got 0"),
        (
            lambda found: {k: v for k, v in found.items() if k != "shaders"},
            "not the JSON of a plan: KeyError 'shaders'",
        ),
        (lambda found: {**found, "buffers": {}}, "binds buffers that it does not list: .*batch"),
        (lambda found: {**found, "steps": [{**found["steps"][0], "grid": [1, 2]}]}, "a grid has three sides"),
        (lambda found: {**found, "steps": [{**found["steps"][0], "shader": 99}]}, "IndexError"),
    ],
)
def test_what_is_no_plan_is_refused(change: Any, words: str, plan: Plan) -> None:
    changed = change(json.loads(to_json(plan)))
    with pytest.raises(InputError, match=words):
        from_json(changed if isinstance(changed, str) else json.dumps(changed))


# Devices --------------------------------------------------------------------------------------------------------------


def test_a_plan_runs_where_it_was_made_for(plan: Plan, device: Device) -> None:
    plan.check(device.caps)
    assert all(value > 0 for value in plan.needs.limits.values())


@pytest.mark.parametrize("feature", ["f16", "subgroups"])
def test_a_device_without_a_feature_is_refused_by_name(feature: str, plan: Plan, device: Device) -> None:
    needing = replace(plan, needs=replace(plan.needs, features=(feature,)))
    having: Any = {feature: True}
    needing.check(replace(device.caps, **having))
    lacking: Any = {feature: False, "name": "Some GPU"}
    with pytest.raises(DeviceError, match=f"plan 'decode' cannot run here: .* feature {feature}, which Some GPU"):
        needing.check(replace(device.caps, **lacking))


def test_a_device_with_a_lower_limit_is_refused_by_name(plan: Plan, device: Device) -> None:
    for name, least in plan.needs.limits.items():
        exact: Any = {name: least}
        plan.check(replace(device.caps, **exact))
        lower: Any = {name: least - 1, "name": "Some GPU"}
        with pytest.raises(DeviceError, match=f"needs {name} of {least:,}; Some GPU has {least - 1:,}"):
            plan.check(replace(device.caps, **lower))
