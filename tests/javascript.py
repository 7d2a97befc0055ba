"""JavaScript of the project in Node, beside files that stand for what it imports."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def run_in_node(folder: Path, files: dict[str, str], main: str) -> Any:
    """What `main`, a module beside `files`, prints as JSON. Skips a test where there is no Node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    for name, content in {**files, "package.json": '{"type": "module"}', "main.js": main}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    done = subprocess.run([node, "main.js"], cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
