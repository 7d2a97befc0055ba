"""`shaderlm tokenize`: the ids that the model gets, their texts, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shaderlm as package
from shaderlm.text import Tokenizer

from .command_line import Done, shaderlm
from .tiny_models import tiny_tokens, write_tiny_llama

TEXT = "the cat\n🙂<|im_end|>"
BOS = tiny_tokens().index("<|im_start|>")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def tokenize(model: Path, *arguments: object, **options: Any) -> Done:
    return shaderlm("tokenize", "-m", model, *arguments, **options)


def expected(model: Path, text: str, **options: Any) -> list[int]:
    with package.load(model, device="cpu") as loaded:
        return loaded.tokenize(text, **options)


def test_a_line_per_token(tiny: Path) -> None:
    done = tokenize(tiny, TEXT)
    ids = expected(tiny, TEXT)
    assert (done.code, done.err) == (0, "")
    assert [int(line.split()[0]) for line in done.out.splitlines()] == ids
    assert done.out.splitlines()[0].split(maxsplit=1)[1] == "'the'"
    assert "'\\n'" in done.out, "each is one line"
    assert "b'\\xf0'" in done.out, "a part of a character"
    assert done.out.splitlines()[-1].endswith("'<|im_end|>'")


def test_where_the_text_comes_from(tiny: Path, tmp_path: Path) -> None:
    path, done = tmp_path / "text.txt", tokenize(tiny, TEXT)
    path.write_text(TEXT + "\n", encoding="utf-8")
    assert tokenize(tiny, "-f", path) == tokenize(tiny, "-", given=TEXT) == tokenize(tiny, given=TEXT) == done


def test_special_tokens_and_bos(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    for arguments, options in (
        ((), {}),
        (("--no-bos",), {"add_special": False}),
        (("--no-parse-special",), {"parse_special": False}),
    ):
        found = json.loads(tokenize(model, TEXT, "--json", *arguments).out)["tokens"]
        assert [each["id"] for each in found] == expected(model, TEXT, **options)
    assert json.loads(tokenize(model, "<|im_start|>a", "--json").out)["tokens"][0]["id"] == BOS
    assert len(tokenize(model, "<|im_start|>a").out.splitlines()) == 2, "not two of them"


def test_special_tokens_are_shown_or_skipped(tiny: Path) -> None:
    with package.load(tiny, device="cpu") as model:
        ids = model.tokenize("<|im_start|>the<|im_end|>", add_special=False)
        assert model.detokenize(ids) == "<|im_start|>the<|im_end|>"
        assert model.detokenize(ids, skip_special=True) == "the"
    text = " ".join(map(str, ids))
    assert tokenize(tiny, "--ids", text).out == "<|im_start|>the<|im_end|>\n"
    assert tokenize(tiny, "--ids", "--skip-special", text).out == "the\n"
    wrong = tokenize(tiny, "--skip-special", "x")
    assert wrong.code == 2
    assert "--skip-special is about the text of token ids; give --ids, too." in wrong.err


def test_a_text_without_tokens(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces may be none."""
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: [])
    assert tokenize(tiny, " ") == Done(0, "", "")


def test_json_and_back(tiny: Path) -> None:
    done = tokenize(tiny, TEXT, "--json")
    found = json.loads(done.out)["tokens"]
    assert found[0] == {"id": expected(tiny, TEXT)[0], "piece": "the"}
    smile = [each["piece"] for each in found if isinstance(each["piece"], list)]
    assert bytes(byte for piece in smile for byte in piece).decode() == "🙂"
    ids = [each["id"] for each in found]
    for given in (
        done.out,
        json.dumps(ids),
        json.dumps({"tokens": ids}),
        " ".join(map(str, ids)),
        str(tuple(ids))[1:-1],
    ):
        assert tokenize(tiny, "--ids", given).out == TEXT + "\n"
        assert tokenize(tiny, "--ids", given=given).out == TEXT + "\n"
    assert json.loads(tokenize(tiny, "--ids", "--json", "0").out) == {"content": "!"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "the text is empty"),
        (("--ids", "one"), "--ids takes token ids such as 504 2365, or what --json prints; got 'one'"),
        (("--ids", "-5"), "got '-5'"),
        (("--ids", "[]"), "got '[]'"),
        (("--ids", '{"tokens": [1.5]}'), "--ids takes token ids"),
        (("--ids", '{"tokens": [true]}'), "--ids takes token ids"),
        (("--ids", '{"other": 1}'), "--ids takes token ids"),
        (("--ids", "1" * 5000), "--ids takes token ids such as 504 2365, or what --json prints; got '1111"),
        (("--ids", '{"tokens": ' + "[" * 99_999), "--ids takes token ids"),
        (("--ids", "99999"), "a token id must lie in 0 … 266, got 99999"),
        (("-f", "none"), "cannot read none: No such file"),
    ],
)
def test_mistakes_are_one_line(tiny: Path, arguments: tuple[str, ...], words: str) -> None:
    done = tokenize(tiny, *arguments[:-1], "--", arguments[-1]) if arguments[0] != "-f" else tokenize(tiny, *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert words in done.err


def test_no_weight_is_read(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("shaderlm.engine.loading.cpu_runner", read)
    assert tokenize(tiny, "a").code == 0
