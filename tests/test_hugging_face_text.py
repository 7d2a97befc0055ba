"""Tokenizers of Hugging Face folders: the same ids as from the package tokenizers; broken files are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from shaderlm.errors import ModelError
from shaderlm.formats.hf.tokenizer import tokenizer_metadata
from shaderlm.formats.sentencepiece import pieces_metadata
from shaderlm.text import Tokenizer, Vocabulary

VOCAB = Path(__file__).parent / "data" / "vocab"


def byte_level() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {text: i for i, text in enumerate([*letters, "th", "the", "Ġthe"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_tokens([AddedToken("<|bos|>", special=True), AddedToken("<tool>"), AddedToken("<|end|>", special=True)])
    made.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 259)])
    return made


ROBERTA = json.loads(byte_level().to_str()) | {"post_processor": {"type": "RobertaProcessing", "sep": ["a", 0]}}
CONFIG: dict[str, Any] = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ 1 }}"}


def tokenizer_of(folder: Path, given: Mapping[str, bytes] | None = None, tokens: int = 262) -> Tokenizer:
    for name, content in (given or {}).items():
        (folder / name).write_bytes(content)
    return Tokenizer(Vocabulary.from_metadata(tokenizer_metadata(folder, tokens)))


def files(document: Any = None, **more: Any) -> dict[str, bytes]:
    text = byte_level().to_str() if document is None else json.dumps(document)
    others = {"tokenizer_config.json": CONFIG, "generation_config.json": {"eos_token_id": [261, 259]}} | more
    return {"tokenizer.json": text.encode()} | {key: json.dumps(value).encode() for key, value in others.items()}


def test_a_tokenizer_json(tmp_path: Path) -> None:
    ours, theirs = tokenizer_of(tmp_path, files()), byte_level()
    for text in ("", "the other <tool> é\n", "<|end|>the", "a <|bos|> the"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=True)[:1] == [259]
        assert ours.decode(ours.encode(text, parse_special=False)) == text
    assert ours.encode("<|end|>") == [261]
    assert 261 not in ours.encode("<|end|>", parse_special=False)
    assert ours.encode("<tool>", parse_special=False) == [260]
    assert list(ours.special_tokens) == ["<|bos|>", "<|end|>"]
    assert ours.stop_ids == {259, 261}
    assert (ours.vocabulary.bos, ours.vocabulary.eos, ours.vocabulary.chat_template) == (259, 261, "{{ 1 }}")


def test_flags_of_added_tokens_count_beside_marked_text(tmp_path: Path) -> None:
    """A special token that takes the spaces behind it does so in a chat whose messages hold special tokens, too."""
    document = json.loads(byte_level().to_str())
    document["added_tokens"][0]["rstrip"] = True
    document["added_tokens"][2]["normalized"] = True
    ours = tokenizer_of(tmp_path, files(document))
    assert ours.encode_marked("<|bos|>\n the", "\uf8ff") == ours.encode("<|bos|>\n the") == [259, 257]
    marked = ours.encode_marked("<|bos|>\n the <|e\uf8ffnd|>\n", "\uf8ff")
    assert marked == [259, *ours.encode("the <|end|>\n", parse_special=False)]


def test_a_turns_end_is_special_whatever_its_type(tmp_path: Path) -> None:
    document = json.loads(byte_level().to_str())
    document["added_tokens"][2]["special"] = False
    ours = tokenizer_of(tmp_path, files(document))
    assert ours.encode("<|end|>") == [261]
    assert 261 not in ours.encode("<|end|>", parse_special=False)
    assert "<|end|>" in ours.special_tokens


@pytest.mark.parametrize("processor", [None, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}])
def test_without_a_template_nothing_is_added(processor: Any, tmp_path: Path) -> None:
    document = json.loads(byte_level().to_str()) | {"post_processor": processor}
    ours = tokenizer_of(tmp_path, files(document))
    assert ours.encode("the", add_special=True) == ours.encode("the")
    assert ours.vocabulary.bos == 259


@pytest.mark.parametrize(
    ("model", "generation", "ends"),
    [
        (None, 5, {5, 261}),
        (7, None, {7, 261}),
        (7, 5, {5, 7, 261}),
        ([7, 8], [5, 261], {5, 7, 8, 261}),
        (100_000, [-1, 5], {5, 261}),  # no tokens
        (None, None, {261}),
    ],
)
def test_all_ids_that_end_a_generation(model: Any, generation: Any, ends: set[int], tmp_path: Path) -> None:
    """The token that tokenizer_config.json calls EOS, and those of the other files."""
    given = {"config.json": {"eos_token_id": model}, "generation_config.json": {"eos_token_id": generation}}
    assert tokenizer_of(tmp_path, files(**given)).stop_ids == ends
    with pytest.raises(ModelError, match="eos_token_id must be a whole number or a list of them, it is 'x'"):
        tokenizer_of(tmp_path, files(**{**given, "config.json": {"eos_token_id": "x"}}))


def test_a_tokenizer_model_with_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((VOCAB / "sentencepiece-bpe-bytes.model").read_bytes())
    size = len(pieces_metadata((tmp_path / "tokenizer.model").read_bytes())["tokens"])
    added = {str(size): {"content": "<|user|>", "special": True}, str(size + 1): {"content": "<x>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "add_bos_token": False}))
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    ours = tokenizer_of(tmp_path, tokens=size + 2)
    assert ours.encode("<|user|>") == [size]
    assert size not in ours.encode("<|user|>", parse_special=False)
    assert ours.encode("<x>", parse_special=False) == [size + 1]
    assert not ours.vocabulary.add_bos
    assert ours.vocabulary.chat_template == "{{ 2 }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(size + 5): added["400"]}}))
    with pytest.raises(ModelError, match="is past vocab_size"):
        tokenizer_of(tmp_path, tokens=size + 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "tokenizer.json or tokenizer.model is needed"),
        ({"tokenizer.json": b"{"}, "the JSON text is broken"),
        ({"tokenizer.json": b"\xff"}, "the JSON text is broken"),
        ({"tokenizer.json": b"[" * 100_000}, "more lists and objects than can be real"),
        ({"tokenizer.json": b"[]"}, "a JSON object was expected"),
        ({"tokenizer.json": b'{"model": {"type": "WordPiece"}}'}, "of the type 'WordPiece'; BPE and Unigram"),
        ({"tokenizer.json": b'{"model": {"type": "BPE", "vocab": 3}}'}, "must give every token an id"),
        (
            {"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 100000000000}, "merges": []}}'},
            "is past vocab_size",
        ),
        (
            {"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": 3}'},
            "must have an id and a content",
        ),
        ({"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}}}'}, "merges must be a list"),
        (
            {"tokenizer.json": json.dumps(ROBERTA).encode()},
            "the post_processor RobertaProcessing is not supported",
        ),
    ],
)
def test_what_cannot_be_read(given: dict[str, bytes], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        tokenizer_of(tmp_path, given)


def test_damaged_files_give_our_own_errors(tmp_path: Path) -> None:
    rng, whole = random.Random(5), files()
    refused = 0
    for _ in range(150):
        name = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
        data = bytearray(whole[name])
        for _ in range(rng.randrange(1, 3)):
            data[rng.randrange(len(data))] = rng.choice(b'0123456789"{}[],:aN-')
        try:
            tokenizer_of(tmp_path, whole | {name: bytes(data)}).encode("the <|end|>")
        except ModelError:
            refused += 1
    assert refused > 30


def _document(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json of three tokens, with other entries or another model."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]} | changes.pop("model", {})
    return {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": model} | changes


_UNIGRAM = {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["ab", -2.5]], "merges": None}
_PANICS: dict[str, dict[str, Any]] = {
    "charsmap": _document(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "merge without result": _document(model={"merges": ["b a"]}),
    "merge without tokens": _document(model={"merges": [["c", "d"]]}),
    "unk_token of another type": _document(model={"unk_token": 3}),
    "unk_token that is no token": _document(model={"unk_token": "<unk>"}),
    "Unigram without unk_id": _document(model=_UNIGRAM),
    "unk_id past the end": _document(model={**_UNIGRAM, "unk_id": 7}),
    "unk_id of another type": _document(model={**_UNIGRAM, "unk_id": [0]}),
    "SpecialToken": _document(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": [1]}}]}),
    "Split": _document(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}),
}


@pytest.mark.parametrize("name", _PANICS)
def test_what_the_package_panics_of_is_our_own_error(name: str, tmp_path: Path) -> None:
    """While it is built, or for the first text with a character that is no token."""
    assert tokenizer_of(tmp_path, {"tokenizer.json": json.dumps(_document()).encode()}, tokens=3).encode("ab") == [2]
    with pytest.raises(ModelError):
        tokenizer_of(tmp_path, {"tokenizer.json": json.dumps(_PANICS[name]).encode()}, tokens=3).encode("abc")


@pytest.mark.parametrize(
    "rules",
    [
        {"model": [1]},
        {"model": "BPE"},
        {"model": {"type": []}},
        {"model": {"type": "WordPiece"}},
        {"added_tokens": 3},
        {"added_tokens": [3]},
        {"added_tokens": [{"id": 1}]},
        {"normalizer": 3},
    ],
)
def test_rules_of_a_gguf_file_that_are_none(rules: dict[str, Any]) -> None:
    metadata = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    given = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}

    def made(rules: dict[str, Any]) -> Tokenizer:
        text = json.dumps({"model": {"type": "BPE"}, **rules})
        return Tokenizer(Vocabulary.from_metadata({**given, "tokenizer.huggingface.json": text}))

    assert made({}).encode("ab") == [2]
    with pytest.raises(ModelError):
        made(rules)
