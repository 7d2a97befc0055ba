"""What every command does with its arguments before it runs, and how a process begins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shaderlm import page
from shaderlm.cli.options import CHAT_SAMPLING
from shaderlm.gpu import WEBGPU_DEFAULT, Adapter
from shaderlm.server.generation import LLAMA_DEFAULTS

from .command_line import shaderlm

# The command line is interrupted while its modules are imported.
_INTERRUPTED = """
import importlib.abc, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "shaderlm.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from shaderlm.__main__ import main
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_during_imports_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "x", "-ngl", 99), "No such option: -ngl\n"),
        (("generate", "x", "-hx"), "No such option: -hx"),
        (("generate", "x", "-fa"), "No such option: -fa. (A value follows after a space: -f a)"),
        (("serve", "-cb"), "No such option: -cb"),
        (("bench", "-fa", 1), "No such option: -fa"),
        (("bench", "serve", "-ngl", 99), "No such option: -ngl"),
    ],
)
def test_an_unknown_short_option_is_named(arguments: tuple[object, ...], words: str) -> None:
    done = shaderlm(*arguments)
    assert (done.code, done.out) == (2, "")
    assert f"Error: {words}" in done.err


@pytest.mark.parametrize("command", ["generate", "run smollm2-135m", "tokenize"])
def test_words_without_quotes(command: str) -> None:
    done = shaderlm(*command.split(), "Why", "is", "the", "sky", "blue?")
    assert done.code == 2
    assert "Got unexpected extra arguments (is the sky blue?). Put a text of several words in quotes.\n" in done.err


def test_an_option_of_shaderlm_itself_after_the_command() -> None:
    for arguments in (("--config", "x.toml"), ("--config=x.toml",)):
        done = shaderlm("generate", "hi", *arguments)
        assert done.code == 2
        assert "Error: --config goes before the command, as in `shaderlm --config … generate`.\n" in done.err
    assert "none.gguf does not exist" in shaderlm("generate", "-m", "none.gguf", "--stop", "--config", "hi").err


@pytest.mark.parametrize(
    "arguments", [("-n5",), ("-n", "5", "--stop", "-xyz"), ("-vn", "5"), ("-t.5",), ("--", "-abc")]
)
def test_short_options_with_values(arguments: tuple[str, ...]) -> None:
    """They get as far as the model, which is not there."""
    words = [] if "--" in arguments else ["x"]
    done = shaderlm("generate", *words, "-m", "none.gguf", *arguments)
    assert (done.code, done.err) == (
        1,
        "shaderlm: none.gguf does not exist; expected a .gguf file or a Hugging Face folder\n",
    )


@pytest.mark.parametrize(
    ("name", "here"), [("list", "models"), ("show", "info"), ("help", "--help"), ("version", "--version")]
)
def test_a_command_of_another_program_is_explained(name: str, here: str) -> None:
    done = shaderlm(name, "qwen3-0.6b")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith(f"Error: No such command '{name}'. It is `shaderlm {here}` here.\n")
    assert shaderlm(here, *([] if here.startswith("--") else ["--help"])).code == 0


@pytest.mark.parametrize("name", ["-c", "--context", "--ctx-size"])
@pytest.mark.parametrize(
    "command", ["generate x", "chat", "batch x -o y", "export-web x y", "info", "serve", "bench serve"]
)
def test_the_context_has_the_same_names_everywhere(command: str, name: str) -> None:
    done = shaderlm(*command.split(), name, 0)
    assert done.code == 2
    assert "0 is not in the range x>=1" in done.err


@pytest.mark.parametrize("command", ["generate x", "chat", "run x", "serve"])
@pytest.mark.parametrize(
    "names",
    [("--temperature", "--temp"), ("--repetition-penalty", "--repeat-penalty"), ("--max-tokens", "--n-predict", "-n")],
)
def test_options_have_the_names_of_llama_cpp_too(command: str, names: tuple[str, ...]) -> None:
    for name in (*names, "--seed", "-s"):
        done = shaderlm(*command.split(), name, "x")
        assert done.code == 2
        assert f"'{name}'" in done.err
        assert re.search(r"'x' is not a (whole )?number\.", done.err)


@pytest.mark.skipif(os.name == "nt", reason="arguments are text there")
def test_arguments_that_are_not_utf8() -> None:
    done = shaderlm("generate", os.fsdecode(b"caf\xe9"), "-m", "none.gguf")
    assert (done.code, done.out) == (2, "")
    assert "Arguments must be UTF-8, got b'caf\\xe9'." in done.err


def test_a_terminal_that_tells_no_width_has_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.gpu.adapters", lambda: [Adapter(WEBGPU_DEFAULT, Any)])  # type: ignore[arg-type]
    monkeypatch.setenv("COLUMNS", "0")
    assert "workgroup memory" in shaderlm("devices").out


def test_conversations_are_sampled_in_the_same_way_everywhere() -> None:
    """On the command line, by the server's page, and by the page of an export."""
    assert CHAT_SAMPLING == LLAMA_DEFAULTS
    script = (Path(page.__file__).parent / "assets" / "local.js").read_text(encoding="utf-8")
    values = ", ".join(f"{name}: {value}" for name, value in CHAT_SAMPLING.items())
    assert f"const DEFAULTS = {{ {values} }};" in script
