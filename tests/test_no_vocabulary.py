"""A file without a vocabulary runs with token ids, and says so where it is given text."""

from __future__ import annotations

from pathlib import Path

import pytest

import shaderlm as package
from shaderlm.errors import InputError

from . import checkpoints
from .command_line import shaderlm
from .tiny_models import tiny_metadata

NAME = "qwen3"
NO_TEXT = "no vocabulary, so that it reads no text"


@pytest.fixture(scope="module", params=["none", "no_vocab"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    without = {key: None for key in tiny_metadata() if key.startswith("tokenizer.")}
    metadata = {**without, "tokenizer.ggml.model": request.param}
    folder = tmp_path_factory.mktemp("no_vocabulary")
    return checkpoints.write_gguf(folder / "model.gguf", checkpoints.recorded(NAME), metadata)


def test_ids_are_read_and_written(path: Path) -> None:
    entry = checkpoints.recorded(NAME)
    with package.load(path, device="cpu", precision="exact") as model:
        prompt, expected = checkpoints.PROMPTS[0], entry["greedy"][0]
        completion = model.generate(prompt, max_tokens=len(expected), temperature=0)
        assert completion == "".join(f"[{i}]" for i in expected)
        with pytest.raises(InputError, match=NO_TEXT):
            model.generate("text")
        with pytest.raises(InputError, match="no token that ends a text"):
            model.generate([1], json_schema=True)


@pytest.mark.parametrize("arguments", [("generate", "-m"), ("tokenize", "-m")])
def test_the_command_line_says_it(path: Path, arguments: tuple[str, ...]) -> None:
    device = () if arguments[0] == "tokenize" else ("--device", "cpu")
    done = shaderlm(*arguments, path, *device, "text")
    assert (done.code, done.out) == (2, "")
    assert NO_TEXT in done.err


def test_bench_runs_and_info_says_that_the_model_does(path: Path) -> None:
    done = shaderlm("bench", "-m", path, "--device", "cpu", "-p", 16, "-n", 4, "-r", 1)
    assert done.code == 0, done.err
    assert shaderlm("info", path).code == 0
