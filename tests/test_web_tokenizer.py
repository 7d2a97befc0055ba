"""tokenizer.js in Node: the ids and texts of Python, for every vocabulary, split and rule that an export can have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.text import Tokenizer, Vocabulary
from shaderlm.text.splits import SPLITS
from shaderlm.text.vocabulary import CONTROL, USER_DEFINED
from shaderlm.web.expressions import all_characters
from shaderlm.web.text import tokenizer_json

from .test_sentencepiece import RECORDED, file_of
from .test_sentencepiece import tokenizer_of as sentencepiece
from .test_text import DATA, VOCABULARIES, recorded
from .tokenizer_cases import different, load_job, random_texts, run

NAMES = (*VOCABULARIES, *RECORDED)
# One name of each split.
BY_SPLIT = {split: name for name, split in SPLITS.items()}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name not in VOCABULARIES:
        return sentencepiece(file_of(name))
    with GgufFile.open(DATA / "vocab" / f"{name}.gguf") as file:
        return Tokenizer(Vocabulary.from_metadata(file.metadata))


@cache
def small_vocabulary() -> Vocabulary:
    """The first tokens of GPT-2, and some that are added."""
    whole = tokenizer_of("gpt-2").vocabulary
    added = ["<|end|>", "<|end|>x", "  ", "<tool>", "İé"]
    tokens = [*whole.tokens[:3000], *added]
    known = set(tokens)
    merges = [merge for merge in whole.merges[:3000] if merge.replace(" ", "") in known]
    types = [*whole.types[:3000], CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, USER_DEFINED]
    return replace(whole, tokens=tokens, types=types, merges=merges, scores=[], bos=None, eos=3000)


def with_rules(vocabulary: Vocabulary, **rules: Any) -> Tokenizer:
    """By the rules of a tokenizer.json."""
    return Tokenizer(replace(vocabulary, rules=json.dumps(rules)))


# Vocabularies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_text(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    texts = recorded(name) if name in VOCABULARIES else RECORDED[name]
    special = name in VOCABULARIES
    jobs: list[dict[str, Any]] = [load_job(tokenizer)]
    jobs += [{"encode": text, "parseSpecial": special} for text, _ in texts]
    jobs += [{"decode": ids} for _, ids in texts]
    found = run(tmp_path, jobs)[1:]
    assert found[: len(texts)] == [ids for _, ids in texts]
    assert found[len(texts) :] == [tokenizer.decode(ids, skip_special=True) for _, ids in texts]


@pytest.mark.parametrize("name", NAMES)
def test_random_texts(name: str, tmp_path: Path) -> None:
    texts = [*random_texts(300, tokenizer_of(name), 3), "", "\0", "\0\0a\0", "▁", " ▁ ", "<0x41>", "\ufeffa"]
    assert different(tmp_path, tokenizer_of(name), texts, 3) == []


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_many_random_texts(name: str, tmp_path: Path) -> None:
    assert different(tmp_path, tokenizer_of(name), [*random_texts(10_000, tokenizer_of(name), 4)], 4) == []


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_messages_are_text(name: str, tmp_path: Path) -> None:
    """A mark within them, which is left out, keeps them from being tokens; others are tokens."""
    tokenizer, mark = tokenizer_of(name), "\U000f0000"
    special = [text for text in tokenizer.special_tokens if len(text) > 1]
    texts = [f"a {each[0]}{mark}{each[1:]} b{other} c" for each in special[:9] for other in special[:9]]
    texts += [
        text.replace(each, each[0] + mark + each[1:]) for each in special[:3] for text in ("x", each, f"{each}\n")
    ]
    assert texts
    found = run(tmp_path, [load_job(tokenizer), *({"encode": text, "mark": mark} for text in texts)])[1:]
    assert found == [tokenizer.encode_marked(text, mark) for text in texts]


# Rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", BY_SPLIT, ids=BY_SPLIT.values())
def test_every_split(split: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer(replace(small_vocabulary(), pre=BY_SPLIT[split]))
    assert different(tmp_path, tokenizer, [*random_texts(200, tokenizer, 7)], 7) == []


@pytest.mark.full
@pytest.mark.parametrize("split", BY_SPLIT, ids=BY_SPLIT.values())
def test_every_character_is_in_the_same_classes(split: Any, tmp_path: Path) -> None:
    """Also those that other versions of Unicode have, or have in other classes."""
    tokenizer = Tokenizer(replace(small_vocabulary(), pre=BY_SPLIT[split]))
    texts = [
        "".join(f"{before}{character}{after}" for character in all_characters())
        for before, after in (("", ""), ("a", "1"), (" ", " a"))
    ]
    found = run(tmp_path, [load_job(tokenizer), *({"encode": text} for text in texts)])[1:]
    assert [tokenizer.encode(text) == ids for text, ids in zip(texts, found, strict=True)] == [True] * len(texts)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = BYTES | {"use_regex": True}
PREFIX = GPT2 | {"add_prefix_space": True}
SPACES = {"type": "Split", "pattern": {"String": " "}, "invert": False, "behavior": "Isolated"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
ALL = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def splitting(expression: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": invert}


EXPRESSIONS = [
    r"\p{L}++|\p{N}{1,3}+| ?+[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s+(?!\S)|\s",
    r"(?>a+|the)x?|(?>\d+)(?!1)",
    r"(?i:'[sdmt]|'ll|'ve|'re)|\w+?e|.",
    r"(?i)the|an(?-i:d)|[k-n]+",
    r"^\s*\w+|\S+$|\A.|.\z|o\Z",
    r"\b\w|\B\S\b",
    r"[[:upper:]]+|[[a-z]&&[^aeiou]]{2,}|[]x\]^-]|[^\]a-z ]",
    r"(?<=[a-z])(?=[A-Z])|(?<!\s)\s{2,3}?|\h{,4}",
    r"\x41|\x{e9}|\u00df|\t\n\r|a{x|\/|\-|\p{^L}\P{N}|\p{Greek}|\p{Alpha}",
    r"(a|e)(?:b|c)*|x*|",
    r"\d*\K\d{3}|[a-f]+\K[g-z]+",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions(expression: str, tmp_path: Path) -> None:
    for behavior, invert in (("Isolated", False), ("MergedWithNext", True)):
        rule = {"type": "Sequence", "pretokenizers": [splitting(expression, behavior, invert), BYTES]}
        tokenizer = with_rules(small_vocabulary(), pre_tokenizer=rule)
        assert different(tmp_path, tokenizer, [*random_texts(150, tokenizer, 9)], 9) == []


RULES: Mapping[str, Sequence[dict[str, Any]]] = {
    "digits": [{"type": "Digits", "individual_digits": True}, BYTES],
    "runs of digits": [{"type": "Digits", "individual_digits": False}, GPT2],
    "prefix": [PREFIX],
    "falcon": [{"type": "Punctuation", "behavior": "Contiguous"}, GPT2, {"type": "Digits", "individual_digits": False}],
    "spaces": [{"type": "WhitespaceSplit"}, BYTES],
    **{f"punctuation {each}": [{"type": "Punctuation", "behavior": each}, BYTES] for each in ALL},
    **{f"text {each}": [SPACES | {"behavior": each}, BYTES] for each in ALL},
    **{f"others {each}": [splitting(r"\p{L}+ ?", each, invert=True), BYTES] for each in ALL},
    **{f"empty {each}": [splitting(r"(?=[A-Z])| (?=\d)", each), BYTES] for each in ALL},
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_byte_level_vocabulary(name: str, tmp_path: Path) -> None:
    rule = {"type": "Sequence", "pretokenizers": RULES[name]}
    tokenizer = with_rules(small_vocabulary(), pre_tokenizer=rule)
    assert different(tmp_path, tokenizer, [*random_texts(150, tokenizer, 11)], 11) == []


NORMALIZERS: Mapping[str, dict[str, Any] | list[dict[str, Any]]] = {
    **{form: {"type": form} for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")},
    "Strip": {"type": "Strip", "strip_left": True, "strip_right": True},
    "Strip right": {"type": "Strip", "strip_left": False, "strip_right": True},
    "Prepend": {"type": "Prepend", "prepend": "x"},
    "Replace": {"type": "Replace", "pattern": {"Regex": r"\s+|e*"}, "content": "$&▁"},
    "Sequence": [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}],
}


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("flag", ["normalized", "lstrip", "rstrip", "single_word"])
def test_normalizers_and_flags_of_added_tokens(name: str, flag: str, tmp_path: Path) -> None:
    rule = NORMALIZERS[name]
    rule = {"type": "Sequence", "normalizers": rule} if isinstance(rule, list) else rule
    vocabulary = small_vocabulary()
    added = [{"content": text, flag: i != 3} for i, text in enumerate(vocabulary.tokens[-5:])]
    tokenizer = with_rules(vocabulary, normalizer=rule, pre_tokenizer=GPT2, added_tokens=added)
    texts = [*random_texts(60, tokenizer, 13)]
    texts += [
        f"{a}{text}{b}" for text in vocabulary.tokens[-5:] for a in ("", "x ", "é", "\n\t") for b in ("", "_", " y")
    ]
    assert different(tmp_path, tokenizer, texts, 13) == []


PIECES: Mapping[str, dict[str, Any]] = {
    "never": METASPACE | {"prepend_scheme": "never"},
    "always": METASPACE,
    "first": METASPACE | {"prepend_scheme": "first", "split": False},
    "xlm-r": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]},
    "gemma": SPACES | {"behavior": "MergedWithPrevious"},
}
MODELS: Sequence[dict[str, Any]] = [
    {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"},
    {"fuse_unk": True, "unk_token": "<unk>"},
    {"unk_token": "<unk>", "ignore_merges": True},
    {},
]


@pytest.mark.parametrize("name", PIECES)
def test_rules_of_pieces(name: str, tmp_path: Path) -> None:
    for base in ("bpe-bytes", "unigram-bytes"):
        own = tokenizer_of(base)
        model = json.loads(own.encoder_json())["model"]
        vocabulary = own.vocabulary
        unknown = vocabulary.unknown
        if base == "bpe-bytes":
            vocabulary = replace(vocabulary, merges=[" ".join(pair) for pair in model["merges"]])
        for options in (
            MODELS if base == "bpe-bytes" else [{"unk_id": unknown, "byte_fallback": on} for on in (True, False)]
        ):
            rules = {"model": {"type": model["type"], **options}, "pre_tokenizer": PIECES[name]}
            tokenizer = with_rules(vocabulary, **rules)
            assert different(tmp_path, tokenizer, [*random_texts(60, tokenizer, 17)], 17) == []
