"""SentencePiece's tokenizer.model: the same ids as the package sentencepiece 0.2.2 gives; damaged files are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shaderlm.errors import ModelError
from shaderlm.formats.hf.tokenizer import tokenizer_metadata
from shaderlm.formats.sentencepiece import pieces_metadata
from shaderlm.text import Tokenizer, Vocabulary

DATA = Path(__file__).parent / "data" / "vocab"
RECORDED = json.loads((DATA / "sentencepiece.json").read_text())


def tokenizer_of(data: bytes) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in pieces_metadata(data).items()}
    return Tokenizer(Vocabulary.from_metadata(metadata))


def file_of(name: str) -> bytes:
    return (DATA / f"sentencepiece-{name}.model").read_bytes()


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_text(name: str) -> None:
    tokenizer = tokenizer_of(file_of(name))
    for text, ids in RECORDED[name]:
        assert tokenizer.encode(text, parse_special=False) == ids, repr(text)
        assert tokenizer.min_tokens(text) <= len(ids)
        if name.endswith("bytes"):
            assert tokenizer.decode(ids) == text


def test_added_tokens_of_a_folder_take_spaces(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(file_of("bpe-bytes"))
    size = len(tokenizer_of(file_of("bpe-bytes")).vocabulary.tokens)
    flags = {"<|plain|>": {}, "<|left|>": {"lstrip": True}, "<|right|>": {"rstrip": True}}
    added = {str(size + i): {"content": text, "special": True, **each} for i, (text, each) in enumerate(flags.items())}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer(Vocabulary.from_metadata(tokenizer_metadata(tmp_path, size + 3)))
    before, after = tokenizer.encode("a"), tokenizer.encode("b")
    for i, (text, each) in enumerate(flags.items()):
        assert tokenizer.encode(f"a{text}b") == [*before, size + i, *after]
        taken = [tokenizer.encode(f"a \n{text}b"), tokenizer.encode(f"a{text}\n b")]
        assert [ids == [*before, size + i, *after] for ids in taken] == ["lstrip" in each, "rstrip" in each]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it has no pieces"),
        (b"\x0a", "it ends within a number"),
        (b"\x0a\x7fabc", "a field of 127 bytes begins 3 bytes before its end"),
        (b"\x0b", "a field has the wire type 3"),
        (b"\xff" * 11, "a number has more than ten bytes"),
        (b"\x08\x01", "a message is a number"),
        (b"\x0a\x03\x0a\x01\xff", "a piece is not text in UTF-8"),
        (b"\x0a\x02\x08\x01", "a piece is not text in UTF-8"),
        (b"\x0a\x05\x0a\x01a\x10\x01", "a score is not a number of four bytes"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "it is of words"),
        (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x01\x01", "treat_whitespace_as_suffix"),
    ],
)
def test_what_is_no_such_file(data: bytes, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        pieces_metadata(data)


def test_damaged_files_give_our_own_errors() -> None:
    rng, whole = random.Random(3), file_of("unigram")
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            tokenizer_of(bytes(data)).encode("the time of  people")
        except ModelError:
            refused += 1
    assert 30 < refused < 300
