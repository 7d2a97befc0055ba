"""Options from the environment and from a file: which goes first, and what wrong ones say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from shaderlm.bench import serve_process
from shaderlm.cli import app, config
from shaderlm.cli.config import options_of, subcommands, use_file
from shaderlm.files import cache_directory, state_directory

from .command_line import Done, shaderlm


@click.group()
@click.option("--config")
@click.pass_context
def small(context: click.Context, config: str | None) -> None:
    """A command line with an option of each kind."""
    use_file(context, config)


@small.group(invoke_without_command=True)
@click.option("--size", "nbytes", type=int, default=1)
@click.pass_context
def outer(context: click.Context, nbytes: int) -> None:
    if context.invoked_subcommand is None:
        print(nbytes)


@outer.command("inner-most")
@click.option("-t", "--temperature", type=float, default=0.0)
@click.option("--max-tokens", type=click.IntRange(1), default=64)
@click.option("--on/--off", "switch", default=True)
@click.option("--stop", "stops", multiple=True)
@click.option("--two", nargs=2)
@click.option("--json", "form", flag_value="json")
@click.option("--jsonl", "form", flag_value="jsonl")
def inner(**options: object) -> None:
    print(json.dumps(options))


config.configure(small)


def run(tmp_path: Path, text: str, *arguments: str, **environment: str) -> SimpleNamespace:
    """The small command line with this file."""
    file = tmp_path / "config.toml"
    file.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(small, ["--config", str(file), *arguments], env=environment)
    values = json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout.strip()
    return SimpleNamespace(code=done.exit_code, values=values, error=done.exception or done.stderr)


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    text = "[outer.inner-most]\ntemperature = 0.5\nmax-tokens = 7\n"
    variable = {"SHADERLM_OUTER_INNER_MOST_MAX_TOKENS": "8", "SHADERLM_OUTER_INNER_MOST_TEMPERATURE": "0.7"}
    values = run(tmp_path, text, "outer", "inner-most").values
    assert (values["temperature"], values["max_tokens"], values["switch"]) == (0.5, 7, True)
    values = run(tmp_path, text, "outer", "inner-most", "-t", "0.9", **variable).values
    assert (values["temperature"], values["max_tokens"]) == (0.9, 8)
    assert run(tmp_path, "[outer]\nsize = 3", "outer").values == "3"
    assert run(tmp_path, "", "outer").values == "1"


def test_values_of_every_kind(tmp_path: Path) -> None:
    text = '[outer.inner-most]\non = false\nstop = ["a b", "c"]\ntwo = [1, "x"]\njsonl = true\nmax_tokens = "9"\n'
    values = run(tmp_path, text, "outer", "inner-most").values
    assert (values["switch"], values["stops"], values["two"]) == (False, ["a b", "c"], ["1", "x"])
    assert (values["form"], values["max_tokens"]) == ("jsonl", 9)
    assert run(tmp_path, text, "outer", "inner-most", "--json").values["form"] == "json"
    assert run(tmp_path, '[outer.inner-most]\nstop = "a b"', "outer", "inner-most").values["stops"] == ["a b"]


def test_variables_of_every_kind(tmp_path: Path) -> None:
    words = {"ON": "0", "STOP": "a b", "TWO": "1 x", "JSONL": "1", "MAX_TOKENS": ""}
    variables = {f"SHADERLM_OUTER_INNER_MOST_{name}": word for name, word in words.items()}
    values = run(tmp_path, "", "outer", "inner-most", **variables).values
    assert (values["switch"], values["stops"], values["two"]) == (False, ["a", "b"], ["1", "x"])
    assert (values["form"], values["max_tokens"]) == ("jsonl", 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sise = 1", r"config.toml: sise is not known; expected a table with the name of a command"),
        ("[outr]\nsize = 1", r"config.toml: outr is not known; did you mean outer\?"),
        ("[outer]\nsise = 1", r"config.toml: outer.sise is not known; did you mean outer.size\?"),
        ("[outer]\nqqqq = 1", r"outer.qqqq is not known; `shaderlm outer --help` lists the options"),
        ("[outer.inner-most]\non = 'yes'", r"outer.inner-most.on must be true or false, got 'yes'"),
        ("[outer]\nsize = true", r"outer.size must be text or a number, got true"),
        ("[outer]\nsize = [1]", r"outer.size must be text or a number, got \[1\]"),
        ("[outer.size]\nx = 1", r"outer.size must be text or a number, got a table"),
        ("[outer.inner-most]\ntwo = [1]", r"two must be a list of 2, got \[1\]"),
        ("[outer.inner-most]\nstop = [[1]]", r"stop must be text, a number, or a list of them, got \[1\]"),
        ("[outer", r"config.toml is not TOML"),
        ("size = 4", r"size is not known; an option stands in the table of a command: \[outer\]"),
        (
            "[outer]\nmax-tokens = 4",
            r"an option stands in the table of a command: \[outer.inner-most\]",
        ),
        ("outer = 'x'", r"outer must be a table, as \[outer\] begins one, got 'x'"),
    ],
)
def test_a_wrong_file_says_where_and_what_is_expected(tmp_path: Path, text: str, said: str) -> None:
    assert re.search(said, str(run(tmp_path, text, "outer", "inner-most").error))


def generate(file: Path, *arguments: str) -> Done:
    return shaderlm("--config", file, "generate", "Hello", *arguments)


def test_a_refused_value_names_the_file_or_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[generate]\nmax-tokens = 8.5\n", encoding="utf-8")
    done = generate(file)
    assert (done.code, "generate.max-tokens in " + str(file) in done.err.replace("\n", " ")) == (2, True), done.err
    file.write_text("[generate]\ntop-p = 3\n", encoding="utf-8")  # refused later, by the engine
    done = generate(file)
    assert (done.code, done.err.rstrip().endswith(f"(from generate.top-p in {file})")) == (2, True), done.err
    monkeypatch.setenv("SHADERLM_GENERATE_PRECISION", "half")
    done = generate(Path(os.devnull))
    assert "the environment variable SHADERLM_GENERATE_PRECISION" in done.err
    assert done.code == 2
    assert "environment" not in generate(Path(os.devnull), "--precision", "quarter").err
    monkeypatch.delenv("SHADERLM_GENERATE_PRECISION")
    monkeypatch.setenv("SHADERLM_GENERATE_JSON", "maybe")
    done = generate(Path(os.devnull))
    assert (done.code, "the environment variable SHADERLM_GENERATE_JSON: 'maybe'" in done.err) == (2, True), done.err


def test_an_error_about_something_else_names_no_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[generate]\nmax-tokens = 8\nmodel = 'nothing.gguf'\n", encoding="utf-8")
    assert generate(file).err.endswith(f"(from generate.model in {file})\n")
    assert str(file) not in generate(file, "-m", "other.gguf").err


def test_a_common_word_is_no_value_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_values", {"backend": ("auto", "FILE"), "model": ("a/b.gguf", "FILE")})
    for message in ("no adapter matches 'nosuch'. Give auto, cpu, or a number", "ab.gguf does not exist"):
        assert config.with_source(message) == message
    for message in ("no adapter matches 'auto'", "a/b.gguf does not exist", "backend must be wgpu, got 'x'"):
        assert config.with_source(message) == f"{message} (from FILE)"


def test_a_variable_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GENERATE_MAX_TOKENZ", "BENCH_SERVE_PORT", "SERVE_SERVICE_HOST"):
        monkeypatch.setenv(f"SHADERLM_{name}", "4")
    assert generate(Path(os.devnull), "-m", "none.gguf").err == (
        "shaderlm: the environment variable SHADERLM_GENERATE_MAX_TOKENZ is no option of `generate`; "
        "did you mean SHADERLM_GENERATE_MAX_TOKENS?\n"
        "shaderlm: none.gguf does not exist; expected a .gguf file or a Hugging Face folder\n"
    )


def test_a_variable_without_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_MODEL", "other.gguf")
    monkeypatch.setenv("SHADERLM_CACHE", "none")
    assert generate(Path(os.devnull), "-m", "none.gguf").err == (
        "shaderlm: the environment variable SHADERLM_MODEL is no option; did you mean SHADERLM_GENERATE_MODEL?\n"
        "shaderlm: none.gguf does not exist; expected a .gguf file or a Hugging Face folder\n"
    )


@pytest.mark.parametrize("name", ["CONTEXT", "CTX_SIZE"])
def test_each_name_of_an_option_has_a_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"SHADERLM_GENERATE_{name}", "0")
    done = generate(Path(os.devnull))
    assert (done.code, f"the environment variable SHADERLM_GENERATE_{name}" in done.err) == (2, True), done.err


def test_a_server_that_is_measured_takes_no_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_SERVE_API_KEY", "key")
    assert "SHADERLM_SERVE_API_KEY" not in serve_process._environment()
    assert serve_process._COMMAND[-2:] == ("--config", os.devnull)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    done = generate(tmp_path / "none.toml")
    assert (done.code, done.err) == (2, f"shaderlm: cannot read {tmp_path / 'none.toml'}: No such file or directory\n")
    (tmp_path / "latin.toml").write_bytes(b"[generate]\nsystem = '\xe9'\n")
    assert "must be UTF-8, byte 21 is not" in generate(tmp_path / "latin.toml").err


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHADERLM_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert config.default_file() == tmp_path / "shaderlm" / "config.toml"
    assert shaderlm("completion", "bash").code == 0  # there need not be one
    (tmp_path / "shaderlm").mkdir()
    (tmp_path / "shaderlm" / "config.toml").write_text("[nothing]\n", encoding="utf-8")
    assert "nothing is not known" in shaderlm("completion", "bash").err
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config.default_file() == Path.home() / ".config" / "shaderlm" / "config.toml"


def _variables(command: click.Command) -> list[str]:
    own = [name for option in set(options_of(command).values()) for name in option.envvar or ()]
    return [*own, *(name for below in subcommands(command).values() for name in _variables(below))]


def test_every_option_has_a_variable_of_its_own() -> None:
    names = _variables(app)
    assert len(names) == len(set(names)) > 100
    assert {"SHADERLM_CONFIG", "SHADERLM_GENERATE_MAX_TOKENS", "SHADERLM_BENCH_SERVE_API_KEY"} <= set(names)
    assert not {"SHADERLM_CACHE", "SHADERLM_STATE"} & set(names), (cache_directory, state_directory)
