"""JavaScript of the project in Node, with the npm package `webgpu`: Dawn, and SwiftShader as its GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from shaderlm.gpu.swiftshader import swiftshader_icd

PACKAGE = "webgpu@0.6.2"
PATIENCE = 300.0  # seconds for a script, or for npm


@dataclass(frozen=True)
class Ended:
    """How a script ended: the status is negative where a signal ended it."""

    status: int
    out: str
    err: str


def find() -> str:
    """Path of Node. Without it, tests that need it are skipped: nothing else of the project does."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip("needs Node 20 and npm on PATH")
    return found


def install(folder: Path) -> None:
    """The package, where scripts in this folder find it. It is never a part of the project: it takes 100 MB."""
    find()
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    done = subprocess.run(
        ["npm", "install", "--prefer-offline", "--no-audit", "--no-fund", "--no-save", PACKAGE],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, f"npm cannot install {PACKAGE}; it needs its registry once: {done.stderr}"


def run(folder: Path, script: str, *flags: str, gpu: bool = True) -> Ended:
    """A script in a folder, with flags of Node. `gpu`: whether it finds SwiftShader; otherwise nothing at all."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VK_", "NODE_"))}
    driver = swiftshader_icd() if gpu else str(folder / "none.json")
    assert driver is not None, "needs SwiftShader; `./dev test --browser` installs it where it can"
    environment |= {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
    done = subprocess.run(
        [find(), *flags, script], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    return Ended(done.returncode, done.stdout, done.stderr)
