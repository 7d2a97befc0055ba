"""The package text: token ids as llama.cpp gives them, whole characters only, templates in a sandbox."""

from __future__ import annotations

import itertools
import re
import threading
import time
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shaderlm.errors import InputError, ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.text import ChatTemplate, TextStream, Tokenizer, Vocabulary
from shaderlm.text.vocabulary import CONTROL, NORMAL

from .tiers import examples
from .tiny_models import tiny_metadata

DATA = Path(__file__).parent / "data"
VOCABULARIES = ("gpt-2", "llama-spm", "phi-3")


ONE_MESSAGE = [{"role": "user", "content": "a<b> & 'ü'"}]


def call(name: str, arguments: str) -> dict[str, Any]:
    """A message that calls a function."""
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@cache
def metadata(name: str) -> dict[str, Any]:
    with GgufFile.open(DATA / "vocab" / f"{name}.gguf") as file:
        return dict(file.metadata)


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
@settings(max_examples=examples(150), derandomize=True)
@given(text=st.text(max_size=40))
@example(text="▁")
def test_decode_undoes_encode(name: str, text: str) -> None:
    if tokenizer(name).vocabulary.kind == "spm":  # SentencePiece writes a space as ▁, which nobody tells from its own
        text = text.replace("▁", " ")
    assert tokenizer(name).decode(tokenizer(name).encode(text)) == text


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=examples(100), derandomize=True)
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


def test_a_character_whose_end_never_comes_is_left_out() -> None:
    words = tokenizer("gpt-2")
    for text in ("a€", "ab😀"):
        whole = text.encode()
        for cut in range(1, len(whole)):
            stream = TextStream(words)
            ids = [words.bytes_by_token.index(bytes([byte])) for byte in whole[:cut]]
            found = "".join(map(stream.push, ids)) + stream.finish()
            assert found == whole[:cut].decode(errors="ignore")
    stream = TextStream(words)
    wrong = [words.bytes_by_token.index(bytes([byte])) for byte in b"a\xff\xe2b"]
    assert "".join(map(stream.push, wrong)) + stream.finish() == "a\ufffd\ufffdb", "broken bytes before it are not"


@settings(max_examples=examples(200), derandomize=True)
@given(text=st.text("ab#", max_size=30), stop=st.lists(st.text("ab#", min_size=1, max_size=5), max_size=3))
def test_a_stop_string_is_never_sent_in_part(text: str, stop: list[str]) -> None:
    words = tokenizer("gpt-2")
    stream = TextStream(words, stop)
    sent, shown = "", ""
    for letter in text:
        sent += letter
        shown += stream.push(words.bytes_by_token.index(letter.encode()))
        ends = [at for at in (sent.find(one) for one in stop) if at >= 0]
        assert stream.stopped == bool(ends)
        if ends:  # the first string that is complete ends the text; of several at once, the one that began first
            assert shown == sent[: min(ends)]
            break
        held = sent[len(shown) :]
        assert sent.startswith(shown)
        assert not held or any(one.startswith(held) for one in stop), "no more is held back than may become a string"
        assert not any(sent.endswith(one[:n]) for one in stop for n in range(len(held) + 1, len(one)))
    assert shown + stream.finish() == (shown if stream.stopped else text)


def test_what_only_looked_like_a_stop_string_comes_out_at_the_end() -> None:
    words = tokenizer("gpt-2")
    stream = TextStream(words, stop=["###"])
    assert "".join(stream.push(token) for token in words.encode("a ##")) == "a "
    assert stream.finish() == "##"
    assert not stream.stopped


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """A busy machine may keep them waiting as well, so that one of several times will do."""
    assert any(_others_run() for _ in range(5)), "they wait for the end"


def _others_run() -> bool:
    encode = tokenizer("gpt-2").encode
    encode("its tables are made")
    text, begun, over, seen = "some words of a text, " * 20_000, threading.Event(), threading.Event(), list[float]()

    def look() -> None:
        begun.set()
        while not over.is_set():
            seen.append(time.monotonic())
            time.sleep(0)

    thread = threading.Thread(target=look)
    thread.start()
    begun.wait()
    first = time.monotonic()
    encode(text)
    last = time.monotonic()
    over.set()
    thread.join()
    looks = [first, *(each for each in seen if first < each < last), last]
    gap = max(b - a for a, b in itertools.pairwise(looks))
    return gap < 0.5 * (last - first)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_text_has_no_fewer_tokens_than_said(name: str) -> None:
    texts = [text for text, _ in recorded(name)]
    for text in [*texts, " " * 5000, "\u1100\u1161\u11a8" * 100, *tokenizer(name).special_tokens]:
        assert tokenizer(name).min_tokens(text) <= len(tokenizer(name).encode(text))
    assert tokenizer(name).min_tokens("ab" * 50_000) > 10


def test_spaces_are_cleaned_only_on_request() -> None:
    phi = tokenizer("phi-3")
    text = "Hi , it 's a cat . Is n't it ? Rock ' n ' roll"
    ids = phi.encode(text)
    assert phi.decode(ids) == text
    assert phi.decode(ids, clean_spaces=True) == "Hi, it's a cat. Isn't it? Rock'n'roll"


def test_tokens_of_phi3_take_the_spaces_after_them() -> None:
    """As its tokenizer.json says of them (rstrip), and no GGUF file."""
    phi = tokenizer("phi-3")
    chat = "<|user|>\nSYS\nHI<|end|>\n<|assistant|>\n"
    assert phi.encode(chat, add_special=True) == [1, 32010, 317, 21554, 13, 17628, 32007, 32001]
    assert phi.encode("a<|endoftext|> b") != phi.encode("a<|endoftext|>b")
    assert phi.encode("a <|end|>") != phi.encode("a<|end|>")
    marked = "<|user|>\nSay <|e\ue000nd|>\n now<|end|>\n"
    inside = phi.encode("Say <|end|>\n now", parse_special=False)
    assert phi.encode_marked(marked, "\ue000") == [32010, *inside, 32007]
    others = {**metadata("phi-3"), "general.name": "other"}
    assert tokenizer("phi-3").vocabulary.strip_after
    assert not Vocabulary.from_metadata({**others, "general.architecture": "llama"}).strip_after
    assert Vocabulary.from_metadata({**others, "general.architecture": "phi3"}).strip_after


@pytest.mark.parametrize(
    "given", ["", "[]", '{"before": []}', '{"before": [-1], "after": []}', 3, '{"before": 1, "after": 2}']
)
def test_tokens_that_take_spaces_must_be_listed(given: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.stripping must"):
        Vocabulary.from_metadata({**metadata("phi-3"), "tokenizer.stripping": given})


def test_the_text_of_the_unknown_token() -> None:
    llama = tokenizer("llama-spm")
    assert llama.encode("a<unk>") == [263, 0]
    assert 0 not in llama.encode("a<unk>", parse_special=False)


@pytest.mark.parametrize("kind", [CONTROL, NORMAL])
@pytest.mark.parametrize(
    "end",
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
    ],
)
def test_a_special_token_that_ends_turns_stops(end: str, kind: int) -> None:
    """Qwen's, Llama's, Phi's and Gemma's, in files that name no other end than EOS."""
    tiny = Vocabulary.from_metadata(tiny_metadata())
    at, tokens, types = tiny.tokens.index("<|im_start|>"), list(tiny.tokens), list(tiny.types)
    tokens[at], types[at] = end, kind
    assert (at in Tokenizer(replace(tiny, tokens=tokens, types=types)).stop_ids) == (kind == CONTROL)


def test_special_tokens_are_parsed_unless_told_otherwise() -> None:
    phi = tokenizer("phi-3")
    end = phi.vocabulary.tokens.index("<|end|>")
    assert phi.encode("<|end|>") == phi.encode("<|end|>", parse_special=True) == [end]
    assert phi.encode("<s>") == [phi.vocabulary.bos]
    assert end not in phi.encode("<|end|>", parse_special=False)
    assert phi.vocabulary.bos not in phi.encode("say <s> and stop", parse_special=False)
    assert phi.encode("hi", add_special=True)[0] == phi.vocabulary.bos
    assert {end, phi.vocabulary.eos} <= phi.stop_ids
    assert phi.stop_ids is phi.stop_ids  # found once, not per answer: walking 128,000 tokens takes milliseconds
    assert phi.decode([end]) == "<|end|>"
    assert phi.decode([end], skip_special=True) == ""


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=examples(100), derandomize=True)
@given(words=st.lists(st.sampled_from(["a", " the", "<|end|>", "<s>", "</s>", "<", "|end|>", "\n", "<|endoftext|>"])))
def test_marked_text_is_plain_and_the_rest_is_parsed(name: str, words: list[str]) -> None:
    """A mark inside every special token: as if none were parsed. No mark: as if all were."""
    text, mark = "".join(words), "\U000f0000"
    encoder = tokenizer(name)
    assert encoder.encode_marked(text, mark) == encoder.encode(text)
    template = ChatTemplate("{{ messages[0].content }}")
    marked, chosen = template.render_marked([{"role": "user", "content": text}], encoder.special_tokens)
    assert marked.replace(chosen, "") == text
    assert encoder.encode_marked(marked, chosen) == encoder.encode(text, parse_special=False)


@pytest.mark.parametrize(
    ("source", "request_"),
    [
        ("{{ messages[0].name }}", {"messages": [{"role": "user", "content": "", "name": "<|end|>"}]}),
        ("{{ style }}", {"kwargs": {"style": "<|end|>"}}),
        ("{{ style.a[0] }}", {"kwargs": {"style": {"a": ["x<|end|>"]}}}),
        ("{{ style|tojson }}", {"kwargs": {"style": {"<|end|>": 1}}}),
        ("{{ tools|tojson }}", {"tools": [{"<|end|>": "x"}]}),
        # Escapes of JSON are read after the request.
        (
            "{{ tools }}{{ messages[0].tool_calls[0].function.arguments|tojson }}",
            {"messages": [call("f", r'{"\u003c|end|>": "\u003c|end|\u003e"}')]},
        ),
        ("{{ messages[0].content }}", {"messages": [call("f", '{"a": "<|end|>"}')]}),
    ],
)
def test_nothing_of_a_request_is_a_special_token(source: str, request_: dict[str, Any]) -> None:
    encoder, template = tokenizer("phi-3"), ChatTemplate(source + "<|user|>")
    given = {"messages": ONE_MESSAGE, **request_}
    text, mark = template.render_marked(given.pop("messages"), encoder.special_tokens, **given)
    special = [encoder.special_tokens["<|end|>"], encoder.special_tokens["<|user|>"]]
    assert [each for each in encoder.encode_marked(text, mark) if each in special] == special[1:], text
    assert "<|end|>" in text.replace(mark, "")


def test_a_text_that_leaves_no_mark() -> None:
    every = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(InputError, match=r"all characters from U\+F0000 to U\+FFFFC; leave one of them out"):
        ChatTemplate("{{ messages[0].content }}").render_marked([{"role": "user", "content": every}], ["<s>"])


def test_conversations_that_are_too_long_or_too_deep() -> None:
    template, deep = ChatTemplate("x"), list[Any]()
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InputError, match="the conversation must be nested at most 100 levels deep"):
        template.render(ONE_MESSAGE, kwargs={"a": deep})
    with pytest.raises(InputError, match="the conversation must have at most 4,000,000 characters"):
        template.render([{"role": "user", "content": "x" * 4_000_001}])


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
        ([{"role": ["user"], "content": "x"}], "['user']"),
        ("hello", 'a list such as [{"role": "user", "content": "Hello"}], got str'),
        (5, '"content": "Hello"}], got int'),
        ({"role": "user", "content": "x"}, '"Hello"}], got dict'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "a part of the content of message 0 must be",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "models take text alone, got {'type': 'text'}"),
        ([{"role": "user", "content": ["x"]}], "models take text alone, got 'x'"),
    ],
)
def test_bad_messages(messages: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        ChatTemplate("{{ messages[0].content }}").render(messages)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "broken"),
        ("{% nonsense %}", "broken"),
        ("{% generation %}x", "broken"),
        (5, "tokenizer.chat_template must be a string, the file has a value of type int"),
        (["a", "b"], "tokenizer.chat_template must be a string, the file has a value of type list"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{{ strftime_now.__globals__.json }}", "failed"),
        ("{{ messages.clear() }}", "failed"),
        ("{{ messages[0].update(role='x') }}", "failed"),
        ("{{ nothing.here.at.all }}", "failed"),
        ("{{ nothing|tojson }}", "failed"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ messages|length / 0 }}", "failed: division by zero"),
        ("{% for i in range(1000000) %}x{% endfor %}", "failed: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: maximum recursion depth"),
        ("{{ '%d' % 'x' }}", "failed"),
        ("{{ 'a'.encode('nope') }}", "failed: unknown encoding: nope"),
        ("{{ 2.0 ** 100000 }}", "failed"),
        ("{{ strftime_now(5) }}", "failed"),
    ],
)
def test_templates_are_not_trusted(source: Any, words: str) -> None:
    template = ChatTemplate(source)  # a model whose template is broken can be loaded
    for _ in range(2):
        with pytest.raises(ModelError, match=re.escape(words)) as caught:
            template.render(ONE_MESSAGE)
        assert "\n" not in str(caught.value)


def test_what_a_template_refuses_is_the_conversations_fault() -> None:
    with pytest.raises(InputError, match=r"refuses this conversation: roles must alternate$"):
        ChatTemplate("{{ raise_exception('roles must\n alternate') }}").render(ONE_MESSAGE)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{{ messages|tojson }}", """[{"role": "user", "content": "a<b> & 'ü'"}]"""),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{% set x = 'out' %}a{% generation %}{{ x }}{% set x = 'in' %}{% endgeneration %}{{ x }}", "aoutin"),
        ("{% set n = namespace(k=1) %}{% for m in messages %}{% set n.k = 2 %}{% endfor %}{{ n.k }}", "2"),
        ("{{ 'none' if tools is none and documents is none else 'some' }}", "none"),
        ("{% if add_generation_prompt %}\n  {{ bos_token }}{{ eos_token }}\n{% endif %}", "  <s></s>\n"),
    ],
)
def test_templates_as_checkpoints_have_them(source: str, text: str) -> None:
    assert ChatTemplate(source, bos="<s>", eos="</s>").render(ONE_MESSAGE) == text


def test_a_template_may_ask_for_the_date() -> None:
    before = datetime.now().strftime("%d %b %Y")
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(ONE_MESSAGE)
    assert text in (before, datetime.now().strftime("%d %b %Y"))


def with_entries(kind: str, **entries: Any) -> dict[str, Any]:
    """The metadata of a small vocabulary of byte-level BPE ("gpt2") or of pieces ("llama"), with these changes."""
    tokens = ["a", "b", "ab", "c", "<s>", "<0x0A>"]
    found = {"model": kind, "tokens": tokens, "token_type": [1, 1, 1, 1, 3, 6], "bos_token_id": 4}
    found |= {"pre": "gpt-2", "merges": ["a b"]} if kind == "gpt2" else {"scores": [0.0, -1.0, -2.0, -3.0, 0.0, 0.0]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**found, **entries}.items()}


def test_small_vocabularies_work_unless_they_are_broken() -> None:
    bytes_, pieces = (Tokenizer(Vocabulary.from_metadata(with_entries(model))) for model in ("gpt2", "llama"))
    assert bytes_.encode("abc") == [2, 3]
    assert pieces.encode("ab\n")[-2:] == [2, 5]
    assert bytes_.decode([2, 5, 4], skip_special=True) == "ab\n"
    assert not bytes_.stop_ids


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "bert", "'bert' (WordPiece) is not supported; 'gpt2', 'llama', 't5' and 'gemma4' are"),
        ("model", "unigram", "must be 'gpt2', 'llama', 't5' or 'gemma4', the file has 'unigram'"),
        ("model", None, "must be a string, the file has None"),
        ("model", [1, 2], "must be a string, the file has [1, 2]"),
        ("pre", [1, 2], "must be a string, the file has [1, 2]"),
        ("pre", 5, "must be a string, the file has 5"),
        ("tokens", None, "must be a list of strings, the file has None"),
        ("tokens", [], "must be a list of strings, the file has []"),
        ("tokens", "ab", "must be a list of strings, the file has 'ab'"),
        ("tokens", ["a", 5], "must be a list of strings, the file has 5 at 1"),
        ("tokens", ["a", ""], "must be strings that are not empty"),
        ("tokens", ["a", "a"], "must differ, 1 are repeated"),
        ("token_type", "abc", "must be a list of whole numbers from 0 to 6, the file has 'abc'"),
        ("token_type", 7, "must be a list of whole numbers from 0 to 6, the file has 7"),
        ("token_type", ["x"] * 6, "must be a list of whole numbers from 0 to 6, the file has 'x' at 0"),
        ("token_type", [1.0] * 6, "the file has 1.0 at 0"),
        ("token_type", [True] * 6, "the file has True at 0"),
        ("token_type", [1, 1, 1, 1, 1, 7], "the file has 7 at 5"),
        ("token_type", [1, -1, 1, 1, 1, 1], "the file has -1 at 1"),
        ("token_type", [1, 2], "must have one entry per token, 6; the file has 2"),
        ("token_type", [], "must have one entry per token, 6; the file has 0"),
        ("scores", ["x"] * 6, "must be a list of numbers, the file has 'x' at 0"),
        ("scores", 1.5, "must be a list of numbers, the file has 1.5"),
        ("scores", [0.0, float("nan"), 0, 0, 0, 0], "must be a list of numbers, the file has nan at 1"),
        ("merges", "a b", "must be a list of strings, the file has 'a b'"),
        ("merges", [1], "must be a list of strings, the file has 1 at 0"),
        *((f"{name}_token_id", 6, "from 0 to 5, the id of a token, the file has 6") for name in ("bos", "unknown")),
        *(
            ("eos_token_id", value, f"must be a whole number from 0 to 5, the id of a token, the file has {value!r}")
            for value in ("x", "1", [1, 2], 1.5, True, -1, 6, 1 << 32)
        ),
        *(
            (key, value, f"must be true or false, the file has {value!r}")
            for key in ("add_bos_token", "add_eos_token", "add_space_prefix")
            for value in (1, "true", [True])
        ),
    ],
)
def test_entries_of_a_wrong_kind_are_the_files_fault(model: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"tokenizer.ggml.{key} ") + ".*" + re.escape(words)):
        Vocabulary.from_metadata(with_entries(model, **{key: value}))


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("gpt2", {"merges": None}, "tokenizer.ggml.merges must be a list of strings, the file has None"),
        ("gpt2", {"merges": []}, "tokenizer.ggml.merges must be a list of strings, the file has []"),
        ("gpt2", {"merges": ["a b", "nopair"]}, "tokenizer.ggml.merges must hold pairs 'a b', the file has 'nopair'"),
        ("gpt2", {"merges": ["a zz"]}, "the file has 'a zz' but no token 'zz'"),
        ("gpt2", {"merges": ["zz a"]}, "the file has 'zz a' but no token 'zz'"),
        ("gpt2", {"merges": ["a c"]}, "the file has 'a c' but no token 'ac'"),
        ("gpt2", {"merges": [" a"]}, "the file has ' a' but no token ''"),
        ("gpt2", {"pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not known; it must be one of default, "),
        ("llama", {"scores": None}, "tokenizer.ggml.scores must have one entry per token, 6; the file has 0"),
        ("llama", {"scores": [0.0]}, "tokenizer.ggml.scores must have one entry per token, 6; the file has 1"),
        *((model, {"token_type": [6] * 6}, "says byte (6), the file has 'a' at 0") for model in ("gpt2", "llama")),
    ],
)
def test_entries_that_contradict_each_other_are_the_files_fault(model: str, change: Any, words: str) -> None:
    with pytest.raises(ModelError, match=re.escape(words)):
        Tokenizer(Vocabulary.from_metadata(with_entries(model, **change)))


@pytest.mark.parametrize("text", ["<0xZZ>", "<0x1>", "<0x0FF>", "0x0A", "<0x+1>", "<0x 1>"])
def test_byte_tokens_name_a_byte(text: str) -> None:
    tokens = ["a", "b", "ab", "c", "<s>", text]
    with pytest.raises(ModelError, match=r"must have '<0x00>' … '<0xFF>'.* at 5"):
        Tokenizer(Vocabulary.from_metadata(with_entries("llama", tokens=tokens)))


def test_a_huge_wrong_value_makes_a_short_message() -> None:
    with pytest.raises(ModelError) as caught:
        Vocabulary.from_metadata(with_entries("gpt2", token_type="x" * 100_000))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("token", [-1, 1 << 30])
def test_unknown_ids_are_refused(token: int) -> None:
    with pytest.raises(InputError, match="token id"):
        tokenizer("gpt-2").decode([token])


@pytest.mark.parametrize(("ids", "words"), [(["a"], "'a'"), ([1.5], "1.5"), ([None], "None"), (5, "got int")])
def test_only_whole_numbers_are_decoded(ids: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tokenizer("gpt-2").decode(ids)


@pytest.mark.parametrize(("text", "words"), [(b"x", "bytes"), (None, "NoneType"), ("a\ud800", "half a character")])
def test_only_text_is_encoded(text: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tokenizer("gpt-2").encode(text)


# What servers ask of templates ---------------------------------------------------------------------------


def test_a_content_may_come_in_parts() -> None:
    """As the server takes it. A list that is read from JSON is a list; a tuple is as good."""
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    assert template.render([{"role": "user", "content": tuple(parts)}]) == "one\ntwo"


def test_a_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " It is "}]
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}!")
    assert template.render(messages, continue_final_message=True) == "<user>Hi<end><assistant>It is "
    with pytest.raises(InputError, match="leaves out the last message"):
        ChatTemplate("{{ messages[0].content }}").render(messages, continue_final_message=True)


def test_a_template_sees_tools_calls_and_variables() -> None:
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
    ]
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}{{ messages[1].tool_call_id }}{{ tools[0].a }}{{ v }}"
    assert ChatTemplate(source).render(messages, tools=[{"a": 2}], kwargs={"v": 3}) == "1c23"
    with pytest.raises(InputError, match="'tools' is set by other means"):
        ChatTemplate(source).render(messages, kwargs={"tools": 3})
    call["function"]["arguments"] = "[1]"
    with pytest.raises(InputError, match=r"a tool call of message 0 must have arguments that are a JSON object"):
        ChatTemplate(source).render(messages)
