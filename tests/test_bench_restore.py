"""`bench restore`: what it measures is what it says, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shaderlm.graph.batch import PAGE
from shaderlm.runtime.disk_cache import DiskCache

from .command_line import shaderlm
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("restore") / "tiny.gguf", context=1024)


def test_it_restores_what_it_computed(tiny: Path, tmp_path: Path) -> None:
    arguments = ("bench", "restore", "-m", tiny, "--device", "numpy", "--tokens", 700, "-r", 2)
    done = shaderlm(*arguments, "--json", "--cache-dir", tmp_path, "--cold")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["tokens"] == 700
    assert found["restored_tokens"] == 700 // PAGE * PAGE
    assert len(found["restored"]) == len(found["read"]) == 2
    assert found["nbytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.pages"))
    assert found["files"] == 1
    again = shaderlm(*arguments, "--cache-dir", tmp_path)
    assert again.code == 2
    assert "is not empty" in again.err


def test_a_wrong_number_of_tokens(tiny: Path) -> None:
    done = shaderlm("bench", "restore", "-m", tiny, "--device", "numpy", "--tokens", 2000)
    assert done.code == 2
    assert "256 to 1,023 tokens, got 2,000" in done.err


def test_another_token_is_an_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are not as they were computed are noticed by the command, were they ever restored."""
    read = DiskCache.read

    def wrong(self: DiskCache, stored: object) -> object:
        contents = read(self, stored)  # type: ignore[arg-type]
        for each in contents or ():
            each.view("f4")[:] = 100.0
        return contents

    monkeypatch.setattr(DiskCache, "read", wrong)
    done = shaderlm("bench", "restore", "-m", tiny, "--device", "numpy", "--tokens", 300, "-r", 1)
    assert done.code != 0
    assert "the first token after a restore is" in done.err
