"""Finding models: what was typed is a name, a path or a file of the hub, or is refused in one line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shaderlm.errors import InputError, ModelError
from shaderlm.formats import hub as hub_module
from shaderlm.formats.find import find
from shaderlm.formats.hub_transfer import Remote
from shaderlm.formats.short_names import SHORT_NAMES


def rejection(model: Any = None, kind: type[Exception] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        find(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Paths ---------------------------------------------------------------------------------------------------


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in (str(file), file, "~/a.gguf", tmp_path, "~", str(tmp_path)):
        assert find(given) == file
    assert find("a.gguf") == Path("a.gguf")
    assert find(Path("a.gguf")).is_file()


def test_a_folder_of_several(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert "there is no .gguf file in the directory" in rejection(tmp_path)
    for name in ("b.gguf", "a.GGUF"):
        (tmp_path / name).touch()
    assert "holds 2 .gguf files, name one of them: a.GGUF, b.gguf" in rejection(str(tmp_path))
    for i in range(10):
        (tmp_path / f"{i}.gguf").touch()
    assert rejection(tmp_path).endswith("7.gguf and 4 more")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("smollm2", "no model or file 'smollm2': did you mean smollm2-"),
        ("SmolLM2-135M", "did you mean smollm2-135m?"),
        ("llama3.2", "did you mean llama3.2-1b or llama3.2-3b?"),
        ("Gemma3:4b", "did you mean gemma3-4b? Otherwise give the path"),
        ("claude-9", "no model or file 'claude-9': `shaderlm models` lists names; otherwise"),
        ("nothing.gguf", "nothing.gguf does not exist"),
        ("some/where", "a Hugging Face folder; a repository of the hub is hf:some/where"),
        ("some/where.gguf", "some/where.gguf does not exist; expected a .gguf file or a Hugging Face folder"),
        (Path("smollm2"), "smollm2 does not exist"),
        ("https://example.org/a.gguf", "addresses are not fetched"),
        ("a\0b", "no model or file 'a\\x00b'"),
        ("x" * 5000, "cannot be a path"),
        ("~nobody-of-that-name/a.gguf", "cannot be a path"),
    ],
)
def test_what_is_not_there(given: Any, said: str) -> None:
    assert said in rejection(given)


@pytest.mark.parametrize("given", ["", "  ", 7, b"a.gguf", ["a"]])
def test_what_is_not_a_model(given: Any) -> None:
    assert "model must be a name or a path, got" in rejection(given, InputError)


def test_short_names() -> None:
    """Each stands for one GGUF file, says about how large it is, and where that was seen."""
    first = """smollm2-360m smollm2-1.7b tinyllama-1.1b llama3.2-1b llama3.2-3b llama3.1-8b mistral-7b qwen2.5-0.5b
        qwen2.5-7b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-30b-a3b smollm3-3b gemma3-1b phi4-mini gpt-oss-20b"""
    assert set(first.split()) < set(SHORT_NAMES), "names that once were there go on"
    assert len(SHORT_NAMES) >= 30
    for name, row in SHORT_NAMES.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        assert re.fullmatch(r"hf:[\w.-]+/[\w.-]+/[\w./-]+\.gguf", row.model), name
        assert 0.1 < row.gigabytes < 20, f"{name}: a size that fits"
        assert row.seen.startswith("https://")
    assert len({row.model for row in SHORT_NAMES.values()}) == len(SHORT_NAMES)


# The hub -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["hf:", "hf:a", "hf:a/", "hf:a/b/c", "hf:a//c.gguf", "hf:a/b/../c.gguf", "hf:/a/b/c.gguf"]
)
def test_malformed_hub_names(given: str) -> None:
    assert "must have the form hf:ORG/REPO or hf:ORG/REPO/FILE.gguf" in rejection(given, InputError)


def hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str], answers: bool = True) -> None:
    monkeypatch.setattr(hub_module, "_answers", lambda: answers)
    monkeypatch.setattr(hub_module, "ask", lambda repo, names: [Remote(repo, names[0], "", None, None, None)])
    monkeypatch.setattr(hub_module, "transfer", lambda *given: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))


def test_a_file_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, filename: str, local_files_only: bool = False) -> str:
        return f"/{'cache' if local_files_only else 'hub'}/{repo_id}|{filename}"

    for answers, place in ((True, "hub"), (False, "cache")):
        hub(monkeypatch, download, answers)
        assert find("hf:org/repo/sub/file.Q4_0.gguf") == Path(f"/{place}/org/repo|sub/file.Q4_0.gguf")


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("GatedRepoError", "RepositoryNotFoundError"), "org/repo is gated"),
        (("RepositoryNotFoundError",), "no public repository org/repo"),
        (("LocalEntryNotFoundError", "EntryNotFoundError"), "cannot be reached"),
        (("EntryNotFoundError",), "no file f.gguf in org/repo"),
        (("OfflineModeIsEnabled",), "HF_HUB_OFFLINE"),
        (("HFValidationError",), "cannot be the name of a repository"),
        (("SomethingNew",), "could not be used, first line"),
    ],
)
def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], said: str) -> None:
    failure: type[Exception] = OSError
    for name in reversed(kinds):
        failure = type(name, (failure,), {})

    def download(**_: Any) -> str:
        raise failure("first line\nsecond line")

    hub(monkeypatch, download)
    assert said in rejection("hf:org/repo/f.gguf")


@pytest.mark.parametrize("given", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_the_hub_out_of_reach_is_one_line_at_once(tmp_path: Path, given: dict[str, str]) -> None:
    code = "import time, sys\ntime.sleep = lambda seconds: sys.exit('it waits to try again')\n"
    code += "from shaderlm.formats.find import find\nfind('hf:org/repo/f.gguf')"
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment = {**kept, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    said = "HF_HUB_OFFLINE is set" if "HF_HUB_OFFLINE" in given else "the hub cannot be reached"
    assert f"ModelError: hf:org/repo/f.gguf: {said}" in done.stderr.splitlines()[-1]
    assert "Retry" not in done.stderr


def test_whether_the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}/mirror")
        assert hub_module._answers()
    assert not hub_module._answers()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert hub_module._answers(), "a proxy may reach it"


def test_a_folder_without_weights_is_still_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"^there is no \.gguf file in the directory"):
        find(tmp_path)
