"""The documents tell the truth: their code runs, their commands exist, their tables are complete."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import shaderlm
from shaderlm.cli import app
from shaderlm.kernels import all_routes

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def _blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S)


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in _blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "taken by default" in capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_links_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for line in (line for block in _blocks(document, "bash") for line in block.splitlines()):
        words = shlex.split(line, comments=True)
        if words[:1] == ["shaderlm"]:
            done = CliRunner().invoke(app, [*words[1:], "--help"])
            assert done.exit_code == 0, f"{line}: {done.output}"
        elif words:
            assert words[0] == "./dev", line
            assert re.search(rf"^  {words[1]}\)", (ROOT / "dev").read_text(), re.M), line
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_was_left_to_be_filled_in(document: Path) -> None:
    assert not re.findall(r"@@\w*|TODO|FIXME|XXX", document.read_text(encoding="utf-8"))


def test_every_op_is_documented_and_every_route_named_exists() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert not [op for op in all_routes() if f"`{op}`" not in text]
    routes = {route.name for routes in all_routes().values() for route in routes}
    first_cells = re.findall(r"^\| `(\w+)`", text, re.M)
    assert not [name for name in first_cells if name not in routes and name not in all_routes()]


def test_the_example_of_contributing_adds_a_route(tmp_path: Path) -> None:
    """Two files, as the document says: then the new route is found, and right on a size the other refuses."""
    package = tmp_path / "shaderlm"
    shutil.copytree(Path(shaderlm.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    family = package / "kernels" / "pointwise"
    (kernel,), (declaration,) = (_blocks(ROOT / "CONTRIBUTING.md", name) for name in ("wgsl", "python"))
    (family / "copy_scalar.wgsl").write_text(kernel, encoding="utf-8")
    with (family / "copy.py").open("a", encoding="utf-8") as file:
        file.write("\n\n" + declaration)
    script = """
import numpy as np
from shaderlm import ops
from shaderlm.gpu import open_device
from shaderlm.graph import resolve
from shaderlm.compile import run_op
x = np.arange(1023, dtype=np.float32)
assert ops.routes("copy") == ["vec4", "scalar"]
raw = run_op(open_device(), "copy", resolve("copy", {"count": 1023}), {"x": x}, None)
assert (raw["out"].view(np.float32) == x).all()
"""
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
