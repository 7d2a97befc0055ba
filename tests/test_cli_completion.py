"""Completion in shells: what it offers, the scripts, and that it is quick."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shaderlm.formats import local_models

from .command_line import COMMAND, shaderlm

REPOSITORY = "hf:Org/Repo"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's with two repositories, and a quantised copy."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "own"))
    files = ["Org--Repo/snapshots/1/model.safetensors", "Org--Repo/snapshots/1/config.json"]
    files += [
        f"Org--Other/snapshots/1/{name}" for name in ("a.gguf", "b/c-00001-of-00002.gguf", "b/c-00002-of-00002.gguf")
    ]
    for path in (*(tmp_path / "hub" / f"models--{name}" for name in files), tmp_path / "own/quantized/copy-q8_0.gguf"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path


def complete(monkeypatch: pytest.MonkeyPatch, *words: str, shell: str = "bash") -> list[str]:
    """What the last of these words may become. bash gives `:` as a word of its own."""
    monkeypatch.setenv("_SHADERLM_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "\n".join(("shaderlm", *words)))
    monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words)))
    done = shaderlm()
    assert (done.code, done.err) == (0, "")
    return done.out.split()


def test_commands_options_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete(monkeypatch, "gen") == ["plain,generate"]
    assert complete(monkeypatch, "generate", "--max") == ["plain,--max-tokens"]
    assert complete(monkeypatch, "generate", "--precision", "e") == ["plain,exact"]
    assert complete(monkeypatch, "bench", "ker") == ["plain,kernels"]
    assert complete(monkeypatch, "generate", "-f", "no") == ["file,no"]
    assert complete(monkeypatch, "completion", "f") == ["plain,fish"]


@pytest.mark.usefixtures("local")
def test_models_are_files_short_names_and_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen.gguf", "qwen.txt"):
        Path(name).touch()
    listed = complete(monkeypatch, "generate", "-m", "qwen")
    assert listed[0] == "file,qwen"
    assert {"plain,qwen.gguf", "plain,qwen3-0.6b"} <= set(listed)
    assert "plain,qwen.txt" not in listed
    assert f"plain,{REPOSITORY}" in complete(monkeypatch, "chat", "--model", "hf")
    assert "plain,smollm2-135m" in complete(monkeypatch, "info", "smollm")
    assert f"plain,{REPOSITORY}" in complete(monkeypatch, "rm", "hf")
    assert "plain,qwen3-0.6b" in complete(monkeypatch, "pull", "qwen3-0")
    assert "plain,qwen.gguf" not in complete(monkeypatch, "chat", "-m", "qwen", shell="fish")


_SHELL = """
PATH=$PWD:$PATH
source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shaderlm_completion shaderlm
for word in "${COMPREPLY[@]}"; do eval "printf '%s\\n' $word"; done
"""


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX")
@pytest.mark.usefixtures("local")
def test_bash_inserts_names_of_files_as_words(tmp_path: Path) -> None:
    """What is inserted is one word again: nothing in it is run, expanded or split."""
    folder = tmp_path / "files"
    folder.mkdir()
    names = ["x $(touch run).gguf", "x';touch run;'.gguf", "x*.gguf", "x\\.gguf", 'x"`touch run`.gguf', "x~é&.gguf"]
    for name in (*names, "xy.gguf", "x\nplain,run.gguf"):
        (folder / name).touch()
    command = folder / "shaderlm"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    (folder / "script").write_text(shaderlm("completion", "bash").out, encoding="utf-8")

    def completed(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", _SHELL, "bash", "shaderlm", *words],
            cwd=folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return sorted(done.stdout.splitlines())

    assert completed("generate", "-m", "x") == sorted([*names, "xy.gguf"])
    assert completed("generate", "-m", "x\\ ") == names[:1]
    assert completed("generate", "-m", "'x") == ["xy.gguf"]
    assert completed("generate", "--model", "=", "xy") == ["xy.gguf"]
    assert not (folder / "run").exists()


def test_an_old_bash_gets_no_options_that_it_lacks() -> None:
    script = shaderlm("completion", "bash").out
    for option in ("compopt", "nosort"):
        assert all("2>/dev/null" in line for line in script.splitlines() if option in line)
        assert option in script


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("words", [("hf", ":"), ("hf", ":", "Or")])
def test_bash_splits_names_at_colons(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    assert "plain,Org/Repo" in complete(monkeypatch, "generate", "-m", *words)


@pytest.mark.usefixtures("local")
def test_the_models_that_are_here_are_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {f"plain,{model.name}" for model in local_models.complete()}
    assert set(complete(monkeypatch, "rm", "")) == listed
    assert len(listed) == 4


def test_a_cache_that_cannot_be_read_offers_nothing(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(local / "own/quantized/copy-q8_0.gguf"))
    assert complete(monkeypatch, "rm", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str) -> None:
    done = shaderlm("completion", shell)
    assert f"_SHADERLM_COMPLETE={shell}_complete" in done.out
    assert (done.code, done.err) == (0, "")
    if shell == "bash" and os.name != "nt":
        subprocess.run(["bash", "-n"], input=done.out, text=True, check=True, timeout=60)


def test_completion_imports_nothing_heavy() -> None:
    code = "import sys, atexit; heavy = 'numpy rich tokenizers jinja2'.split()\n"
    code += "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))\n"
    words = {"COMP_WORDS": "shaderlm\ngenerate\n-m\nsmol", "COMP_CWORD": "3", "_SHADERLM_COMPLETE": "bash_complete"}
    code += "sys.argv[0] = 'shaderlm'\n" + COMMAND[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True, timeout=60
    )
    assert "plain,smollm2-135m" in done.stdout
    assert done.stderr.strip() == "[]"
