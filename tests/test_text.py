"""Text room: token ids as llama.cpp gives them, whole characters only, templates in a sandbox."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from shaderlm.errors import InputError
from shaderlm.text import ChatTemplate, TextStream, Tokenizer, Vocabulary

DATA = Path(__file__).parent / "data"
VOCABULARIES = ("gpt-2", "llama-spm", "phi-3")


@cache
def metadata(name: str) -> dict[str, Any]:
    reader = GGUFReader(DATA / "vocab" / f"{name}.gguf")
    return {key: field.contents() for key, field in reader.fields.items()}


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(Vocabulary.from_metadata(metadata(name)))


def recorded(name: str) -> list[tuple[str, list[int]]]:
    """Texts and the ids that llama.cpp gives for them, no special tokens added."""
    file = DATA / "vocab" / f"{name}.gguf"
    texts = Path(f"{file}.inp").read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().split("\n")[: len(texts)]
    assert len(lines) == len(texts)
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_recorded_text(name: str) -> None:
    for text, ids in recorded(name):
        assert tokenizer(name).encode(text) == ids, repr(text)
        assert tokenizer(name).decode(ids) == text


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=40))
def test_decode_undoes_encode(name: str, text: str) -> None:
    assert tokenizer(name).decode(tokenizer(name).encode(text)) == text


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(alphabet="aé€😀 \n", max_size=20))
def test_a_stream_gives_whole_characters_and_the_same_text(name: str, text: str) -> None:
    stream = TextStream(tokenizer(name))
    ids = tokenizer(name).encode(text)
    pieces = [*(stream.push(token) for token in ids), stream.finish()]
    assert not any("\ufffd" in piece for piece in pieces)
    prefix = " " if tokenizer(name).vocabulary.add_space_prefix and text else ""
    assert "".join(pieces) == prefix + text


def test_a_stop_string_across_tokens_ends_the_stream() -> None:
    words = tokenizer("gpt-2")
    stream = TextStream(words, stop=["END of", "never"])
    seen = "".join(stream.push(token) for token in words.encode("one E two EN three END of it"))
    assert seen == "one E two EN three "
    assert stream.stopped
    assert stream.push(words.encode("more")[0]) == ""
    assert stream.finish() == ""


def test_what_only_looked_like_a_stop_string_comes_out_at_the_end() -> None:
    words = tokenizer("gpt-2")
    stream = TextStream(words, stop=["###"])
    assert "".join(stream.push(token) for token in words.encode("a ##")) == "a "
    assert stream.finish() == "##"
    assert not stream.stopped


def test_special_tokens_are_text_unless_they_are_asked_for() -> None:
    phi = tokenizer("phi-3")
    end = phi.vocabulary.tokens.index("<|end|>")
    assert end not in phi.encode("say <s> and stop")
    assert phi.encode("<|end|>", parse_special=True)[-1] == end
    assert phi.vocabulary.bos not in phi.encode("<s>")
    assert phi.encode("hi", add_special=True)[0] == phi.vocabulary.bos
    assert {end, phi.vocabulary.eos} <= phi.stop_ids
    assert phi.decode([end]) == ""


def test_the_template_of_a_checkpoint() -> None:
    vocabulary = tokenizer("phi-3").vocabulary
    assert vocabulary.chat_template
    template = ChatTemplate(vocabulary.chat_template, bos="<s>", eos="</s>")
    text = template.render([{"role": "user", "content": "Hi {{ 7 * 7 }}"}])
    assert text == "<s><|user|>\nHi {{ 7 * 7 }}<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ([{"role": "wizard", "content": "x"}], "'wizard'"),
        ([{"role": "user"}], "content"),
        (["hello"], "'str'"),
    ],
)
def test_bad_messages(messages: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ChatTemplate("{{ messages[0].content }}").render(messages)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "broken"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ nothing.here.at.all }}", "failed"),
    ],
)
def test_templates_are_not_trusted(source: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "unigram"}, "'unigram'"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.tokens": None}, "list of strings"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "repeated"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "one entry per token"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["nopair"]}, "pairs"),
        ({"tokenizer.ggml.eos_token_id": 1 << 20}, "eos_token_id"),
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon'"),
    ],
)
def test_broken_vocabularies_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Tokenizer(Vocabulary.from_metadata({**metadata("gpt-2"), **change}))


@pytest.mark.parametrize("token", [-1, 1 << 30])
def test_unknown_ids_are_refused(token: int) -> None:
    with pytest.raises(InputError, match="token id"):
        tokenizer("gpt-2").decode([token])


@pytest.mark.parametrize(("text", "words"), [(b"x", "bytes"), (None, "NoneType"), ("a\ud800", "half a character")])
def test_only_text_is_encoded(text: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tokenizer("gpt-2").encode(text)
