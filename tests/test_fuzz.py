"""Damaged files end in our own errors: at once, and without much memory. `fuzzing` makes them and says how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shaderlm.errors import ModelError

from . import fuzzing
from .folders import folder_of
from .tiny_models import write_tiny

_SECONDS = 900


_SCANS = ("scans", "configs of scans")  # the readers of "gguf" and "config", with keys of more layers


@pytest.mark.skipif(sys.platform == "win32", reason="limits of memory are those of POSIX")
@pytest.mark.parametrize(
    ("count", "kind"),
    [
        *(pytest.param(100, kind, id=f"100-{kind}") for kind in _SCANS),
        *(
            pytest.param(500, kind, marks=pytest.mark.full if kind in _SCANS else (), id=f"500-{kind}")
            for kind in fuzzing.KINDS
        ),
        *(pytest.param(20_000, kind, marks=pytest.mark.long, id=f"20000-{kind}") for kind in fuzzing.KINDS),
    ],
)
def test_damaged_files(kind: str, count: int) -> None:
    command = [sys.executable, "-m", "tests.fuzzing", kind, str(count), str(count)]
    own = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=own, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["ran"] == count
    assert found["opened"] > count // 200  # some changes do no harm: not all files are refused at their first byte
    assert found["slowest"] < fuzzing.SECONDS


ASKING = """
import sys
from pathlib import Path
import numpy as np
from tests.fuzzing import MEMORY, little_memory
for size in (MEMORY // 2, 2 * MEMORY, MEMORY // 2):
    try:
        with little_memory(Path(sys.argv[1])):
            np.zeros(size, np.uint8)
        print("given")
    except MemoryError:
        print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_that_is_asked_for_counts_even_if_nobody_writes_to_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKING, __file__],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=60,
    )
    assert done.stdout.split() == ["given", "refused", "given"], done.stderr


@pytest.mark.parametrize("table", ["AAAA", "AAAAAA==", "BAAAAAAAAAA=", "BAAAAP////8="])
def test_a_panic_of_the_package_is_our_own_error(tmp_path: Path, table: str) -> None:
    """Damaged tables of characters, which the package finds when it reads them, or when it encodes a text."""
    folder = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), tmp_path / "folder")
    path = folder / "tokenizer.json"
    given = json.loads(path.read_text(encoding="utf-8"))
    given["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
    path.write_text(json.dumps(given), encoding="utf-8")
    problem = fuzzing.attempt(folder)
    assert isinstance(problem, ModelError)
    assert "\n" not in str(problem)
