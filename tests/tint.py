"""Compiles WGSL with Tint, on Dawn's null backend, which has every feature and runs nothing.

python -m tests.tint < SOURCES.json: a JSON list of [name, source]; prints a JSON list of [name, message] of those that
Tint refuses. A process of its own: the backend is chosen by an environment variable, for all adapters of a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FEATURES = ("shader-f16", "subgroups", "chromium-experimental-subgroup-matrix")


def refused(sources: Mapping[str, str]) -> dict[str, str]:
    """Tint's messages by the names of the sources that it refuses."""
    environment = {**os.environ, "WGPU_BACKEND_TYPE": "Null"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tint"],
        input=json.dumps(list(sources.items())),
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    import wgpudawn
    from wgpudawn.backends.dawn import extras

    extras.set_instance_extras(enable_toggles=["allow_unsafe_apis"])
    adapter = wgpudawn.gpu.request_adapter_sync()
    device = adapter.request_device_sync(required_features=list(FEATURES))
    problems = []
    for name, source in json.load(sys.stdin):
        try:
            device.create_shader_module(code=source)
        except wgpudawn.GPUError as problem:
            problems.append([name, str(problem)])
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
